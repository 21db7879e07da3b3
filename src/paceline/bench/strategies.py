"""`paceline bench strategies`: our serial and all-reduce against the usual loop and stock DDP."""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.config import Config
from paceline.data.base import Data
from paceline.data.mnist import FILES, MINI
from paceline.data.places import find
from paceline.errors import DataUnavailable, RunFailed
from paceline.job import prepare
from paceline.launch.run import run
from paceline.record.reader import read_worker_events
from paceline.registry import sources
from paceline.strategies.base import Strategy
from paceline.types import Batch, ReplicaLike

PEER = Path(__file__).parent / "peers" / "stock_pytorch.py"
WARM_UP = 20
PEER_DEADLINE_S = 300


class WithoutCommunication(Strategy):
    """Every worker steps on its own: the bound that no exchange can beat."""

    name = "without-communication"
    exchanges = "nothing"

    def step(self, replica: ReplicaLike, batch: Batch) -> None:
        replica.update()


@dataclass(frozen=True)
class Ratio:
    title: str
    ours: str
    theirs: str
    goal: float | None


CONTENDERS = (
    "usual loop",
    "stock DDP",
    "serial",
    "allreduce",
    "usual loop, equal",
    "stock DDP, equal",
    "no communication",
)
RATIOS = (
    Ratio("serial / usual loop", "serial", "usual loop", 1.4),
    Ratio("allreduce / stock DDP, 2 workers", "allreduce", "stock DDP", 1.3),
    Ratio("serial / usual loop, data path and memory format equal", "serial", "usual loop, equal", None),
    Ratio("allreduce / stock DDP, data path and memory format equal", "allreduce", "stock DDP, equal", None),
    Ratio("allreduce / without any communication", "allreduce", "no communication", None),
)


def folder_and_data(data_dir: str | None) -> tuple[Path, Data]:
    """MNIST where it is here, the built-in part of Fashion-MNIST otherwise; the same files for everybody."""
    try:
        folder = find("mnist", data_dir, ("MNIST/raw", "mnist"), FILES)
        data = sources.build("mnist", data_dir=data_dir)
    except DataUnavailable:
        folder, data = MINI, sources.build("fashion-mini")
    return folder, replace(data, test=None)


def bench_strategies(
    data_dir: str | None = None,
    rounds: int = 5,
    steps: int = 150,
    batch_size: int = 64,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Median samples per second of every contender over interleaved rounds, one thread per process; and the ratios."""
    folder, data = folder_and_data(data_dir)
    equal = ["--data-path", "index", "--memory-format", "channels_last"]
    runs: dict[str, Callable[[], float]] = {
        "usual loop": lambda: _peer(1, folder, batch_size, steps),
        "stock DDP": lambda: _peer(2, folder, batch_size, steps),
        "serial": lambda: _ours("serial", 1, data, batch_size, steps),
        "allreduce": lambda: _ours("allreduce", 2, data, batch_size, steps),
        "usual loop, equal": lambda: _peer(1, folder, batch_size, steps, *equal),
        "stock DDP, equal": lambda: _peer(2, folder, batch_size, steps, *equal),
        "no communication": lambda: _ours(WithoutCommunication(), 2, data, batch_size, steps),
    }
    rates: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for number in range(rounds):
        for name in CONTENDERS:
            rates[name].append(runs[name]())
            say(f"round {number + 1}/{rounds}  {name}: {rates[name][-1]:,.0f} samples/s")
    return {
        "data": data.name,
        "batch_size": batch_size,
        "steps": steps,
        "rounds": rounds,
        "samples_per_s": {
            name: {"median": statistics.median(r), "min": min(r), "max": max(r), "all": r} for name, r in rates.items()
        },
        "ratios": [_ratio(r, rates) for r in RATIOS],
    }


def _ratio(ratio: Ratio, rates: dict[str, list[float]]) -> dict[str, Any]:
    """Round by round, because a round's contenders ran next to each other; then the median."""
    each = [ours / theirs for ours, theirs in zip(rates[ratio.ours], rates[ratio.theirs], strict=True)]
    return {
        "title": ratio.title,
        "median": statistics.median(each),
        "min": min(each),
        "max": max(each),
        "goal": ratio.goal,
    }


def _peer(processes: int, folder: Path, batch_size: int, steps: int, *extra: str) -> float:
    command = [sys.executable, str(PEER), "--folder", str(folder), "--processes", str(processes)]
    command += ["--batch-size", str(batch_size), "--steps", str(steps), "--warm-up", str(WARM_UP), *extra]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PEER_DEADLINE_S, stdin=subprocess.DEVNULL, check=False
        )
    except subprocess.TimeoutExpired:
        raise RunFailed(f"the peer did not end within {PEER_DEADLINE_S} s") from None
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise RunFailed(f"the peer failed: {last[0]}")
    return float(json.loads(done.stdout.strip().splitlines()[-1])["samples_per_s"])


def _ours(strategy: str | Strategy, workers: int, data: Data, batch_size: int, steps: int) -> float:
    """The same window: after the warm-up, until the last step."""
    out = Path(tempfile.mkdtemp(prefix="paceline-bench-"))
    try:
        options = {
            "model": "cnn",
            "data": data,
            "strategy": strategy,
            "workers": workers,
            "threads": 1,
            "batch_size": batch_size,
            "steps": WARM_UP + steps,
            "out": str(out),
        }
        job = prepare(Config.make(options), lambda config: out)
        run(job, lambda kind, content: None, clean=True)
        total = 0.0
        for events in read_worker_events(out):
            own = [e for e in events if e["kind"] == "step"]
            window = own[WARM_UP:]
            total += sum(e["n"] for e in window) / (window[-1]["train_s"] - own[WARM_UP - 1]["train_s"])
        return total
    finally:
        shutil.rmtree(out, ignore_errors=True)
