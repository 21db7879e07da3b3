"""Measure strategies against the usual loop, stock DDP, and no communication at all."""

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

from paceline.bench.measure.blocks import bench_blocks
from paceline.bench.measure.updates import updates_per_s
from paceline.common.places import find
from paceline.data.base import Data
from paceline.data.mnist import FILES, MINI
from paceline.errors import DataUnavailable, RunFailed
from paceline.launch.run import run
from paceline.record.reader import read_worker_events
from paceline.registry import sources
from paceline.request.config import Config
from paceline.request.prepare import prepare

PEER = Path(__file__).parent.parent / "peers" / "stock_pytorch.py"
WARM_UP = 20
PEER_DEADLINE_S = 300


@dataclass(frozen=True)
class Ratio:
    title: str
    ours: str
    theirs: str
    goal: float | None


MLP = "mlp:hidden=4096x4096x1200"  # 25 M parameters: what the exchange of a large model costs
MLP_BATCH = 16
BLOCKS = 12  # per round
PEERS = ("usual loop", "stock DDP", "serial", "allreduce", "usual loop, equal", "stock DDP, equal")
LARGE = ("stock DDP, mlp", "allreduce, mlp")
RATIOS = (
    Ratio("serial / usual loop", "serial", "usual loop", 1.4),
    Ratio("allreduce / stock DDP", "allreduce", "stock DDP", 1.6),
    Ratio(
        "serial / usual loop, data path and memory format equal",
        "serial",
        "usual loop, equal",
        None,
    ),
    Ratio(
        "allreduce / stock DDP, data path and memory format equal",
        "allreduce",
        "stock DDP, equal",
        None,
    ),
    Ratio(
        "allreduce / stock DDP, mlp with 25 M parameters, batch 16",
        "allreduce, mlp",
        "stock DDP, mlp",
        1.6,
    ),
    Ratio(
        "allreduce / no communication, in blocks",
        "allreduce, blocks",
        "no communication, blocks",
        0.95,
    ),
    Ratio(
        "local-sgd:every=16 / no communication, in blocks",
        "local-sgd:every=16, blocks",
        "no communication, blocks",
        0.97,
    ),
    Ratio("hogwild / one process, in blocks", "hogwild, blocks", "one process, blocks", 1.75),
)


def folder_and_data(data_dir: str | None) -> tuple[Path, Data]:
    """Return MNIST where it is here, else the built-in part of Fashion-MNIST. All contenders use
    the same files.
    """
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
    """Measure the samples per second of every contender in interleaved rounds, one thread per
    process.
    """
    folder, data = folder_and_data(data_dir)
    equal = ["--data-path", "index", "--memory-format", "channels_last"]
    few = max(10, steps // 5)
    runs: dict[str, Callable[[], float]] = {
        "usual loop": lambda: _peer(1, folder, batch_size, steps),
        "stock DDP": lambda: _peer(2, folder, batch_size, steps),
        "serial": lambda: _ours("serial", 1, data, batch_size, steps),
        "allreduce": lambda: _ours("allreduce", 2, data, batch_size, steps),
        "usual loop, equal": lambda: _peer(1, folder, batch_size, steps, *equal),
        "stock DDP, equal": lambda: _peer(2, folder, batch_size, steps, *equal),
        "stock DDP, mlp": lambda: _peer(
            2, folder, MLP_BATCH, few, "--hidden", MLP.partition("=")[2]
        ),
        "allreduce, mlp": lambda: _ours("allreduce", 2, data, MLP_BATCH, few, MLP),
    }
    held: dict[str, list[float]] = {}
    rates: dict[str, list[float]] = {}
    bounds: list[float] = []
    updates: dict[str, list[float]] = {}
    for number in range(rounds):
        for name in (*PEERS, *LARGE):
            rates.setdefault(name, []).append(runs[name]())
            say(f"round {number + 1}/{rounds}  {name}: {rates[name][-1]:,.0f} samples/s")
        blocks = bench_blocks(data, batch_size, BLOCKS)
        bounds.append(blocks["bound"])
        for name, each in blocks["rates"].items():
            rates.setdefault(f"{name}, blocks", []).append(statistics.median(each))
            say(
                f"round {number + 1}/{rounds}  {name}, blocks: {rates[f'{name}, blocks'][-1]:,.0f}"
                " samples/s"
            )
        for name in STRAGGLING:
            held.setdefault(name, []).append(
                _ours(name, 2, data, batch_size, few, faults=(SLOW,), of=0)
            )
            say(
                f"round {number + 1}/{rounds}  {name}, the other worker slow: {held[name][-1]:,.0f}"
                " samples/s"
            )
        for transport in ("shm", "gloo"):
            updates.setdefault(transport, []).append(updates_per_s(transport))
            say(
                f"round {number + 1}/{rounds}  ps:consistency=async on {transport}:"
                f" {updates[transport][-1]:,.0f} updates/s"
            )
    return {
        "data": data.name,
        "batch_size": batch_size,
        "steps": steps,
        "rounds": rounds,
        "samples_per_s": {name: _spread(r) for name, r in rates.items()},
        "ratios": [_ratio(r, rates) for r in RATIOS],
        "in_step_bound": _spread(bounds),
        "beside_a_straggler": {name: _spread(r) for name, r in held.items()},
        "updates_per_s": {
            f"ps:consistency=async on {t}": {**_spread(r), "goal": UPDATES[t]}
            for t, r in updates.items()
        },
    }


SLOW = "slow:rank=1,factor=3"
STRAGGLING = ("allreduce", "ps:consistency=ssp,staleness=16", "ps:consistency=async")
UPDATES = {"shm": 1000, "gloo": 500}


def _spread(values: list[float]) -> dict[str, Any]:
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "all": values,
    }


def _ratio(ratio: Ratio, rates: dict[str, list[float]]) -> dict[str, Any]:
    """Take the median of the rounds' ratios: a round's contenders ran one after another."""
    each = [
        ours / theirs for ours, theirs in zip(rates[ratio.ours], rates[ratio.theirs], strict=True)
    ]
    return {
        "title": ratio.title,
        "median": statistics.median(each),
        "min": min(each),
        "max": max(each),
        "goal": ratio.goal,
    }


def _peer(processes: int, folder: Path, batch_size: int, steps: int, *extra: str) -> float:
    command = [sys.executable, str(PEER), "--folder", str(folder), "--processes", str(processes)]
    command += [
        "--batch-size",
        str(batch_size),
        "--steps",
        str(steps),
        "--warm-up",
        str(WARM_UP),
        *extra,
    ]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=PEER_DEADLINE_S,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise RunFailed(f"the peer did not end within {PEER_DEADLINE_S} s") from None
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise RunFailed(f"the peer failed: {last[0]}")
    return float(json.loads(done.stdout.strip().splitlines()[-1])["samples_per_s"])


def _ours(
    strategy: str,
    workers: int,
    data: Data,
    batch_size: int,
    steps: int,
    model: str = "cnn",
    faults: tuple[str, ...] = (),
    of: int | None = None,
) -> float:
    """Return the samples per second after the warm-up, of all workers or of worker `of`."""
    out = Path(tempfile.mkdtemp(prefix="paceline-bench-"))
    try:
        options = {
            "model": model,
            "data": data,
            "strategy": strategy,
            "workers": workers,
            "threads": 1,
            "batch_size": batch_size,
            "steps": WARM_UP + steps,
            "faults": faults,
            "out": str(out),
        }
        job = prepare(Config.make(options), lambda config: out)
        run(job, lambda kind, content: None, clean=True)
        total = 0.0
        for rank, events in enumerate(read_worker_events(out)):
            own = [e for e in events if e["kind"] == "step"]
            if not own or (of is not None and rank != of):
                continue
            window = own[WARM_UP:]
            total += sum(e["n"] for e in window) / (
                window[-1]["train_s"] - own[WARM_UP - 1]["train_s"]
            )
        return total
    finally:
        shutil.rmtree(out, ignore_errors=True)
