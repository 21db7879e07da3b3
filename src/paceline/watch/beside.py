"""The page beside a run or a study: a process of its own, which ends with the run.

The workers are forked from the process of the command, which must not have threads. So the page is
served by another process. It ends when it is told to, and by itself when its parent is gone.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.common.parents import die_with_parent
from paceline.errors import PacelineError
from paceline.watch.server import lower_priority, need_extra, serve

MAIN = "from paceline.watch.beside import main; main()"
START_S, END_S = 30.0, 5.0


@contextmanager
def page_beside(
    folder: str | Path, wanted: bool = True, say: Callable[[str], None] = print
) -> Iterator[None]:
    """Serve the page of `folder` while the body runs; the folder need not exist yet.

    `say` gets one sentence with the address. If no page can be served, it gets the reason, and the
    body runs all the same. A missing extra is an error: the page was asked for.
    """
    if not wanted:
        yield
        return
    need_extra()
    process = subprocess.Popen(
        # -P: a file json.py in the current folder is not the library's
        [sys.executable, "-P", "-c", MAIN, str(folder), str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for the run; the page shows how it ended
    )
    try:
        say(_answer(process))
        yield
    finally:
        _end(process)


def _answer(process: subprocess.Popen[bytes]) -> str:
    """Wait for the address, and say it."""
    assert process.stdout is not None
    with process.stdout as told:
        ready, _, _ = select.select([told], [], [], START_S)
        line = told.readline() if ready else b""
    try:
        answer = json.loads(line)
        return str(answer.get("address") or f"no live page: {answer['error']}")
    except (ValueError, KeyError, AttributeError):
        return "no live page: its process did not start; `paceline watch DIR` shows the reason"


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def main() -> None:
    """Serve the page of the folder in the arguments; the parent starts this."""
    folder, parent = sys.argv[1], int(sys.argv[2])
    die_with_parent(parent)
    lower_priority()

    def tell(**answer: str) -> None:
        print(json.dumps(answer), flush=True)

    try:
        serve(
            folder,
            say=lambda address: tell(address=address),
            browser=True,
            goes_on=lambda: os.getppid() == parent,
        )
    except PacelineError as error:
        tell(error=str(error))
