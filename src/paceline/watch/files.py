"""JSON files of a run or a study, read again only when they have changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.errors import BadRequest


class JsonFile:
    """The content of a file that is replaced as a whole; None while it is missing or damaged.

    A link that leads out of `root`, the folder that is watched, counts as missing.
    """

    def __init__(
        self, path: Path, root: Path, read: Callable[[Path], dict[str, Any]] | None = None
    ) -> None:
        self.path, self._root, self._read = path, root, read or _plain
        self.content: dict[str, Any] | None = None
        self.fault: str | None = None
        self.changed_at = 0.0  # by the clock of the file system
        self._seen: tuple[int, int, int] | None = None

    def refresh(self) -> bool:
        """Read the file if it is new. Returns whether it was."""
        try:
            if not inside(self._root, self.path):
                raise FileNotFoundError
            found = self.path.stat()
            seen = (found.st_ino, found.st_size, found.st_mtime_ns)
        except OSError:
            changed, self._seen = self._seen is not None, None
            self.content = self.fault = None
            return changed
        if seen == self._seen:
            return False
        self._seen, self.changed_at, self.fault = seen, found.st_mtime, None
        try:
            self.content = self._read(self.path)
        except (BadRequest, OSError, ValueError, RecursionError) as error:
            self.content, self.fault = None, str(error)
        return True


def _plain(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_text())
    if not isinstance(content, dict):
        raise BadRequest(f"{path} is damaged")
    return content


def inside(root: Path, path: Path) -> bool:
    """Whether a path, with all links followed, is in the folder that is watched."""
    return path.resolve().is_relative_to(root)
