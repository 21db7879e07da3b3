"""10,000 wrong requests and damaged folders: a result or one sentence, never a traceback.

    python tests/faults/fuzz.py --from 4000 --to 5000

Case N is the same every time. Each case has a limit of CPU time. The cases run in a process of
their own; where one kills it, that case is a failure and the next one begins in a new process.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from paceline.registry import ALL
from tests.fuzz import failure, make_runs

CPU_S = 10.0  # of one case
OFFSET = 1000  # the seeds below are those of `make test`
# Of 20 cases in a row.
KINDS = (
    *("command line", "run.toml", "study.toml", "report", "resume"),
    *("command line", "show", "runs", "evaluate", "watch"),
    *("command line", "other command", "run.toml", "study", "ledger"),
    *("command line", "status", "dry study", "study.toml", "resume"),
)


class TooLong(BaseException):
    """A case has used its CPU time."""


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    raise TooLong(f"more than {CPU_S:g} s of CPU time")


def told(number: int, runs: Path) -> str | None:
    """What came out of a case, if it was wrong."""
    signal.signal(signal.SIGPROF, _stop)
    signal.setitimer(signal.ITIMER_PROF, CPU_S)
    try:
        return failure(KINDS[number % len(KINDS)], OFFSET + number, runs)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)


def batch(first: int, last: int, runs: Path, progress: Path, failures: Path) -> None:
    """Run cases in a child; note each before it begins, and each failure."""
    if (child := os.fork()) != 0:
        os.waitpid(child, 0)
        return
    try:
        for number in range(first, last):
            progress.write_text(str(number))
            if (said := told(number, runs)) is not None:
                with failures.open("a") as file:
                    file.write(f"--- case {number}, {KINDS[number % len(KINDS)]}\n{said}\n")
        progress.write_text(str(last))
    finally:
        os._exit(0)


def main() -> int:
    parser = argparse.ArgumentParser(description="wrong requests and damaged folders")
    parser.add_argument("--from", dest="first", type=int, default=0)
    parser.add_argument("--to", dest="last", type=int, default=10_000)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    for registry in ALL.values():
        registry.discover()
    with tempfile.TemporaryDirectory(prefix="paceline-fuzz-") as folder:
        work = Path(folder)
        progress, failures = work / "progress", work / "failures"
        failures.touch()
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
            make_runs(work / "runs")
        at = asked.first
        while at < asked.last:
            until = min(at + 500, asked.last)
            batch(at, until, work / "runs", progress, failures)
            at = int(progress.read_text())
            if at < until:
                with failures.open("a") as file:
                    file.write(f"--- case {at}, {KINDS[at % len(KINDS)]}\nthe process died\n")
                at += 1
            count = failures.read_text().count("--- case ")
            print(f"cases {asked.first} to {at}: {count} failures", flush=True)
        sys.stdout.write(failures.read_text())
    return int(count > 0) if asked.first < asked.last else 0


if __name__ == "__main__":
    sys.exit(main())
