"""Measure how much of two workers' speed is left where one of them is slowed down."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.bench.measure.strategies import folder_and_data
from paceline.launch.run import run
from paceline.request.config import Config
from paceline.request.prepare import prepare

CONTENDERS: dict[str, dict[str, Any]] = {
    "apart": {"strategy": "psgd", "shard": "global"},
    "plain": {"strategy": "allreduce"},
    "balanced": {"strategy": "allreduce", "balance": "measured"},
}


def bench_balance(
    data_dir: str | None,
    rounds: int,
    steps: int,
    batch_size: int,
    slower: float,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Run the three contenders in turns. The workers of `apart` never wait for each other, so the
    sum of their speeds is the ideal.
    """
    _, data = folder_and_data(data_dir)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in CONTENDERS}
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        for number in range(rounds):
            say(f"round {number + 1} of {rounds}")
            for name, options in CONTENDERS.items():
                config = {
                    "data": data.name,
                    "model": "cnn",
                    "workers": 2,
                    "threads": 1,
                    "batch_size": batch_size,
                    "steps": steps,
                    "memory_format": "channels_last",
                    "faults": (f"slow:rank=1,factor={slower:g}",),
                    "seed": number,
                    "out": f"{folder}/{name}-{number}",
                    **({"data_dir": data_dir} if data_dir else {}),
                    **options,
                }
                job = prepare(Config.make(config), lambda c: Path(folder))
                runs[name].append(run(job, lambda kind, content: None, clean=True))
    ideal = [sum(_speed(w) for w in r["workers"]) for r in runs["apart"]]
    slow = [_speed(r["workers"][1]) for r in runs["apart"]]
    plain, balanced = (
        [r["result"]["samples_per_s"] for r in runs[name]] for name in ("plain", "balanced")
    )
    within = [
        r["result"]["samples_per_s"] / sum(_speed(w) for w in r["workers"])
        for r in runs["balanced"]
    ]
    accuracies = {
        name: [r["result"]["test_accuracy"] for r in runs[name]] for name in ("plain", "balanced")
    }
    rows = [
        _row("the two workers apart: the ideal", ideal),
        _row("all-reduce", plain),
        _row("all-reduce, balance=measured", balanced),
        _row("all-reduce / the slow worker's own speed", _per_round(plain, slow), "ratio", "<= 2"),
        _row("balanced / ideal", _per_round(balanced, ideal), "ratio", ">= 0.85"),
        _row("balanced / its own workers' computing speed", within, "ratio"),
        _row("accuracy, all-reduce", accuracies["plain"], "accuracy"),
        _row("accuracy, balanced", accuracies["balanced"], "accuracy", "the same"),
    ]
    sizes = [r["balance"][-1]["batch_sizes"] if r["balance"] else None for r in runs["balanced"]]
    return {
        "data": data.name,
        "rounds": rounds,
        "steps": steps,
        "batch_size": batch_size,
        "slower": slower,
        "rows": rows,
        "batch_sizes": sizes,
    }


def _speed(worker: dict[str, Any]) -> float:
    return float(worker["samples"] / worker["compute_s"])


def _per_round(ours: list[float], theirs: list[float]) -> list[float]:
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def _row(
    title: str, values: list[float], unit: str = "samples/s", goal: str = ""
) -> dict[str, Any]:
    found = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {
        "title": title if unit == "ratio" else f"{title}, {unit}" if unit == "samples/s" else title,
        **found,
        "unit": unit,
        "goal": goal,
    }
