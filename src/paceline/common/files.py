"""Files that other processes may read at any time: written whole, or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline.errors import BadRequest

Content = str | bytes | Callable[[Path], None]

# What a file system answers that cannot sync a folder, or a folder that may not be read.
NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES)


def write_whole(
    path: Path, content: Content, durable: bool = False, mode: int | None = None
) -> None:
    """Write a file under another name in the same folder, then rename it to `path`.

    A reader sees the old content or the new one, never a part. `content` is text (UTF-8), bytes, or
    a function that writes the file at the path it is given. With `durable`, content and name are on
    the disk when this returns. `mode` sets the file's permissions, from its creation on; otherwise
    they follow the umask, whatever the function does. On failure the file aside is removed and the
    error raised.
    """
    aside = name_aside(path)
    try:
        if callable(content):
            with usual_mode(aside, mode):
                content(aside)
        else:
            _create(aside, content.encode() if isinstance(content, str) else content, mode)
            if mode is not None:
                aside.chmod(mode)
        if durable:
            sync(aside)
        os.replace(aside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        raise
    if durable:
        sync_folder(path.parent)


@contextmanager
def usual_mode(path: Path, mode: int | None = None) -> Iterator[None]:
    """Create a file that the body writes, and give it the permissions of all other files.

    These follow the umask. Some libraries let only the owner read what they write.
    """
    _create(path, b"", mode)
    usual = path.stat().st_mode if mode is None else mode
    yield
    path.chmod(usual)


def rename_whole(aside: Path, path: Path) -> None:
    """Rename a finished file or folder to `path` so that a power failure cannot undo it.

    The caller has synced the files inside a folder. A folder that is already at `path` is removed
    first, because a rename does not replace one.
    """
    if aside.is_dir():
        sync_folder(aside)
        shutil.rmtree(path, ignore_errors=True)
    else:
        sync(aside)
    os.replace(aside, path)
    sync_folder(path.parent)


def name_aside(path: Path) -> Path:
    """Return a name in the same folder that no other process uses; it begins with a dot."""
    return path.with_name(f".{path.name}.{os.urandom(8).hex()}.part")


def sweep(folder: Path) -> None:
    """Remove files aside that a killed process has left in a folder or in one of its folders.

    The caller is the only process that writes there.
    """
    for pattern in (".*.part", "*/.*.part"):
        for left in folder.glob(pattern):
            if re.fullmatch(r"\..+\.[0-9a-f]{16}\.part", left.name) and left.is_file():
                with contextlib.suppress(OSError):
                    left.unlink()


def sync(path: Path) -> None:
    """Wait until a file's content is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_folder(folder: Path) -> None:
    """Wait until a folder's names are on the disk, where the file system can do that.

    Without this a power failure after a rename brings the old file back.
    """
    try:
        sync(folder)
    except OSError as error:
        if error.errno not in NO_FOLDER_SYNC:
            raise


def _create(path: Path, content: bytes, mode: int | None) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with open(os.open(path, flags, 0o666 if mode is None else mode), "wb") as file:
        file.write(content)


def read_toml(
    path: str | Path, hint: str = "FILE is a TOML file with options; a data set goes into --data"
) -> dict[str, Any]:
    """Read a TOML file; what is wrong with it becomes a `BadRequest`."""
    path = Path(path)
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise BadRequest(f"{path} does not exist ({hint})") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadRequest(f"{path} cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise BadRequest(f"{path} is not valid TOML: {error}") from None
