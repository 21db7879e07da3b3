"""Balance batch sizes by speed where one worker is slow.

The contenders are all-reduce with equal batch sizes, all-reduce with batch sizes by measured speed,
and the ideal: the sum of both workers' own speeds.

\b
Examples:
  paceline bench balance
  paceline bench balance --slower 2 --rounds 9
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from paceline.bench.parts.benchmark import DATA_DIR, ROUNDS, Option, Say
from paceline.bench.parts.table import Table

OPTIONS = {
    "rounds": ROUNDS,
    "steps": Option(400, "steps per round", least=30),
    "batch_size": Option(64, "samples per worker and step before balancing", least=2),
    "slower": Option(3.0, "how many times as slow worker 1 is", least=1.0),
    "data_dir": DATA_DIR,
}
DIGITS = {"samples/s": ",.0f", "accuracy": ".3f", "ratio": ".2f"}


def measure(
    say: Say, rounds: int, steps: int, batch_size: int, slower: float, data_dir: str | None
) -> dict[str, Any]:
    from paceline.bench.measure.balance import bench_balance

    return bench_balance(data_dir, rounds, steps, batch_size, slower, say)


def show(result: dict[str, Any]) -> Iterator[Table | str]:
    rows = []
    for row in result["rows"]:
        median, low, high = (f"{row[k]:{DIGITS[row['unit']]}}" for k in ("median", "min", "max"))
        rows.append((row["title"], median, f"{low} - {high}", row["goal"]))
    yield Table(
        ("", "median", "min - max", "goal"),
        rows,
        f"cnn on {result['data']}, batch {result['batch_size']} x 2, worker 1"
        f" {result['slower']:g} times as slow, {result['steps']} steps, {result['rounds']} rounds",
    )
