"""`join(out=DIR)`: claim the folder of a loop's record, and complete the record in every case.

`pace.finish()` completes it. Where the script ends before that (an exception, SIGTERM, Ctrl-C), it
is completed at the exit of the process. A process that is killed completes nothing. Then another
rank that is still alive writes the record of rank 0, because the folder is no longer locked.
"""

from __future__ import annotations

import atexit
import os
import shlex
import signal
import sys
import threading
from contextlib import ExitStack, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from paceline.common.values import is_path, shortened
from paceline.errors import BadRequest
from paceline.launch.folder import claim_own
from paceline.launch.joined import Meeting
from paceline.launch.seat import Seat
from paceline.launch.signals import ignore
from paceline.launch.slurm_job import engine
from paceline.record.lock import LOCK, alone_in
from paceline.run.loop.conclusion import Conclusion, Failure, Terminated
from paceline.run.loop.record import Recorded
from paceline.transport.base import Transport
from paceline.transport.status.line import FOLDER

KILLING = (signal.SIGTERM, signal.SIGHUP)  # Ctrl-C raises a KeyboardInterrupt already
_heard: list[Terminated] = []
_open: list[Ending] = []  # the records of this process that are not complete


class Folder:
    """The folder of the record, as one rank knows it. Rank 0 holds it until its end."""

    def __init__(self, out: str | Path | None, resume: bool, meeting: Meeting | None) -> None:
        self.held = ExitStack()
        self._ending: Ending | None = None
        self._sharing = meeting.sharing if meeting is not None else None
        again = meeting.began if meeting is not None else lambda folder: False

        def claim() -> tuple[Path, int] | None:
            if out is None and resume:
                raise BadRequest("join(resume=True) goes on with a record: say which with out=")
            if out is None:
                return None
            path = _checked(out)
            self._ending = Ending(self.held, path)
            try:
                return path, claim_own(path, resume, again, self.held)
            except BadRequest:
                self._ending.over()  # the folder is not this rank's
                raise

        claimed = claim() if meeting is None else meeting.claim_own(claim)
        self.out: Path | None = claimed[0] if claimed is not None else None
        self.session = claimed[1] if claimed is not None else 0

    @property
    def status(self) -> Path | None:
        """The folder where each rank says what it does; None without `out`."""
        return self.out / FOLDER if self.out is not None else None

    def record(
        self, transport: Transport, seat: Seat | None, known: dict[str, Any]
    ) -> Recorded | None:
        """Return this rank's record; None without `out`."""
        if self.out is None:
            return None
        known["sharing"] = self._sharing
        conclusion = Conclusion(self.out, known, _command(seat), transport.rank, engine())
        self._ending = self._ending or Ending(self.held)
        recorded = Recorded(transport, conclusion, self.session, self._ending.over)
        self._ending.record = recorded
        return recorded

    def complete(self) -> None:
        """Complete the record, where the script has not come to its end."""
        if self._ending is not None:
            self._ending.complete()


def ended_by() -> BaseException | None:
    """What has ended the script of this process: an exception, a signal; None: nothing has."""
    raised: BaseException | None = getattr(sys, "last_exc", None) or getattr(
        sys, "last_value", None
    )
    return _heard[0] if _heard else raised


def _checked(out: str | Path) -> Path:
    if not is_path(str(out)):
        raise BadRequest(f"out={shortened(str(out))} is not a path")
    path = Path(out).expanduser().resolve()
    if path.exists() and not path.is_dir():
        raise BadRequest(f"out={out} is a file: name a folder")
    return path


def _command(seat: Seat | None) -> str:
    """The command that starts this script with as many ranks."""
    words = [os.path.basename(sys.argv[0]) or "SCRIPT", *sys.argv[1:]] if sys.argv else ["SCRIPT"]
    before = ["python"] if seat is None else ["paceline", "launch", "-n", str(seat.size)]
    return shlex.join([*before, *words])


class Ending:
    """Completes a record at the end of the process, unless it is complete by then."""

    def __init__(self, held: ExitStack, claims: Path | None = None) -> None:
        self.record: Recorded | None = None
        self._held, self._process = held, os.getpid()
        self._claims = claims  # the folder that this rank claims for all
        _open.append(self)
        _listen()
        atexit.register(self.complete)

    def complete(self) -> None:
        if os.getpid() != self._process or (self.record is not None and self.record.ended):
            return
        ignore()
        if self.record is None:
            self._give_back()
            return
        with suppress(Exception):
            self.record.failed(Failure.of(ended_by()))
        if not self.record.leads:
            with suppress(Exception):
                _stand_in(self.record.conclusion)

    def _give_back(self) -> None:
        """Remove a folder that was claimed for a loop that never began, unless it holds files."""
        if self._claims is not None and not (self._claims / "run.json").exists():
            with suppress(OSError):
                (self._claims / "events").rmdir()
                (self._claims / LOCK).unlink(missing_ok=True)
                self._claims.rmdir()

    def over(self) -> None:
        """The record is complete: release the folder, and let signals do what they did before."""
        self._held.close()
        atexit.unregister(self.complete)
        if self in _open:
            _open.remove(self)
        if not _open:
            _stop_listening()


def _stand_in(conclusion: Conclusion) -> None:
    """Write the record of a run whose rank 0 was killed."""
    out = conclusion.out
    if not (out / "config.json").exists():
        return
    with alone_in(out, "rank 0 is alive"):
        if not (out / "run.json").exists():
            conclusion.take_over()


# --- signals


def _listen() -> None:
    """Let signals that would kill the process end it by an exception, so that records are complete.

    Signals that the script handles or ignores itself are left alone.
    """
    if threading.current_thread() is threading.main_thread():
        for number in KILLING:
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, _hear)


def _stop_listening() -> None:
    if threading.current_thread() is threading.main_thread():
        for number in KILLING:
            if signal.getsignal(number) is _hear:
                signal.signal(number, signal.SIG_DFL)


def _hear(number: int, frame: FrameType | None) -> None:
    if not any(ending._process == os.getpid() for ending in _open):  # a forked child
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        return
    if not _heard:
        _heard.append(Terminated(number))
        raise _heard[0]
