"""Compare the speed of two checkouts: the same runs from both, one after the other, in random
order.

    git worktree add /tmp/before main~20
    .venv/bin/python benchmarks/two_checkouts.py /tmp/before . --rounds 12

Each setting is trained by `paceline train` from one checkout and then from the other (which goes
first is drawn), so that both runs see the same noise of the machine. The figure is the geometric
mean of new / old samples per second over the rounds, with a 95% t interval. Both checkouts use this
Python and its packages; only Paceline's source differs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from scipy.stats import t

SETTINGS = {
    "serial": ["--strategy", "serial", "--steps", "300"],
    "allreduce x 2, shm": ["--strategy", "allreduce", "--workers", "2", "--steps", "300"],
    "allreduce ring x 2, shm": [
        "--strategy",
        "allreduce:collective=ring",
        "--workers",
        "2",
        "--steps",
        "300",
    ],
    "allreduce x 2, gloo": [
        "--strategy",
        "allreduce",
        "--workers",
        "2",
        "--transport",
        "gloo",
        "--steps",
        "300",
    ],
    "ps:consistency=async x 2, shm": [
        "--strategy",
        "ps:consistency=async",
        "--workers",
        "2",
        "--steps",
        "200",
    ],
    "local-sgd x 2, shm": ["--strategy", "local-sgd", "--workers", "2", "--steps", "300"],
    "hogwild x 2": ["--strategy", "hogwild", "--workers", "2", "--steps", "300"],
    "gossip x 2, gloo": [
        "--strategy",
        "gossip",
        "--workers",
        "2",
        "--transport",
        "gloo",
        "--steps",
        "300",
    ],
}
COMMON = [
    "--data",
    "fashion-mini",
    "--model",
    "cnn",
    "--threads",
    "1",
    "--memory-format",
    "channels_last",
    "--epochs",
    "99",
]
COMMON += ["--evaluate-every", "1000000", "--evaluate-samples", "100", "--json", "--quiet"]
START = "from paceline.cli.main import main; main()"


def samples_per_s(checkout: Path, options: list[str]) -> float:
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", START, "train", *COMMON, *options, "--out", f"{folder}/run"],
            env={**os.environ, "PYTHONPATH": str(checkout / "src"), "OMP_NUM_THREADS": "1"},
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise SystemExit(f"{checkout}: {' '.join(options)}: {done.stderr.strip().splitlines()[-1]}")
    return float(json.loads(done.stdout)["result"]["samples_per_s"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--only", default="", help="settings whose name contains this")
    asked = parser.parse_args()
    checkouts = {"old": asked.old.resolve(), "new": asked.new.resolve()}
    settings = {name: options for name, options in SETTINGS.items() if asked.only in name}
    logs: dict[str, list[float]] = {name: [] for name in settings}
    order = random.Random(0)
    for number in range(asked.rounds):
        for name, options in settings.items():
            turns = list(checkouts)
            order.shuffle(turns)
            rates = {which: samples_per_s(checkouts[which], options) for which in turns}
            logs[name].append(math.log(rates["new"] / rates["old"]))
            shown = f"{rates['new']:,.0f} against {rates['old']:,.0f}"
            print(
                f"round {number + 1}/{asked.rounds}  {name}: {shown} samples/s",
                file=sys.stderr,
                flush=True,
            )
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    print(f"{machine}; {asked.rounds} rounds")
    print("| setting | new / old | 95% interval | each |\n|---|--:|--:|---|")
    for name, each in logs.items():
        mean, spread = statistics.mean(each), statistics.stdev(each) / math.sqrt(len(each))
        half = float(t.ppf(0.975, len(each) - 1)) * spread
        low, high = math.exp(mean - half), math.exp(mean + half)
        told = " ".join(f"{math.exp(value):.2f}" for value in each)
        print(f"| {name} | {math.exp(mean):.3f} | {low:.3f} to {high:.3f} | {told} |")


if __name__ == "__main__":
    main()
