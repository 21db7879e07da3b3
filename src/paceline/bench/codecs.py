"""Measure each codec: bytes of a message, time to code it.

Time is that of encoding and decoding, in units of one memcpy, and against PyTorch's own hooks.

\b
Examples:
  paceline bench codecs
  paceline bench codecs --model cnn-wide --workers 4
  paceline bench codecs --numbers 1000000 --rounds 9 --json
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from paceline.bench.parts.benchmark import ROUNDS, Option, Say
from paceline.bench.parts.table import Table, against_goal
from paceline.report.words import size

OPTIONS = {
    "model": Option("cnn-wide", "the model whose gradients make the message", names="models"),
    "workers": Option(4, "workers, for the bytes that each one sends", least=2),
    "numbers": Option(25_000_000, "how many numbers are encoded and decoded", least=1000),
    "rounds": ROUNDS,
}


def measure(say: Say, model: str, workers: int, numbers: int, rounds: int) -> dict[str, Any]:
    from paceline.bench.measure.codecs import bench_codecs

    return bench_codecs(model, workers, rounds, numbers, say)


def show(result: dict[str, Any]) -> Iterator[Table | str]:
    ring, workers, rows = result["ring_bytes"], result["workers"], result["codecs"]
    yield Table(
        ("codec", "message", "smaller", "goal", f"per worker, P={workers}", "of the ring's"),
        [
            (
                row["codec"],
                size(row["message_bytes"]),
                f"1/{row['smaller']:.1f}",
                f"1/{row['smaller_goal']:g}" if row["smaller_goal"] else "",
                size(row["per_worker_bytes"]),
                f"{row['per_worker_bytes'] / ring:.3f}",
            )
            for row in rows
        ],
        f"{result['model']}: {size(result['plain_bytes'])} of float32; a ring of {workers} sends"
        f" {size(ring)} per worker and step",
    )
    yield Table(
        ("codec", "memcpys*", "min - max", "goal"),
        [
            (row["codec"], *against_goal(row["memcpys"], row["memcpys_goal"], digits=1))
            for row in rows
        ],
    )
    yield (
        f"* time to encode and decode {result['numbers'] / 1e6:g} M numbers on one thread, without"
        f" error feedback, in units of one memcpy ({result['memcpy_ms']:.1f} ms); medians of"
        f" {result['rounds']} rounds"
    )
    for row in rows:
        if (hook := row["against_hook"]) is not None:
            yield (
                f"PyTorch's own {row['codec']} hook takes {hook['median']:.2f} times as long"
                f" ({hook['min']:.2f} - {hook['max']:.2f})"
            )
