"""`paceline bench`"""

from __future__ import annotations

import json
from typing import Any

import click


@click.group()
def bench() -> None:
    """Us and the peers, interleaved, as ratios.

    \b
    Examples:
      paceline bench strategies
      paceline bench strategies --rounds 9 --json
      paceline bench collectives --workers 2 --sizes 4KB,1MB,10MB
    """


@bench.command()
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(1), help="interleaved rounds")
@click.option("--steps", default=150, show_default=True, type=click.IntRange(5), help="timed steps per round")
@click.option("--batch-size", default=64, show_default=True, type=click.IntRange(1))
@click.option("--data-dir", default=None, metavar="DIR", help="where MNIST is looked for first")
@click.option("--json", "as_json", is_flag=True, help="print everything measured to standard output")
@click.option("--debug", is_flag=True, help="show tracebacks")
def strategies(rounds: int, steps: int, batch_size: int, data_dir: str | None, as_json: bool, debug: bool) -> None:
    """Serial and all-reduce against the usual PyTorch loop and stock DDP: cnn, one thread per process."""
    import torch

    torch.set_num_threads(1)  # no pool of threads here: workers are forked from this process
    from rich.console import Console
    from rich.table import Table

    from paceline.bench.strategies import bench_strategies
    from paceline.cli.show import machine_line
    from paceline.record.machine import environment

    messages = Console(stderr=True)
    result: dict[str, Any] = bench_strategies(
        data_dir, rounds, steps, batch_size, lambda text: messages.print(text, highlight=False)
    )
    result["environment"] = env = environment()
    if as_json:
        click.echo(json.dumps(result, indent=2))
        return
    console = Console()
    rates = Table(
        title=f"cnn on {result['data']}, batch {batch_size} per worker, {steps} steps, {rounds} rounds",
        title_justify="left",
    )
    for heading in ("contender", "samples/s, median", "min", "max"):
        rates.add_column(heading, justify="left" if heading == "contender" else "right")
    for name, r in result["samples_per_s"].items():
        rates.add_row(name, *(f"{r[k]:,.0f}" for k in ("median", "min", "max")))
    console.print(rates)
    ratios = Table()
    for heading in ("ratio, per round", "median", "min - max", "goal"):
        ratios.add_column(heading, justify="left" if heading.startswith("ratio") else "right")
    for r in result["ratios"]:
        ratios.add_row(
            r["title"], f"{r['median']:.2f}", f"{r['min']:.2f} - {r['max']:.2f}", f"{r['goal']:g}" if r["goal"] else ""
        )
    console.print(ratios)
    console.print(machine_line(env), style="dim", highlight=False)
