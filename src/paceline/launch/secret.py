"""What only the ranks of one run know: how a launcher hands it over, and bytes that carry its mark."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from pathlib import Path

from paceline.errors import BadRequest, TransportError

SECRET, SECRET_FILE = "PACELINE_SECRET", "PACELINE_SECRET_FILE"


def secret_of(env: Mapping[str, str]) -> bytes:
    """What `paceline launch` has put into the environment of its ranks, or the content of a file that a person names."""
    if SECRET in env:
        return bytes.fromhex(env[SECRET])
    if SECRET_FILE not in env:
        return b""
    path = Path(env[SECRET_FILE])
    try:
        if path.stat().st_mode & 0o077:
            raise BadRequest(f"{SECRET_FILE}={path} can be read by others: chmod 600 {path}")
        content = path.read_bytes().strip()
    except OSError as error:
        raise BadRequest(f"{SECRET_FILE}={path} cannot be read: {error.strerror}") from None
    if len(content) < 16:
        raise BadRequest(f"{SECRET_FILE}={path} holds {len(content)} bytes; a secret has 16 or more")
    return content


def seal(secret: bytes, content: bytes) -> bytes:
    """What only a rank that knows the run's secret could have written."""
    return hmac.digest(secret, b"serve" + content, "sha256") + content


def unseal(secret: bytes, sealed: bytes) -> bytes:
    mark, content = sealed[:32], sealed[32:]
    if not secret or not hmac.compare_digest(mark, hmac.digest(secret, b"serve" + content, "sha256")):
        raise TransportError("what came in worker 0's name does not carry the run's secret: it is not opened")
    return content
