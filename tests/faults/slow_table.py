"""One rank of a run pauses once: no run ends, and every notice names that rank.

    python tests/faults/slow_table.py                       # a pause of 45 s, about ten minutes
    python tests/faults/slow_table.py --pause 6 --deadline 2 --at-once 6

Each trial is `paceline train` with three workers. The pause is longer than the deadline. The
notices that come while the rank sleeps must name it, and no other rank.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
START = "from paceline.cli.main import main; main()"
FORWARD = """
allreduce shm, allreduce gloo, allreduce mpi, allreduce:collective=ring shm, ring-reduce shm,
stepwise shm, ps shm, ps gloo, ps:consistency=ssp shm, local-sgd:every=4 shm,
local-sgd:every=4 gloo, diloco:every=4 shm, ddp shm, ddp gloo, gossip gloo,
ps:consistency=async shm, ps:consistency=async gloo, psgd shm, psgd gloo, psgd mpi, hogwild shm,
gossip:mode=async shm, gossip:mode=async gloo, gossip shm
"""
ON_RANK_0 = ("state", "constructor")
ELSEWHERE = {
    "evaluation": "allreduce, local-sgd:every=4, psgd, hogwild, ps:consistency=async",
    "loader": "allreduce, local-sgd:every=4, psgd, hogwild",
    "state": "allreduce, local-sgd:every=4, psgd, hogwild",
    "constructor": "allreduce, local-sgd:every=4, psgd, hogwild, ps:consistency=async",
}


@dataclass(frozen=True)
class Trial:
    strategy: str
    transport: str
    where: str

    @property
    def rank(self) -> int:
        return 0 if self.where in ON_RANK_0 else 1

    def __str__(self) -> str:
        return f"{self.where:12} {self.strategy:26} {self.transport:5}"


def trials() -> list[Trial]:
    """The 42 trials."""
    made = [Trial(*each.split(), "forward") for each in FORWARD.split(",")]
    for where, strategies in ELSEWHERE.items():
        made += [Trial(strategy.strip(), "shm", where) for strategy in strategies.split(",")]
    return made


@dataclass(frozen=True)
class Outcome:
    ended: str  # empty: the run went on to its end
    notices: list[str]  # those that came while the rank slept
    wrong: list[str]  # those among them that name another rank

    @property
    def is_right(self) -> bool:
        return not self.ended and not self.wrong and bool(self.notices)

    def __str__(self) -> str:
        if self.ended:
            return f"ENDED: {self.ended}"
        if self.wrong:
            return f"WRONG: {self.wrong[0]}"
        return self.notices[0] if self.notices else "NO NOTICE"


def run_trial(trial: Trial, pause_s: float, deadline_s: float, folder: Path) -> Outcome:
    folder.mkdir(parents=True, exist_ok=True)
    mark, out = folder / "mark.json", folder / "run"
    own = {
        "SLOW_S": str(pause_s),
        "SLOW_RANK": str(trial.rank),
        "SLOW_WHERE": trial.where,
        "SLOW_MARK": str(mark),
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{Path(__file__).parent}",
    }
    command = [sys.executable, "-c", START, "train", "--quiet", "--model", "slow_models:Net"]
    command += ["--data", "slow_models:data", "--strategy", trial.strategy, "--workers", "3"]
    command += ["--transport", trial.transport, "--steps", "40", "--batch-size", "8"]
    command += ["--evaluate-every", "15", "--checkpoint-every", "20", "--threads", "1"]
    command += ["--deadline-s", str(deadline_s), "--out", str(out)]
    limit_s = pause_s + 300  # a busy machine is no failure
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **own},
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Outcome(f"it hangs (more than {limit_s:.0f} s)", [], [])
    if done.returncode:
        return Outcome(done.stderr.strip().splitlines()[-1], [], [])
    if not mark.exists():
        return Outcome("no rank slept: the trial is wrong", [], [])
    slept = json.loads(mark.read_text())
    notices = [
        event["text"]
        for event in _events(out / "events" / "notices.jsonl")
        if " waited " in event["text"]
        # From the sleeper's deadline on; a little after it wakes the notice may still come.
        and slept["began"] + deadline_s <= event["t"] <= slept["ended"] + 1
    ]
    named = re.compile(rf" for worker {trial.rank} \(")
    return Outcome("", notices, [text for text in notices if not named.search(text)])


def _events(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pause", type=float, default=45.0, help="seconds  [default: 45]")
    parser.add_argument("--deadline", type=float, default=30.0, help="seconds  [default: 30]")
    parser.add_argument("--at-once", type=int, default=6, help="trials at a time  [default: 6]")
    parser.add_argument("--only", default="", help="numbers of trials, as in 0-9,41")
    asked = parser.parse_args()
    chosen = _chosen(asked.only, len(trials()))
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(asked.at_once) as pool:

        def run(number: int) -> Outcome:
            into = Path(folder) / str(number)
            return run_trial(trials()[number], asked.pause, asked.deadline, into)

        right = 0
        for number, outcome in zip(chosen, pool.map(run, chosen), strict=True):
            right += outcome.is_right
            print(f"{number:2}  {trials()[number]}  {outcome}", flush=True)
    print(f"{right} of {len(chosen)} went on, and every notice named the slow rank")
    return 0 if right == len(chosen) else 1


def _chosen(only: str, count: int) -> list[int]:
    if not only:
        return list(range(count))
    ends = [part.partition("-") for part in only.split(",")]
    return [n for low, _, high in ends for n in range(int(low), int(high or low) + 1)]


if __name__ == "__main__":
    sys.exit(main())
