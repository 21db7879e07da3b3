"""Measure how long the report of a study of 200 runs takes, and how large it is.

    .venv/bin/python benchmarks/report.py

The records are synthetic (`tests/records.py`): 40 learning rates, 1 to 16 workers, with events of
every kind.
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.records import run, write_study

from paceline.record.machine import environment
from paceline.report.render import library, render

ROUNDS = 3


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        runs = [
            run("allreduce", workers, 4.0 / workers, varied={"lr": 0.001 * (number + 1)}, cores=16)
            for number in range(40)
            for workers in (1, 2, 4, 8, 16)
        ]
        study = write_study(Path(folder) / "study", runs, events=True)
        seconds = []
        for _ in range(ROUNDS):
            library.cache_clear()
            began = time.perf_counter()
            page = render(study)
            seconds.append(time.perf_counter() - began)
        megabytes = page.stat().st_size / 1e6
    env = environment()
    print(
        f"{len(runs)} runs: {statistics.median(seconds):.1f} s ({min(seconds):.1f} -"
        f" {max(seconds):.1f}), {megabytes:.1f} MB"
    )
    print(f"{env['cpu']}, {env['cores']} cores, Python {env['python']}")


if __name__ == "__main__":
    main()
