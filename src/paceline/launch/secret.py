"""The secret that only the ranks of one run know, and how they get it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from paceline.errors import BadRequest

SECRET, SECRET_FILE = "PACELINE_SECRET", "PACELINE_SECRET_FILE"
BOARD = "PACELINE_BOARD"  # the address of the board that `paceline launch` hosts
LAUNCHER = "PACELINE_LAUNCHER"  # the launcher's name in the record, where `paceline launch` has one
HOSTS = "PACELINE_HOSTS"  # the hosts of `paceline launch --hosts`, with commas between them


def secret_of(env: Mapping[str, str]) -> bytes:
    """Return the secret from the environment (`paceline launch` sets it) or from the user's file.

    Empty where there is neither.
    """
    if SECRET in env:
        return bytes.fromhex(env[SECRET])
    if SECRET_FILE not in env:
        return b""
    path = Path(env[SECRET_FILE])
    try:
        if path.stat().st_mode & 0o077:
            raise BadRequest(f"{SECRET_FILE}={path} can be read by other users: chmod 600 {path}")
        content = path.read_bytes().strip()
    except OSError as error:
        raise BadRequest(f"{SECRET_FILE}={path} cannot be read: {error.strerror}") from None
    if len(content) < 16:
        raise BadRequest(
            f"{SECRET_FILE}={path} holds {len(content)} bytes; a secret needs 16 or more"
        )
    return content
