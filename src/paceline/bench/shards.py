"""Measure opening, training from and streaming of shards.

Training from shards is compared with training from memory; the stream is larger than its window.

\b
Examples:
  paceline bench shards
  paceline bench shards --shards 4 --megabytes 20 --rounds 5
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from paceline.bench.parts.benchmark import Option, Say
from paceline.bench.parts.table import Table
from paceline.report.words import size

OPTIONS = {
    "shards": Option(16, "how many shards are written", least=1),
    "megabytes": Option(100, "size of each shard", least=1),
    "rounds": Option(15, "interleaved rounds", least=1),
    "steps": Option(300, "steps per block", least=1),
}


def measure(say: Say, shards: int, megabytes: int, rounds: int, steps: int) -> dict[str, Any]:
    from paceline.bench.measure.shards import bench_shards

    return bench_shards(shards, megabytes, rounds, steps, say)


def show(result: dict[str, Any]) -> Iterator[Table | str]:
    opened, ratios = sorted(result["open_s_runs"]), sorted(result["ratios"])
    middle = f"{ratios[len(ratios) // 4]:.2f} - {ratios[-1 - len(ratios) // 4]:.2f}"
    megabytes = result["bytes"] / result["shards"] / 1e6
    yield Table(
        ("what", "measured", "spread", "goal"),
        [
            (
                "opening",
                f"{1e3 * result['open_s']:.1f} ms",
                f"{1e3 * opened[0]:.1f} - {1e3 * opened[-1]:.1f}",
                "< 100 ms",
            ),
            ("private memory", size(result["private_bytes"]), "", "< 50 MB"),
            (
                "training, shards / memory",
                f"{result['from_shards_over_memory']:.3f}",
                middle,
                ">= 0.95",
            ),
            (
                f"streaming {size(result['bytes'])}, most memory",
                size(result["stream_peak_bytes"]),
                "",
                f"<= {size(result['window_bytes'])}",
            ),
        ],
        f"{result['shards']} shards of {megabytes:g} MB",
    )
