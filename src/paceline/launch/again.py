"""`--resume auto`: go on with the run in --out, or begin it. For jobs that are started again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.common.values import is_path, shortened
from paceline.errors import BadRequest, PacelineError
from paceline.record import checkpoint
from paceline.record.lock import HELD, refuse_held
from paceline.record.reader import read_run
from paceline.request.earlier import AUTO, load_config
from paceline.request.job import Found


@dataclass(frozen=True)
class Again:
    """What a start that may be a repeated one has found."""

    found: Found = "nothing"  # in the folder, apart from a checkpoint
    resume: str | None = None  # the checkpoint to go on from
    notice: str | None = None

    @classmethod
    def read(cls, content: dict[str, Any]) -> Again:
        """Read what rank 0 wrote: TypeError if malformed."""
        return cls(**content)

    def applied(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options with the checkpoint to go on from in the place of `auto`."""
        rest = {k: v for k, v in options.items() if k != "resume" or v != AUTO}
        return {**rest, **({"resume": self.resume} if self.resume else {})}


def asks(options: Mapping[str, Any]) -> bool:
    """Whether the options ask to go on with the run in `out`, if there is one."""
    return options.get("resume") == AUTO


def folder_of(options: Mapping[str, Any]) -> Path:
    """Return the folder to go on in; refuse options that name none."""
    out = options.get("out")
    if not out:
        raise BadRequest(
            "--resume auto goes on with the run in a folder, or begins it there: say which with"
            " --out DIR"
        )
    if not is_path(str(out)):
        raise BadRequest(f"out={shortened(out)} is not a path")
    folder = Path(str(out))
    if folder.exists() and not folder.is_dir():
        raise BadRequest(f"out={out} is a file: name a folder")
    return folder


def look(options: Mapping[str, Any]) -> Again:
    """Look into the folder of the run: is it complete, can it go on, does it begin?"""
    folder = folder_of(options)
    if not (folder / "events").is_dir():
        return Again()
    refuse_held(folder, HELD)
    if (folder / "config.json").is_file():
        load_config(folder)  # refuses the folder of a loop of the user's own
    if (record := _record(folder)).get("status") == "completed":
        steps = record.get("result", {}).get("steps")
        return Again(
            "complete",
            None,
            f"the run in {folder} is complete already ({steps} steps), so nothing is left to do;"
            " for more, give --resume DIR and --epochs N instead of --resume auto",
        )
    try:
        newest, damaged = checkpoint.latest(folder, whole=True)
    except PacelineError as reason:
        return Again("begun", None, f"{reason}: the run begins again")
    step = checkpoint.about(newest)["step"]
    going_on = f"going on from step {step} of {folder}"
    return Again("begun", str(newest), f"{damaged}; {going_on}" if damaged else going_on)


def _record(folder: Path) -> dict[str, Any]:
    """Return the record of the run; an empty one where there is none that can be read."""
    try:
        return dict(read_run(folder))
    except PacelineError:
        return {}
