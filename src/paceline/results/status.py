"""The status of a run: under way, ended, or killed, and what each of its ranks does or did.

Nothing here needs PyTorch, so that the picture appears at once.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.common.values import is_path, shortened
from paceline.errors import BadRequest
from paceline.record.lock import HELD, refuse_held
from paceline.record.reader import read_run
from paceline.results.past import past_runs
from paceline.transport.status.line import FOLDER
from paceline.transport.status.picture import Shown, lines, sentence, take_picture


@dataclass(frozen=True)
class Status:
    """The status of one run."""

    folder: Path
    status: str  # running, killed, or that of its record: completed, failed, interrupted, ...
    error: str | None
    picture: list[Shown]

    @property
    def headline(self) -> str:
        """Who waits for whom in a run that is under way; how a run has ended."""
        if self.status == "running":
            return sentence(self.picture)
        if self.status == "killed":
            return "it has ended without a record: its processes were killed"
        return f"{self.status}: {self.error}" if self.error else self.status

    def lines(self, stacks: bool = False) -> list[str]:
        """The status as text."""
        told = [f"{self.folder}: {self.headline}"]
        if self.picture and self.status != "running":
            told.append("its last picture:")
        table = lines(self.picture, stacks) if self.picture else []
        told += table[1:]
        if self.status == "completed":
            told.append(f"its results: paceline show {self.folder}")
        return told

    def plain(self) -> dict[str, Any]:
        return {
            "folder": str(self.folder),
            "status": self.status,
            "headline": self.headline,
            "ranks": [shown.plain() for shown in self.picture],
        }


def newest(folder: str | Path = "runs") -> Path:
    """The newest run of a folder; a run that is under way comes first."""
    if not Path(folder).is_dir():
        raise BadRequest(f"there is no folder {folder} here: say which run, paceline status RUN")
    found = past_runs(folder)[0]
    if not found:
        raise BadRequest(f"{folder} holds no run: say which one, paceline status RUN")
    running = [run for run in found if run.status == "running"]
    return Path((running or found)[0].folder)


def read_status(run: str | Path) -> Status:
    """Read the status of a run, whatever state its folder is in."""
    if not is_path(str(run)):
        raise BadRequest(f"{shortened(str(run))} is not a path")
    folder = Path(run)
    if not folder.is_dir():
        raise BadRequest(f"{folder} is not the folder of a run")
    known = ("run.json", "config.json", "events", FOLDER)
    if not any((folder / name).exists() for name in known):
        raise BadRequest(f"{folder} is not the folder of a run: it has no config.json")
    if (folder / FOLDER).is_dir() and _is_held(folder):
        return Status(folder, "running", None, take_picture(folder / FOLDER))
    if (folder / "run.json").exists():
        record = read_run(folder)
        error = record.get("error")
        return Status(folder, str(record["status"]), error, _kept(record.get("last")))
    if _is_held(folder):
        return Status(folder, "running", None, [])
    return Status(folder, "killed", None, take_picture(folder / FOLDER))


def _is_held(folder: Path) -> bool:
    """Whether a process works on the run; where that cannot be told, whether a rank is alive."""
    try:
        refuse_held(folder, HELD)
    except BadRequest:
        return True
    return any(s.state in ("running", "stopped") for s in take_picture(folder / FOLDER, False))


def _kept(last: Any) -> list[Shown]:
    """The last picture in a record, as far as it can be read."""
    found = []
    for said in last if isinstance(last, list) else ():
        with suppress(TypeError, ValueError):
            found.append(Shown.read(said))
    return found
