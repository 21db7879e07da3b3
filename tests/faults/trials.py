"""`python -m tests.faults.trials --from 0 --to 1000 --jobs 3 --out DIR`: run trials.

DIR/results.jsonl gets one line per trial. Started again, it leaves out the numbers that are there.
`--only N` runs one trial, prints what it does and finds, and keeps its folder.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent


def done(out: Path) -> dict[int, dict[str, Any]]:
    """The results in a folder by number; the last one of a number counts."""
    file = out / "results.jsonl"
    found = {}
    for line in file.read_text().splitlines() if file.exists() else ():
        try:
            result = json.loads(line)
        except ValueError:  # the harness was killed while it wrote
            continue
        found[result["number"]] = result
    return found


def serve(out: Path, compares: bool) -> None:
    """Run the trials whose numbers come on stdin; a line of JSON for each."""
    from tests.faults.checks import perform
    from tests.faults.running import be_alone

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    be_alone()
    for line in sys.stdin:
        answers.write(json.dumps(perform(int(line), out / "unbroken", compares=compares)) + "\n")
        answers.flush()


class Jobs:
    """Processes that run trials, one after the other each."""

    def __init__(self, numbers: Iterator[int], out: Path, until: float) -> None:
        self.numbers, self.out, self.until = numbers, out, until
        self.lock = threading.Lock()
        self.failed = 0

    def work(self) -> None:
        process: subprocess.Popen[str] | None = None
        while True:
            with self.lock:
                number = next(self.numbers, None)
            if number is None or time.monotonic() > self.until:
                break
            if process is None:
                process = subprocess.Popen(
                    [sys.executable, "-m", "tests.faults.trials", "--serve", "--out", self.out],
                    cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                )  # fmt: skip
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(f"{number}\n")
            process.stdin.flush()
            answer = process.stdout.readline()
            if not answer:
                process = None
                answer = json.dumps({"number": number, "wrong": {"harness": "it failed"}})
            self.note(json.loads(answer))
        if process is not None and process.stdin is not None:
            process.stdin.close()
            process.wait()

    def note(self, result: dict[str, Any]) -> None:
        with self.lock:
            with open(self.out / "results.jsonl", "a") as file:
                file.write(json.dumps(result) + "\n")
            wrong = result["wrong"]
            self.failed += bool(wrong)
            told = "; ".join(f"{k}: {v[:300]}" for k, v in wrong.items()) or "as documented"
            print(
                f"{result.get('trial', result['number'])}\n    {result.get('end')}"
                f" {result.get('seconds')} s: {told}",
                flush=True,
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--from", dest="first", type=int, default=0)
    parser.add_argument("--to", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin none later")
    parser.add_argument("--out", type=Path, default=Path("runs/fault-trials"))
    parser.add_argument("--only", type=int, action="append", help="repeat this trial")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--quick", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    out = asked.out.resolve()
    (out / "unbroken").mkdir(parents=True, exist_ok=True)
    if asked.serve:
        serve(out, not asked.quick)
        return 0
    if asked.only:
        from tests.faults.checks import perform
        from tests.faults.running import be_alone

        be_alone()
        results = [perform(number, out / "unbroken", keep=True) for number in asked.only]
        print(json.dumps(results, indent=2))
        return int(any(result["wrong"] for result in results))
    known, began = done(out), time.monotonic()
    numbers = [n for n in range(asked.first, asked.to) if n not in known]
    jobs = Jobs(iter(numbers), out, began + asked.seconds)
    threads = [threading.Thread(target=jobs.work) for _ in range(asked.jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    count = len(done(out)) - len(known)
    print(f"{count} trials in {time.monotonic() - began:.0f} s, {jobs.failed} not as documented")
    return int(any(result["wrong"] for result in done(out).values()))


if __name__ == "__main__":
    sys.exit(main())
