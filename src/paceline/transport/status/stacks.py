"""The Python stack of a rank: written by `faulthandler` when SIGUSR2 arrives.

faulthandler's handler runs in C and does not take the GIL, so a rank answers also while it is
inside a long call of a library. SIGUSR1 asks a run to leave with a checkpoint.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import sysconfig
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from paceline.transport.status.line import Line, Seen
from paceline.transport.status.process import state_of

ANSWER_S = 1.0  # for a rank to write its stack
LOOK_S = 0.01
MOST_BYTES = 256 << 10  # of a file of stacks, before it is emptied
OURS = str(Path(__file__).parents[2]) + os.sep
LIBRARIES = tuple(
    path + os.sep
    for name in ("stdlib", "platstdlib", "purelib", "platlib")
    if (path := sysconfig.get_path(name))
)
FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')
HEADER = re.compile(r"^(?:Current thread|Thread|Stack).*$", re.MULTILINE)  # of a stack
ENTRY = re.compile(r"launch/(forks|mpi)\.py$")  # where a rank of ours begins
_files: list[IO[Any]] = []  # faulthandler writes to their descriptors


@dataclass(frozen=True)
class Frame:
    file: str
    number: int
    function: str

    @property
    def place(self) -> str:
        return f"{os.path.basename(self.file)}:{self.number}"

    def __str__(self) -> str:
        return f"{self.file}:{self.number} in {self.function}"


def give_stack(line: Line, folder: Path) -> None:
    """Let SIGUSR2 write this process's stack, unless the program uses that signal itself."""
    if not hasattr(signal, "SIGUSR2") or not _is_free():
        return
    file = (folder / f"stack-{line.rank}").open("ab")
    _files.append(file)  # a session's file stays open: a signal may come late
    # The thread that receives the signal is the main thread, which computes. The frames of a
    # thread that runs meanwhile could not be read safely.
    # What faulthandler finds here comes back when the interpreter ends: a question that comes then
    # must not kill the process.
    faulthandler.unregister(signal.SIGUSR2)  # of an earlier session
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR2, file=file, all_threads=False, chain=False)
    line.gives_stack = True
    line.describe()


def check_signal(line: Line) -> None:
    """Take the offer back where the program has begun to use SIGUSR2 itself."""
    if line.gives_stack and not _is_free():
        line.gives_stack = False
        line.describe()


def _is_free() -> bool:
    """Whether no handler of the program's own is there, in Python or in C (its `faulthandler`)."""
    main = threading.current_thread() is threading.main_thread()
    in_python = signal.getsignal(signal.SIGUSR2) not in (signal.SIG_DFL, signal.SIG_IGN)
    return main and not in_python and (bool(_files) or not _is_caught())


def _is_caught() -> bool:
    """Whether the kernel knows a handler of SIGUSR2; False where it does not tell."""
    with suppress(OSError, ValueError, StopIteration), open("/proc/self/status") as status:
        caught = next(line for line in status if line.startswith("SigCgt:"))
        return bool(int(caught.split()[1], 16) >> (signal.SIGUSR2 - 1) & 1)
    return False


def ask_stacks(folder: Path, ranks: Iterable[Seen]) -> dict[int, list[Frame]]:
    """Ask these ranks for their stacks, where they run on this machine; innermost frame first."""
    asked: dict[int, tuple[Path, int]] = {}
    for seen in ranks:
        if not seen.gives_stack or state_of(seen.pid, seen.start, seen.machine) != "running":
            continue
        path = folder / f"stack-{seen.rank}"
        with suppress(OSError):  # another user's process, a file that is gone
            size = path.stat().st_size
            if size > MOST_BYTES:
                os.truncate(path, 0)
                size = 0
            os.kill(seen.pid, signal.SIGUSR2)
            asked[seen.rank] = (path, size)
    found: dict[int, list[Frame]] = {}
    until = time.monotonic() + ANSWER_S
    while len(found) < len(asked) and time.monotonic() < until:
        time.sleep(LOOK_S)
        for rank, (path, size) in asked.items():
            with suppress(OSError):
                if rank not in found and path.stat().st_size > size:
                    time.sleep(LOOK_S)  # for the rest of it
                    with path.open("rb") as file:
                        file.seek(size)
                        dump = file.read().decode(errors="replace")
                    # what comes first may be the end of another process's answer
                    if (begins := HEADER.search(dump)) is not None:
                        found[rank] = frames_in(dump[begins.start() :])
    return found


def frames_in(dump: str) -> list[Frame]:
    """The frames of the last stack in what faulthandler wrote.

    Those of the program that has started the rank are left out.
    """
    last = HEADER.split(dump)[-1]
    frames = []
    for found in filter(None, map(FRAME.match, last.splitlines())):
        frames.append(Frame(found[1], int(found[2]), found[3]))
        if found[1].startswith(OURS) and ENTRY.search(found[1]):
            break
    return frames


def users_frame(frames: Sequence[Frame]) -> Frame | None:
    """The innermost frame of the user's own code; without one, the innermost of all."""
    for frame in frames:
        if not frame.file.startswith((OURS, *LIBRARIES, "<frozen")):
            return frame
    return frames[0] if frames else None
