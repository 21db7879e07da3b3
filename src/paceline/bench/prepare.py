"""Time the engines of `paceline prepare` against pandas.

Shards of the flights table are made with Polars, with Spark (with and without persist) and with
plain pandas.

\b
Examples:
  paceline bench prepare --millions 0.3
  paceline bench prepare --millions 0.3,5 --rounds 4
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from paceline.bench.parts.benchmark import Option, Say
from paceline.bench.parts.table import Table
from paceline.errors import BadRequest

OPTIONS = {
    "millions": Option("0.3,5", "rows of the table, in millions", metavar="X,..."),
    "rounds": Option(2, "rounds, each in the reverse order of the one before", least=1),
    "master": Option("local[*]", "Spark's master", metavar="URL"),
    "data_dir": Option(None, "folder in which the flights are looked for first", metavar="DIR"),
}
TIMES = ("start_s", "read_s", "count_s", "write_s", "work_s")


def measure(
    say: Say, millions: str, rounds: int, master: str, data_dir: str | None
) -> dict[str, Any]:
    try:
        sizes = tuple(float(part) for part in millions.split(","))
    except ValueError:
        raise BadRequest(f"--millions {millions}: give numbers like 0.3,5") from None
    from paceline.bench.measure.prepare import bench_prepare

    return bench_prepare(data_dir, sizes, rounds, master, say)


def show(result: dict[str, Any]) -> Iterator[Table | str]:
    for case in result["cases"]:
        yield Table(
            ("contender", "start", "read", "count", "write", "work", "x pandas", "spread"),
            [
                (
                    name,
                    *(f"{found[key]:.2f}" for key in TIMES),
                    f"{found['faster_than_pandas']:.2f}",
                    f"{min(found['ratios']):.2f} - {max(found['ratios']):.2f}",
                )
                for name, found in case["contenders"].items()
            ],
            f"{case['rows']:,} rows of flights, medians of {result['rounds']} round(s), seconds",
        )
    yield (
        "work: all but start. x pandas: how many times as fast. Spark reads when it counts; its"
        " `read` is the check of the joins."
    )
