"""Measure time to an accuracy on slow links (needs root).

Every worker has a host of its own (a network namespace). The peer is PyTorch's DDP.

\b
Examples:
  paceline bench network --rate 100mbit
  paceline bench network --rate 10mbit --contender allreduce/sign --contender gossip
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from paceline.bench.parts.benchmark import DATA_DIR, Option, Say
from paceline.bench.parts.table import Table
from paceline.report.words import size

OPTIONS = {
    "rate": Option("100mbit", "speed of every host's link: 10mbit, 1gbit", metavar="RATE"),
    "workers": Option(4, "hosts, with one worker on each", least=2),
    "model": Option("cnn-wide", "the model", names="models"),
    "batch_size": Option(8, "samples per worker; a small batch makes the network count", least=1),
    "target": Option(0.9, "test accuracy to reach", least=0.0, most=1.0),
    "rounds": Option(1, "interleaved rounds, each with its own seed", least=1),
    "contender": Option(
        (),
        "measure this one instead of the usual ones (may be repeated)",
        metavar="STRATEGY[/CODEC]",
        repeated=True,
    ),
    "data_dir": DATA_DIR,
}


def measure(
    say: Say,
    rate: str,
    workers: int,
    model: str,
    batch_size: int,
    target: float,
    rounds: int,
    contender: tuple[str, ...],
    data_dir: str | None,
) -> dict[str, Any]:
    from paceline.bench.measure.network import bench_network

    return bench_network(data_dir, rate, workers, model, batch_size, target, rounds, contender, say)


def show(result: dict[str, Any]) -> Iterator[Table | str]:
    reduce = result["all_reduce"]
    theory = (
        f", {reduce['of_theory']:.2f} times 2(P-1)/P * bytes / rate" if reduce["of_theory"] else ""
    )
    yield (
        f"an all-reduce of {size(reduce['bytes'])} by ring takes {reduce['seconds']:.3f} s"
        f" ({reduce['min']:.3f} - {reduce['max']:.3f}){theory}"
    )
    units = (
        "reached\ns",
        "steps\n",
        "compute\nms",
        "codec\nms",
        "exchange\nms",
        "sent\n",
        "x ddp\n",
    )
    yield Table(
        ("contender", *units),
        [_row(row) for row in result["rows"]],
        f"{result['model']} on {result['data']}, {result['workers']} hosts, {result['links']},"
        f" batch {result['batch_size']} each, until {result['target']:.0%}",
        framed=False,
    )
    yield "compute, codec, exchange, sent: per worker and step"
    best = (
        f"; the best contender reaches {result['of_bound']:.2f} of it"
        if result["of_bound"] is not None
        else "; no contender reached the accuracy"
    )
    yield (
        "bound (compute + communication) / compute, of plain all-reduce:"
        f" {result['bound']:.2f}{best}"
    )


def _row(row: dict[str, Any]) -> tuple[str, ...]:
    times = (row["compute_s"], row["codec_s"], row["exchange_s"])
    return (
        row["contender"],
        f"{row['seconds']:.1f}" if row["seconds"] is not None else "never",
        str(row["steps"]),
        *(f"{1e3 * t:.0f}" if t is not None else "" for t in times),
        size(row["sent_bytes"]),
        f"{row['sooner']:.2f}" if row["sooner"] is not None else "",
    )
