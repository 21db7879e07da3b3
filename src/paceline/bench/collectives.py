"""Time all-reduce by every collective on every transport.

The peers are gloo's own all-reduce and Open MPI's.

\b
Examples:
  paceline bench collectives
  paceline bench collectives --workers 2 --sizes 4KB,1MB,10MB
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from paceline.bench.parts.benchmark import Option, Say, integers
from paceline.bench.parts.table import Table
from paceline.errors import BadRequest
from paceline.report.words import size as in_words

OPTIONS = {
    "workers": Option("2,3,4", "numbers of workers, each 2 or more", metavar="N,..."),
    "sizes": Option(
        "4KB,64KB,1MB,10MB,100MB", "sizes of the buffer in B, KB, MB or GB", metavar="SIZE,..."
    ),
    "rounds": Option(3, "interleaved rounds", least=1),
}
UNITS = {"KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30, "B": 1}


def measure(say: Say, workers: str, sizes: str, rounds: int) -> dict[str, Any]:
    counts = integers("--workers", workers, least=2)
    sizes_bytes = [parse_size(text.strip()) for text in sizes.split(",")]
    from paceline.bench.measure.collectives import bench_collectives

    return bench_collectives(counts, sizes_bytes, rounds, say)


def parse_size(text: str) -> int:
    """Read `4KB`, `10MB` (powers of two) or a plain number of bytes."""
    unit = next((u for u in UNITS if text.upper().endswith(u)), "")
    number, factor = text[: len(text) - len(unit)], UNITS.get(unit, 1)
    if not number.strip().isdigit() or int(number) * factor < 4:
        raise BadRequest(f"{text!r} is not a size like 4KB or 10MB (of at least 4 bytes)")
    return int(number) * factor


def show(result: dict[str, Any]) -> Iterator[Table | str]:
    rows = result["rows"]
    for count, size in dict.fromkeys((r["workers"], r["bytes"]) for r in rows):
        here = [r for r in rows if (r["workers"], r["bytes"]) == (count, size)]
        crowded = " (oversubscribed)" if count > result["environment"]["cores"] else ""
        yield Table(
            ("transport", "collective", "median", "spread", "x gloo", "x MPI", "x limit"),
            [_row(r) for r in sorted(here, key=lambda r: r["median_s"])],
            f"{count} workers{crowded}, {in_words(size)}",
            left=(0, 1),
            framed=False,
        )
        yield ""
    yield (
        "x gloo, x MPI: how many times as fast as gloo's and Open MPI's own all-reduce in the same"
        " round. x limit: the share of the speed at which one plain copy moves 2(P-1)/P of the"
        " buffer. Spread: half of max - min."
    )


def _row(r: dict[str, Any]) -> tuple[str, ...]:
    ratios = (r["times_gloo"], r["times_open_mpi"], r["memory_limit_share"])
    return (
        r["transport"],
        r["collective"],
        f"{1e3 * r['median_s']:.3f} ms",
        f"±{50 * (r['max_s'] - r['min_s']) / r['median_s']:.0f}%",
        *("" if ratio is None else f"{ratio:.2f}" for ratio in ratios),
    )
