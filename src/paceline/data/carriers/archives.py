"""Verify an archive, and extract the wanted files from it. No code of an archive is executed."""

from __future__ import annotations

import hashlib
import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from paceline.data.carriers.base import Unreachable


def verify(file: BinaryIO, sha256: str) -> None:
    """Refuse an archive whose SHA-256 is not the pinned one. Call this before reading members."""
    digest = hashlib.sha256()
    while chunk := file.read(1 << 20):
        digest.update(chunk)
    found = digest.hexdigest()
    if found != sha256:
        raise Unreachable(
            f"the archive is not the one it should be (its SHA-256 is {found[:12]}..., not"
            f" {sha256[:12]}...)"
        )
    file.seek(0)


def extract(file: BinaryIO, name: str, wanted: Mapping[str, Path]) -> None:
    """Write each wanted member to the path given for it.

    No path is taken from the archive, and only regular files are read: links are refused.
    """
    try:
        if name.endswith((".whl", ".zip")):
            _extract_from_zip(file, wanted)
        else:
            _extract_from_tar(file, wanted)
    except (
        OSError,
        EOFError,
        ValueError,
        RuntimeError,
        tarfile.TarError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        raise Unreachable(f"the package is not as expected: {error}") from None


def into(folder: Path, members: tuple[str, ...]) -> dict[str, Path]:
    """Map each member to a file of its own name in `folder`."""
    return {member: folder / Path(member).name for member in members}


def _extract_from_zip(file: BinaryIO, wanted: Mapping[str, Path]) -> None:
    with zipfile.ZipFile(file) as archive:
        for member, target in wanted.items():
            if member not in archive.namelist():
                raise ValueError(f"it has no {member}")
            with archive.open(member) as source, target.open("wb") as out:
                shutil.copyfileobj(source, out)


def _extract_from_tar(file: BinaryIO, wanted: Mapping[str, Path]) -> None:
    left = dict(wanted)
    with tarfile.open(fileobj=file) as archive:
        for member in archive:
            target = left.pop(member.name, None)
            if target is None:
                continue
            source = archive.extractfile(member) if member.isreg() else None
            if source is None:
                raise ValueError(f"{member.name} is not a regular file")
            with source, target.open("wb") as out:
                shutil.copyfileobj(source, out)
    if left:
        raise ValueError(f"it has no {next(iter(left))}")
