"""`paceline bench prepare` and `paceline bench shards`"""

from __future__ import annotations

from typing import Any

import click


@click.command()
@click.option(
    "--millions",
    default="0.3,5",
    show_default=True,
    metavar="LIST",
    help="rows of the table, in millions",
)
@click.option(
    "--rounds",
    default=2,
    show_default=True,
    type=click.IntRange(1),
    help="each in the other order than the last",
)
@click.option("--master", default="local[*]", show_default=True, help="Spark's")
@click.option("--data-dir", default=None, metavar="DIR", help="where flights are looked for first")
@click.option(
    "--json", "as_json", is_flag=True, help="print everything measured to standard output"
)
@click.option("--debug", is_flag=True, help="show tracebacks")
def prepare(
    millions: str, rounds: int, master: str, data_dir: str | None, as_json: bool, debug: bool
) -> None:
    """Making shards of the flights table: Polars, Spark with and without persist, plain pandas."""
    from rich.table import Table

    from paceline.bench.prepare import bench_prepare
    from paceline.cli.bench import machine, say, shown
    from paceline.errors import BadRequest

    try:
        sizes = tuple(float(m) for m in millions.split(","))
    except ValueError:
        raise BadRequest(f"--millions {millions}: numbers like 0.3,5") from None
    result = bench_prepare(data_dir, sizes, rounds, master, say)
    if (console := shown(result, as_json)) is None:
        return
    for case in result["cases"]:
        title = f"{case['rows']:,} rows of flights, medians of {rounds} round(s), seconds"
        table = Table(title=title, title_justify="left")
        table.add_column("contender")
        for heading in ("start", "read", "count", "write", "work", "x pandas", "spread"):
            table.add_column(heading, justify="right")
        for name, found in case["contenders"].items():
            spread = f"{min(found['ratios']):.2f} - {max(found['ratios']):.2f}"
            times = [
                f"{found[k]:.2f}" for k in ("start_s", "read_s", "count_s", "write_s", "work_s")
            ]
            table.add_row(name, *times, f"{found['faster_than_pandas']:.2f}", spread)
        console.print(table)
    note = (
        "work: without start; x pandas: how many times as fast. Spark reads when it counts; its"
        " `read` is the joins' checks."
    )
    console.print(note, highlight=False)
    machine(console, result)


@click.command()
@click.option("--shards", "count", default=16, show_default=True, type=click.IntRange(1))
@click.option(
    "--megabytes", default=100, show_default=True, type=click.IntRange(1), help="of each shard"
)
@click.option("--rounds", default=15, show_default=True, type=click.IntRange(1))
@click.option("--steps", default=300, show_default=True, type=click.IntRange(1), help="in a block")
@click.option(
    "--json", "as_json", is_flag=True, help="print everything measured to standard output"
)
@click.option("--debug", is_flag=True, help="show tracebacks")
def shards(count: int, megabytes: int, rounds: int, steps: int, as_json: bool, debug: bool) -> None:
    """Opening shards, training from them against training from memory, streaming more than a window
    holds.
    """
    import torch

    torch.set_num_threads(1)
    from rich.table import Table

    from paceline.bench.shards import bench_shards
    from paceline.cli.bench import machine, say, shown
    from paceline.report.words import size

    result = bench_shards(count, megabytes, rounds, steps, say)
    if (console := shown(result, as_json)) is None:
        return
    table = Table(title=f"{count} shards of {megabytes} MB", title_justify="left")
    for heading in ("what", "measured", "spread", "goal"):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    opened: list[Any] = sorted(result["open_s_runs"])
    table.add_row(
        "opening",
        f"{1e3 * result['open_s']:.1f} ms",
        f"{1e3 * opened[0]:.1f} - {1e3 * opened[-1]:.1f}",
        "< 100 ms",
    )
    table.add_row("private memory", size(result["private_bytes"]), "", "< 50 MB")
    ratios = sorted(result["ratios"])
    middle = f"{ratios[len(ratios) // 4]:.2f} - {ratios[-1 - len(ratios) // 4]:.2f}"
    table.add_row(
        "training, shards / memory", f"{result['from_shards_over_memory']:.3f}", middle, ">= 0.95"
    )
    table.add_row(
        f"streaming {size(result['bytes'])}, most memory",
        size(result["stream_peak_bytes"]),
        "",
        f"<= {size(result['window_bytes'])}",
    )
    console.print(table)
    machine(console, result)
