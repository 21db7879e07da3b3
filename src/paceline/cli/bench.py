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
      paceline bench measuring
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
    bound = result["in_step_bound"]
    console.print(
        f"Waiting for the slower of two workers in every step leaves {bound['median']:.2f} "
        f"({bound['min']:.2f} - {bound['max']:.2f}) of the throughput here, whatever is exchanged: "
        "the bound for anything in step.",
        highlight=False,
    )
    beside = {name: f"{r['median']:,.0f}" for name, r in result["beside_a_straggler"].items()}
    told = ", ".join(f"{rate} with {name}" for name, rate in beside.items())
    console.print(f"The fast worker's samples/s beside one that is 3 times as slow: {told}.", highlight=False)
    for name, r in result["updates_per_s"].items():
        spread = f"({r['min']:,.0f} - {r['max']:,.0f}; goal {r['goal']:,})"
        console.print(f"{name}, 300,500 parameters, 2 workers: {r['median']:,.0f} updates/s {spread}", highlight=False)
    console.print(machine_line(env), style="dim", highlight=False)


UNITS = {"KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30, "B": 1}


def parse_size(text: str) -> int:
    """`4KB`, `10MB` (powers of two), or plain bytes."""
    from paceline.errors import BadRequest

    unit = next((u for u in UNITS if text.upper().endswith(u)), "")
    number, factor = text[: len(text) - len(unit)], UNITS.get(unit, 1)
    if not number.strip().isdigit() or int(number) * factor < 4:
        raise BadRequest(f"{text!r} is not a size like 4KB or 10MB (of at least 4 bytes)")
    return int(number) * factor


@bench.command()
@click.option("--workers", default="2,3,4", show_default=True, metavar="N,N", help="numbers of workers")
@click.option("--sizes", default="4KB,64KB,1MB,10MB,100MB", show_default=True, metavar="S,S", help="sizes of the buffer")
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(1), help="interleaved rounds")
@click.option("--json", "as_json", is_flag=True, help="print everything measured to standard output")
@click.option("--debug", is_flag=True, help="show tracebacks")
def collectives(workers: str, sizes: str, rounds: int, as_json: bool, debug: bool) -> None:
    """One all-reduce: every collective on every transport, against gloo's own."""
    import torch

    torch.set_num_threads(1)  # no pool of threads here: workers are forked from this process
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from paceline.bench.collectives import bench_collectives
    from paceline.cli.show import machine_line
    from paceline.errors import BadRequest
    from paceline.record.machine import environment
    from paceline.report.words import size as in_words

    if not all(n.strip().isdigit() and int(n) > 1 for n in workers.split(",")):
        raise BadRequest(f"--workers {workers}: numbers of 2 or more, with commas between them")
    messages = Console(stderr=True)
    result: dict[str, Any] = bench_collectives(
        [int(n) for n in workers.split(",")],
        [parse_size(s.strip()) for s in sizes.split(",")],
        rounds,
        lambda text: messages.print(text, highlight=False),
    )
    result["environment"] = env = environment()
    if as_json:
        click.echo(json.dumps(result, indent=2))
        return
    console = Console()
    rows = result["rows"]
    for count, size in dict.fromkeys((r["workers"], r["bytes"]) for r in rows):
        here = sorted((r for r in rows if (r["workers"], r["bytes"]) == (count, size)), key=lambda r: r["median_s"])
        star = " (oversubscribed)" if count > env["cores"] else ""
        table = Table(title=f"{count} workers{star}, {in_words(size)}", title_justify="left", box=box.SIMPLE_HEAD)
        for heading in ("transport", "collective", "median", "spread", "x gloo", "x MPI", "x limit"):
            table.add_column(heading, justify="left" if heading in ("transport", "collective") else "right")
        for r in here:
            spread = f"±{50 * (r['max_s'] - r['min_s']) / r['median_s']:.0f}%"
            shares = ["" if r[k] is None else f"{r[k]:.2f}" for k in ("times_gloo", "times_open_mpi", "memory_limit_share")]
            table.add_row(r["transport"], r["collective"], f"{1e3 * r['median_s']:.3f} ms", spread, *shares)
        console.print(table)
    console.print(
        "x gloo, x MPI: how many times as fast as gloo's and as Open MPI's own all-reduce in the same round. x limit: against "
        "the time in which one plain copy moves 2(P-1)/P of the buffer. Spread: half of max - min.",
        highlight=False,
    )
    console.print(machine_line(env), style="dim", highlight=False)


@bench.command()
@click.option("--blocks", default=200, show_default=True, type=click.IntRange(2), help="pairs of blocks of 20 steps")
@click.option("--batch-size", default=64, show_default=True, type=click.IntRange(1))
@click.option("--sample-every-s", default=0.5, show_default=True, type=click.FloatRange(0), help="seconds between samples")
@click.option("--data-dir", default=None, metavar="DIR", help="where MNIST is looked for first")
@click.option("--json", "as_json", is_flag=True, help="print everything measured to standard output")
@click.option("--debug", is_flag=True, help="show tracebacks")
def measuring(blocks: int, batch_size: int, sample_every_s: float, data_dir: str | None, as_json: bool, debug: bool) -> None:
    """What recording and sampling cost: throughput with them over throughput without, block by block."""
    import torch

    torch.set_num_threads(1)  # no pool of threads here: workers are forked from this process
    from rich.console import Console

    from paceline.bench.measuring import bench_measuring
    from paceline.cli.show import machine_line
    from paceline.record.machine import environment

    result = bench_measuring(data_dir, blocks, batch_size, sample_every_s)
    result["environment"] = env = environment()
    if as_json:
        click.echo(json.dumps(result, indent=2))
        return
    console = Console()
    low, _, high = result["quarters"]
    console.print(
        f"cnn on {result['data']}, 2 workers, batch {batch_size}, events, and samples every {sample_every_s:g} s: "
        "throughput is "
        f"{result['median']:.3f} of that without measuring (median of {result['pairs']} pairs of blocks, quarters "
        f"{low:.3f} and "
        f"{high:.3f}; goal {result['goal']:g}). Measuring itself took {100 * result['own_share']:.2f}% of the workers' time.",
        highlight=False,
    )
    console.print(machine_line(env), style="dim", highlight=False)
