"""Compare the speed of two checkouts: the same from both, one after the other, in random order.

    git worktree add /tmp/before main~20
    .venv/bin/python benchmarks/two_checkouts.py /tmp/before . --rounds 12
    .venv/bin/python benchmarks/two_checkouts.py /tmp/before . --bench "collectives --workers 2"

Without `--bench`, each setting is trained by `paceline train` from one checkout and then from the
other (which goes first is drawn), so that both runs see the same noise of the machine. With it, a
benchmark of Paceline is run from both in turn, and its figures of our own code are compared one by
one: the peers of `bench strategies` and its trials with a slow worker are left out, so that the
two runs of a round are closer together. A ratio is the geometric mean of new / old speed over the
rounds, with a 95% t interval; beside it stands the median with its own interval, which a round
that another program disturbed does not move. A round during which foreign processes and the host
took more than 5% of the machine is made again, at most twice, as in a study's blocks; the table
says how many rounds were kept although they were disturbed. So is one in which a figure of code
that is not ours, Open MPI's own all-reduce, differs between the checkouts by more than 20%: this
machine has seconds during which all that copies memory is 2 to 4 times slower, and no counter shows
them. Both checkouts use this Python and its packages; only Paceline's source differs. With `--out
FILE` the rounds are kept there, and a later call goes on.
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
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from scipy.stats import binom, t

from paceline.common.files import write_whole
from paceline.record.foreign import ForeignCpu
from paceline.studies.confirm import DISTURBED, MOST_REPEATS

SETTINGS = {
    "serial": "--strategy serial --steps 300",
    "allreduce x 2, shm": "--strategy allreduce --workers 2 --steps 300",
    "allreduce ring x 2, shm": "--strategy allreduce:collective=ring --workers 2 --steps 300",
    "allreduce x 2, gloo": "--strategy allreduce --workers 2 --transport gloo --steps 300",
    "ps:consistency=async x 2, shm": "--strategy ps:consistency=async --workers 2 --steps 200",
    "local-sgd x 2, shm": "--strategy local-sgd --workers 2 --steps 300",
    "hogwild x 2": "--strategy hogwild --workers 2 --steps 300",
    "gossip x 2, gloo": "--strategy gossip --workers 2 --transport gloo --steps 300",
}
COMMON = (
    "--data fashion-mini --model cnn --threads 1 --memory-format channels_last --epochs 99"
    " --evaluate-every 1000000 --evaluate-samples 100 --json --quiet"
)
START = """
import sys
from importlib import import_module
for name in ("paceline.bench.measure.strategies", "paceline.bench.strategies"):
    if sys.argv[1:3] == ["bench", "strategies"]:
        try:
            module = import_module(name)
        except ImportError:
            continue
        if hasattr(module, "_peer"):
            module._peer = module.updates_per_s = lambda *_: 1.0
            module.STRAGGLING = ()
from paceline.cli.main import main
main()
"""
YARDSTICK, APART = "mpi native", math.log(1.2)  # Open MPI's own all-reduce, in both checkouts
PEERS = ("usual loop", "stock DDP", "open-mpi")  # not our code: equal in both checkouts


def paceline(checkout: Path, words: list[str]) -> Any:
    """Run a command of a checkout and return the JSON that it prints."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", START, *words],
            env={**os.environ, "PYTHONPATH": str(checkout / "src"), "OMP_NUM_THREADS": "1"},
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise SystemExit(f"{checkout}: {' '.join(words)}: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout)


def samples_per_s(checkout: Path, name: str) -> dict[str, float]:
    words = ["train", *COMMON.split(), *SETTINGS[name].split(), "--out", "run"]
    return {name: float(paceline(checkout, words)["result"]["samples_per_s"])}


def figures(checkout: Path, command: str) -> dict[str, float]:
    """The speeds that a benchmark measures, by name."""
    found = paceline(checkout, ["bench", *command.split(), "--json"])
    if "samples_per_s" in found:
        rates = {name: value["median"] for name, value in found["samples_per_s"].items()}
    elif "codecs" in found:  # in time, not in memcpys: those are not our code
        copy_s = found["memcpy_ms"] / 1000
        rates = {row["codec"]: 1 / row["memcpys"]["median"] / copy_s for row in found["codecs"]}
    else:
        rates = {
            f"{row['transport']} {row['collective']}, {row['workers']} workers, {row['bytes']:,} B":
            1 / row["median_s"] for row in found["rows"]
        }  # fmt: skip
    return {name: rate for name, rate in rates.items() if not name.startswith(PEERS)}


def interval(each: list[float]) -> tuple[float, float, float]:
    """The geometric mean of ratios whose logarithms are given, and its 95% interval."""
    mean, error = statistics.mean(each), statistics.stdev(each) / math.sqrt(len(each))
    half = float(t.ppf(0.975, len(each) - 1)) * error
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def of_median(each: list[float]) -> tuple[float, float, float]:
    """The median of such ratios, and the interval between two of them that holds it in 95%."""
    ordered, outside = sorted(each), int(binom.ppf(0.025, len(each), 0.5))
    low, high = ordered[max(0, outside - 1)], ordered[min(len(each), len(each) - outside + 1) - 1]
    return math.exp(statistics.median(each)), math.exp(low), math.exp(high)


def in_turns(
    checkouts: dict[str, Path],
    measure: Callable[[Path, str], dict[str, float]],
    name: str,
    order: random.Random,
) -> dict[str, float]:
    """Measure both checkouts, one after the other; log(new / old) of each figure."""
    turns = list(checkouts)
    order.shuffle(turns)
    rates = {which: measure(checkouts[which], name) for which in turns}
    both = rates["new"].keys() & rates["old"].keys()
    return {figure: math.log(rates["new"][figure] / rates["old"][figure]) for figure in both}


def undisturbed(measure: Callable[[], dict[str, float]]) -> tuple[dict[str, float], bool]:
    """Measure until foreign processes left the machine alone; return also whether they did."""
    for _ in range(MOST_REPEATS + 1):
        watch = ForeignCpu()
        found, shares = measure(), watch.shares()
        alike = [abs(found.pop(name)) < APART for name in list(found) if name.startswith(YARDSTICK)]
        if all(alike) and (shares is None or shares.together <= DISTURBED):
            return found, True
    return found, False


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--only", default="", help="settings whose name contains this")
    parser.add_argument("--bench", help='a benchmark with its options: "collectives --workers 2"')
    parser.add_argument("--out", type=Path, help="keep the rounds in this file, and go on with it")
    asked = parser.parse_args()
    checkouts = {"old": asked.old.resolve(), "new": asked.new.resolve()}
    what: list[str] = [asked.bench] if asked.bench else [n for n in SETTINGS if asked.only in n]
    measure: Callable[[Path, str], dict[str, float]] = figures if asked.bench else samples_per_s
    kept = json.loads(asked.out.read_text()) if asked.out and asked.out.exists() else {}
    logs: dict[str, list[float]] = kept.get("logs", {})
    disturbed: int = kept.get("disturbed", 0)
    made = min(map(len, logs.values()), default=0)
    order = random.Random(made)
    for number in range(made, asked.rounds):
        for name in what:
            found, quiet = undisturbed(partial(in_turns, checkouts, measure, name, order))
            disturbed += not quiet
            for figure, ratio in found.items():
                logs.setdefault(figure, []).append(ratio)
            mean = math.exp(statistics.mean(found.values()))
            told = f"round {number + 1}/{asked.rounds}  {name}: new / old {mean:.3f}"
            print(told + ("" if quiet else ", disturbed"), file=sys.stderr, flush=True)
        if asked.out:
            write_whole(asked.out, json.dumps({"logs": logs, "disturbed": disturbed}))
    if min(map(len, logs.values())) < 2:
        raise SystemExit("one round has no interval: ask for more --rounds")
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    rounds = min(map(len, logs.values()))
    print(f"{machine}; {rounds} rounds, {disturbed} disturbed")
    print("| figure | new / old | 95% interval | median | its interval | each |")
    print("|---|--:|--:|--:|--:|---|")
    together = [statistics.mean(logs[f][n] for f in logs) for n in range(rounds)]
    for name, each in [*sorted(logs.items()), ("all together", together)]:
        told = " ".join(f"{math.exp(value):.2f}" for value in each)
        columns = [
            f"{x:.3f} | {low:.3f} to {high:.3f}"
            for x, low, high in (interval(each), of_median(each))
        ]
        print(f"| {name} | {' | '.join(columns)} | {told} |")


if __name__ == "__main__":
    main()
