"""Who does what in a run, and who waits for whom: made from the ranks' lines and stacks."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from paceline.transport.status.line import FOLDER, Seen, read_line, read_lines
from paceline.transport.status.process import State, state_of
from paceline.transport.status.stacks import Frame, ask_stacks, users_frame
from paceline.transport.waits import Posted, duration, slow_ranks, told, who_waits

LAST = "last.json"  # the picture that was taken just before the ranks were ended
STOPPED = "stopped (SIGSTOP); it goes on with SIGCONT"
HEADINGS = ("rank", "step", "does", "for", "computes", "at")
DOING: dict[str, str] = {
    "connect": "connecting to the other ranks",
    "set up": "setting up",
    "load": "loading the batch of step {next}",
    "compute": "computing step {step}",
    "exchange": "in the exchange of step {step}",
    "evaluate": "evaluating after step {step}",
    "save": "saving a checkpoint after step {step}",
    "finish": "finishing after step {step}",
}


@dataclass
class Shown:
    """One rank in a picture."""

    rank: int
    role: str
    host: str
    pid: int
    state: State
    step: int
    doing: str
    since_s: float  # for so long it has been doing that
    waits_for: list[int] | None  # None: it waits for no rank; empty: for all others
    waits_since_s: float | None
    what: str  # what it waits for
    idle: bool
    steps_per_s: float | None
    stack: str | None  # the innermost line of the user's own code
    frames: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"worker {self.rank}" if self.role == "worker" else f"{self.role} (rank {self.rank})"

    def plain(self) -> dict[str, Any]:
        return asdict(self)

    def kept(self) -> dict[str, Any]:
        """What a record keeps of a rank."""
        return {k: v for k, v in self.plain().items() if k not in ("frames", "pid")}

    @classmethod
    def read(cls, said: Any) -> Shown:
        """Read what `plain` or `kept` has made. The file may be damaged: TypeError then."""
        shown = cls(**{"pid": 0, "frames": [], **said})
        numbers = [shown.rank, shown.step, shown.since_s, shown.waits_since_s or 0.0]
        numbers += [shown.steps_per_s or 0.0, *(shown.waits_for or ())]
        words = [shown.role, shown.doing, shown.what, shown.stack or "", *shown.frames]
        right = all(isinstance(n, (int, float)) for n in numbers)
        if not right or not all(isinstance(word, str) for word in words):
            raise TypeError("not a rank")
        return shown


def take_picture(folder: Path, stacks: bool = True) -> list[Shown]:
    """What the ranks whose lines are in this folder do now, or did when they ended."""
    lines = read_lines(folder)
    frames = ask_stacks(folder, lines) if stacks else {}
    now = time.time()
    return [_shown(seen, frames.get(seen.rank, []), now) for seen in lines]


def _shown(seen: Seen, frames: list[Frame], now: float) -> Shown:
    state = state_of(seen.pid, seen.start, seen.machine)
    waits = seen.waits_since is not None
    frame = users_frame(frames)
    return Shown(
        rank=seen.rank,
        role=seen.role,
        host=seen.host,
        pid=seen.pid,
        state=state,
        step=seen.step,
        doing=doing(seen, state),
        since_s=round(max(0.0, now - seen.at), 3),
        waits_for=list(seen.waits_for) if waits else None,
        waits_since_s=round(max(0.0, now - seen.waits_since), 3) if seen.waits_since else None,
        what=seen.what,
        idle=seen.idle,
        steps_per_s=seen.steps_per_s,
        stack=frame.place if frame is not None else None,
        frames=[str(frame) for frame in frames],
    )


def doing(seen: Seen, state: State) -> str:
    """What a rank does, in words."""
    if seen.point is None:
        return f"done after step {seen.step}"
    words = DOING[seen.point].format(step=seen.step, next=seen.step + 1)
    if seen.role == "server" and seen.point == "exchange":
        words = f"serving step {seen.step}" if seen.step else "serving"
    if state == "stopped":
        return STOPPED
    return f"ended while {words}" if state == "ended" else words


def describe(folder: Path, ranks: Sequence[int]) -> dict[int, str]:
    """What these ranks do now: `computing step 17, model.py:41`. Unknown ones are left out."""
    read = [read_line(folder / f"rank-{rank}") for rank in ranks]
    lines = [seen for seen in read if seen is not None]
    frames = ask_stacks(folder, lines)
    said = {}
    for seen in lines:
        words = doing(seen, state_of(seen.pid, seen.start, seen.machine))
        frame = users_frame(frames.get(seen.rank, []))
        said[seen.rank] = f"{words}, {frame.place}" if frame is not None else words
    return said


def sentence(picture: Sequence[Shown]) -> str:
    """Who waits for whom, in one sentence."""
    if not picture:
        return "no rank has left a line about itself"
    if all(shown.state == "ended" for shown in picture):
        return "all ranks have ended"
    return waits(picture) or "no rank has waited for another for long"


def waits(picture: Sequence[Shown]) -> str | None:
    """Who waits for whom; None: no rank has waited for another for long."""
    alive = {shown.rank: shown for shown in picture if shown.state != "ended"}
    posted = {
        rank: Posted(tuple(shown.waits_for), shown.idle)
        for rank, shown in alive.items()
        if shown.waits_for is not None
    }
    waiting = [alive[rank] for rank, own in posted.items() if not own.idle]
    if not waiting:
        return None
    longest, size = max(waiting, key=lambda s: s.waits_since_s or 0.0), max(alive) + 1
    slow = [alive[rank] for rank in slow_ranks(posted, longest.rank, size) if rank in alive]
    ranks = who_waits(posted, [shown.rank for shown in slow], size) or [longest.rank]
    doing = [f"{s.doing}, {s.stack}" if s.stack else s.doing for s in slow]
    return told(
        [alive[rank].name for rank in ranks],
        longest.waits_since_s or 0.0,
        [shown.name for shown in slow],
        longest.what,
        doing if len(slow) == 1 else [],
    )


def lines(picture: Sequence[Shown], frames: bool = False) -> list[str]:
    """The picture as text: the sentence, a table, and with `frames` each rank's whole stack."""
    table = [HEADINGS, *rows(picture)] if picture else []
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    text = [sentence(picture)]
    for row in table:
        cells = [cell.ljust(wide) for cell, wide in zip(row, widths, strict=True)]
        text.append("  ".join(cells).rstrip())
    for shown in picture if frames else ():
        text += ["", f"{shown.name}, innermost call first:"]
        text += [f"  {frame}" for frame in shown.frames] or ["  it gives no stack now"]
    return text


def rows(picture: Sequence[Shown]) -> Iterable[tuple[str, ...]]:
    """A row for each rank: its step, what it does and for how long, its speed, its stack."""
    speeds = [s.steps_per_s for s in picture if s.steps_per_s is not None and s.role == "worker"]
    middle = median(speeds) if speeds else 0.0
    for shown in picture:
        doing, since_s = shown.doing, shown.since_s
        if shown.waits_for is not None and shown.state != "stopped":
            since_s = shown.waits_since_s or 0.0
            doing = _waiting(shown)
        speed = "" if shown.steps_per_s is None else f"{_rate(shown.steps_per_s)} steps/s"
        if speed and len(speeds) > 1 and middle:
            speed += f" ({(shown.steps_per_s or 0.0) / middle:.2f} of the median)"
        yield (
            shown.name,
            str(shown.step),
            doing,
            duration(since_s) if shown.state != "ended" else "",
            speed,
            shown.stack or "",
        )


def _rate(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _waiting(shown: Shown) -> str:
    if shown.idle:
        return "waits for requests"
    numbers = ", ".join(map(str, shown.waits_for or ()))
    whom = f"rank{'s' if ',' in numbers else ''} {numbers}" if numbers else "all others"
    verb = "waited" if shown.state == "ended" else "waits"
    return f"{shown.doing}: {verb} for {whom} ({shown.what})"


def keep_last(folder: Path, picture: Sequence[Shown] | None = None) -> None:
    """Keep the picture of now, before the ranks are ended; without a word where that fails."""
    with suppress(OSError):
        if folder.is_dir() and not (folder / LAST).exists():
            content = [shown.plain() for shown in picture or take_picture(folder)]
            own = folder / f"{LAST}.{os.getpid()}"
            own.write_text(json.dumps(content))
            own.replace(folder / LAST)


def last_picture(out: Path, keep: bool) -> list[dict[str, Any]]:
    """What the ranks did when a run ended, if it is to be kept; removes their files."""
    folder, picture = out / FOLDER, []
    if keep:
        try:
            picture = [Shown.read(said) for said in json.loads((folder / LAST).read_text())]
        except (OSError, ValueError, TypeError):
            picture = take_picture(folder)
    shutil.rmtree(folder, ignore_errors=True)
    return [shown.kept() for shown in picture]


def describer(folder: Path) -> Callable[[Sequence[int]], dict[int, str]]:
    """`describe` for one folder."""
    return lambda ranks: describe(folder, ranks)
