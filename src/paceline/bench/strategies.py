"""Compare training with a usual PyTorch loop and stock DDP.

The model is cnn; every process has one thread. The throughput without any communication and the
updates per second of an asynchronous parameter server are measured too.

\b
Examples:
  paceline bench strategies
  paceline bench strategies --rounds 9 --json
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from paceline.bench.parts.benchmark import BATCH_SIZE, DATA_DIR, ROUNDS, Option, Say
from paceline.bench.parts.table import Table, against_goal

OPTIONS = {
    "rounds": ROUNDS,
    "steps": Option(150, "timed steps per round", least=5),
    "batch_size": BATCH_SIZE,
    "data_dir": DATA_DIR,
}


def measure(
    say: Say, rounds: int, steps: int, batch_size: int, data_dir: str | None
) -> dict[str, Any]:
    from paceline.bench.measure.strategies import bench_strategies

    return bench_strategies(data_dir, rounds, steps, batch_size, say)


def show(result: dict[str, Any]) -> Iterator[Table | str]:
    yield Table(
        ("contender", "samples/s, median", "min", "max"),
        [
            (name, *(f"{r[k]:,.0f}" for k in ("median", "min", "max")))
            for name, r in result["samples_per_s"].items()
        ],
        f"cnn on {result['data']}, batch {result['batch_size']} per worker,"
        f" {result['steps']} steps, {result['rounds']} rounds",
    )
    yield Table(
        ("ratio, per round", "median", "min - max", "goal"),
        [(r["title"], *against_goal(r, r["goal"], digits=2)) for r in result["ratios"]],
    )
    bound = result["in_step_bound"]
    yield (
        "A synchronous strategy waits for the slower of two workers in every step. That wait alone"
        f" leaves {bound['median']:.2f} ({bound['min']:.2f} - {bound['max']:.2f}) of the throughput"
        " here: no synchronous strategy can exceed it."
    )
    rates = ", ".join(
        f"{r['median']:,.0f} with {name}" for name, r in result["beside_a_straggler"].items()
    )
    yield f"The fast worker's samples/s while the other worker is 3 times as slow: {rates}."
    for name, r in result["updates_per_s"].items():
        yield (
            f"{name}, 300,500 parameters, 2 workers: {r['median']:,.0f} updates/s"
            f" ({r['min']:,.0f} - {r['max']:,.0f}; goal {r['goal']:,})"
        )
