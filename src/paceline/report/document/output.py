"""Where a report is written: a file that a user names, or one in the folder of the records."""

from __future__ import annotations

import os
from pathlib import Path

from paceline.common.files import write_whole
from paceline.common.values import is_path, shortened
from paceline.errors import BadRequest


def target(folder: str | Path, file: str | Path | None, name: str) -> Path:
    """Return the file to write; a name that cannot be a file is refused before any work."""
    for given in (str(folder), str(file or name)):
        if not is_path(given):
            raise BadRequest(f"{shortened(given)} is not a path")
    if not file and not Path(folder).is_dir():  # the reader says what a folder of records is
        return Path(folder) / name
    path = Path(file) if file else Path(folder) / name
    if path.is_dir():
        raise BadRequest(
            f"{path} is a folder: name a file, such as {path / name} (the folder of the records"
            " comes before the option: paceline report DIR --pdf FILE)"
        )
    if not path.parent.is_dir():
        raise BadRequest(f"{path} cannot be written: there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise BadRequest(f"{path} cannot be written: the folder {path.parent} is write-protected")
    return path


def written(path: Path, content: str | bytes) -> None:
    """Write a report, whole or not at all."""
    try:
        write_whole(path, content)
    except OSError as error:
        raise cannot(path, error) from None


def cannot(path: Path, error: OSError) -> BadRequest:
    return BadRequest(f"{path} cannot be written: {error.strerror}")
