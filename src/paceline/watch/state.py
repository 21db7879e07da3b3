"""What the page shows: the folder's run or study as one small JSON picture."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from paceline.common.values import is_path, shortened
from paceline.errors import BadRequest
from paceline.watch.run import RunView
from paceline.watch.study import StudyView


class Watched:
    """The folder that is watched. It may be empty: then the picture says so until a run begins.

    Nothing outside the folder is read. Several threads may ask; one reads at a time.
    """

    def __init__(self, folder: str | Path) -> None:
        self.root = Path(folder).resolve()
        self.given = str(folder)
        self._lock = threading.Lock()
        self._run: RunView | None = None
        self._study: StudyView | None = None

    def picture(self, run: str | None = None) -> dict[str, Any]:
        """Read what is new and return the picture; `run` chooses one of a study's runs."""
        with self._lock:
            head: dict[str, Any] = {"folder": self.given, "study": None, "run": None}
            if self._is_study():
                self._study = self._study or StudyView(self.root)
                self._study.refresh()
                shown = self._study.shown(run)
                head["study"] = self._study.picture()
            else:
                self._run = self._run or RunView(self.root, self.root)
                shown = self._run
            if shown is not None:
                shown.refresh()
                head["run"] = shown.picture() if shown.begun else None
            return head

    def _is_study(self) -> bool:
        """Whether it holds a study, or runs in folders of their own; otherwise it is a run."""
        if (self.root / "study.json").is_file():
            return True
        if any((self.root / name).exists() for name in ("events", "config.json", "run.json")):
            return False
        try:
            return any((p / "events").is_dir() for p in self.root.iterdir())
        except OSError:
            return False


def existing(folder: str) -> Path:
    """Return the folder, or refuse one that does not exist."""
    if not is_path(folder):
        raise BadRequest(f"{shortened(folder)} is not a path")
    path = Path(folder)
    if not path.exists():
        raise BadRequest(
            f"there is no folder {folder}: give the folder of a run or a study (paceline train"
            " --watch opens the page together with the run)"
        )
    if not path.is_dir():
        raise BadRequest(f"{folder} is a file: give the folder of a run or a study")
    return path
