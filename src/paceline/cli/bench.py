"""`paceline bench`"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from paceline.cli.bench_data import prepare, shards

if TYPE_CHECKING:
    from rich.console import Console


def say(text: str) -> None:
    """What is under way, beside the result."""
    from rich.console import Console

    Console(stderr=True).print(text, highlight=False)


def shown(result: dict[str, Any], as_json: bool) -> Console | None:
    """Where tables go; None where all that was measured has been printed as JSON. The machine is
    part of it.
    """
    from rich.console import Console

    from paceline.record.machine import environment

    result["environment"] = environment()
    if as_json:
        click.echo(json.dumps(result, indent=2))
        return None
    return Console()


def machine(console: Console, result: dict[str, Any]) -> None:
    from paceline.cli.show import machine_line

    console.print(machine_line(result["environment"]), style="dim", highlight=False)


@click.group()
def bench() -> None:
    """Us and the peers, interleaved, as ratios.

    \b
    Examples:
      paceline bench strategies
      paceline bench strategies --rounds 9 --json
      paceline bench collectives --workers 2 --sizes 4KB,1MB,10MB
      paceline bench codecs --model cnn-wide --workers 4
      paceline bench balance
      paceline bench privacy
      paceline bench prepare --millions 0.3
      paceline bench shards
      paceline bench network --rate 100mbit                  (needs root)
      paceline bench measuring
    """


@bench.command()
@click.option(
    "--rounds", default=5, show_default=True, type=click.IntRange(1), help="interleaved rounds"
)
@click.option(
    "--steps", default=150, show_default=True, type=click.IntRange(5), help="timed steps per round"
)
@click.option("--batch-size", default=64, show_default=True, type=click.IntRange(1))
@click.option("--data-dir", default=None, metavar="DIR", help="where MNIST is looked for first")
@click.option(
    "--json", "as_json", is_flag=True, help="print everything measured to standard output"
)
@click.option("--debug", is_flag=True, help="show tracebacks")
def strategies(
    rounds: int, steps: int, batch_size: int, data_dir: str | None, as_json: bool, debug: bool
) -> None:
    """Serial and all-reduce against the usual PyTorch loop and stock DDP: cnn, one thread per
    process.
    """
    import torch

    torch.set_num_threads(1)  # no pool of threads here: workers are forked from this process
    from rich.table import Table

    from paceline.bench.strategies import bench_strategies

    result: dict[str, Any] = bench_strategies(data_dir, rounds, steps, batch_size, say)
    if (console := shown(result, as_json)) is None:
        return
    rates = Table(
        title=(
            f"cnn on {result['data']}, batch {batch_size} per worker, {steps} steps, {rounds}"
            " rounds"
        ),
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
            r["title"],
            f"{r['median']:.2f}",
            f"{r['min']:.2f} - {r['max']:.2f}",
            f"{r['goal']:g}" if r["goal"] else "",
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
    console.print(
        f"The fast worker's samples/s beside one that is 3 times as slow: {told}.", highlight=False
    )
    for name, r in result["updates_per_s"].items():
        spread = f"({r['min']:,.0f} - {r['max']:,.0f}; goal {r['goal']:,})"
        console.print(
            f"{name}, 300,500 parameters, 2 workers: {r['median']:,.0f} updates/s {spread}",
            highlight=False,
        )
    machine(console, result)


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
@click.option(
    "--workers", default="2,3,4", show_default=True, metavar="N,N", help="numbers of workers"
)
@click.option(
    "--sizes",
    default="4KB,64KB,1MB,10MB,100MB",
    show_default=True,
    metavar="S,S",
    help="sizes of the buffer",
)
@click.option(
    "--rounds", default=3, show_default=True, type=click.IntRange(1), help="interleaved rounds"
)
@click.option(
    "--json", "as_json", is_flag=True, help="print everything measured to standard output"
)
@click.option("--debug", is_flag=True, help="show tracebacks")
def collectives(workers: str, sizes: str, rounds: int, as_json: bool, debug: bool) -> None:
    """One all-reduce: every collective on every transport, against gloo's own."""
    import torch

    torch.set_num_threads(1)  # no pool of threads here: workers are forked from this process
    from rich import box
    from rich.table import Table

    from paceline.bench.collectives import bench_collectives
    from paceline.errors import BadRequest
    from paceline.report.words import size as in_words

    if not all(n.strip().isdigit() and int(n) > 1 for n in workers.split(",")):
        raise BadRequest(f"--workers {workers}: numbers of 2 or more, with commas between them")
    result: dict[str, Any] = bench_collectives(
        [int(n) for n in workers.split(",")],
        [parse_size(s.strip()) for s in sizes.split(",")],
        rounds,
        say,
    )
    if (console := shown(result, as_json)) is None:
        return
    rows = result["rows"]
    for count, size in dict.fromkeys((r["workers"], r["bytes"]) for r in rows):
        here = sorted(
            (r for r in rows if (r["workers"], r["bytes"]) == (count, size)),
            key=lambda r: r["median_s"],
        )
        star = " (oversubscribed)" if count > result["environment"]["cores"] else ""
        table = Table(
            title=f"{count} workers{star}, {in_words(size)}",
            title_justify="left",
            box=box.SIMPLE_HEAD,
        )
        for heading in (
            "transport",
            "collective",
            "median",
            "spread",
            "x gloo",
            "x MPI",
            "x limit",
        ):
            table.add_column(
                heading, justify="left" if heading in ("transport", "collective") else "right"
            )
        for r in here:
            spread = f"±{50 * (r['max_s'] - r['min_s']) / r['median_s']:.0f}%"
            shares = [
                "" if r[k] is None else f"{r[k]:.2f}"
                for k in ("times_gloo", "times_open_mpi", "memory_limit_share")
            ]
            table.add_row(
                r["transport"], r["collective"], f"{1e3 * r['median_s']:.3f} ms", spread, *shares
            )
        console.print(table)
    console.print(
        "x gloo, x MPI: how many times as fast as gloo's and as Open MPI's own all-reduce in the"
        " same round. x limit: against the time in which one plain copy moves 2(P-1)/P of the"
        " buffer. Spread: half of max - min.",
        highlight=False,
    )
    machine(console, result)


@bench.command()
@click.option(
    "--blocks",
    default=200,
    show_default=True,
    type=click.IntRange(2),
    help="pairs of blocks of 20 steps",
)
@click.option("--batch-size", default=64, show_default=True, type=click.IntRange(1))
@click.option(
    "--sample-every-s",
    default=0.5,
    show_default=True,
    type=click.FloatRange(0),
    help="seconds between samples",
)
@click.option("--data-dir", default=None, metavar="DIR", help="where MNIST is looked for first")
@click.option(
    "--json", "as_json", is_flag=True, help="print everything measured to standard output"
)
@click.option("--debug", is_flag=True, help="show tracebacks")
def measuring(
    blocks: int,
    batch_size: int,
    sample_every_s: float,
    data_dir: str | None,
    as_json: bool,
    debug: bool,
) -> None:
    """What recording and sampling cost: throughput with them over throughput without, block by
    block.
    """
    import torch

    torch.set_num_threads(1)  # no pool of threads here: workers are forked from this process

    from paceline.bench.measuring import bench_measuring

    result = bench_measuring(data_dir, blocks, batch_size, sample_every_s)
    if (console := shown(result, as_json)) is None:
        return
    low, _, high = result["quarters"]
    console.print(
        f"cnn on {result['data']}, 2 workers, batch {batch_size}, events, and samples every"
        f" {sample_every_s:g} s: throughput is {result['median']:.3f} of that without measuring"
        f" (median of {result['pairs']} pairs of blocks, quarters {low:.3f} and {high:.3f}; goal"
        f" {result['goal']:g}). Measuring itself took {100 * result['own_share']:.2f}% of the"
        " workers' time.",
        highlight=False,
    )
    machine(console, result)


@bench.command()
@click.option("--model", default="cnn-wide", show_default=True, help="whose message is counted")
@click.option(
    "--workers",
    default=4,
    show_default=True,
    type=click.IntRange(2),
    help="for the bytes per worker",
)
@click.option(
    "--numbers",
    default=25_000_000,
    show_default=True,
    type=click.IntRange(1000),
    help="that are encoded and decoded",
)
@click.option(
    "--rounds", default=5, show_default=True, type=click.IntRange(1), help="interleaved rounds"
)
@click.option(
    "--json", "as_json", is_flag=True, help="print everything measured to standard output"
)
@click.option("--debug", is_flag=True, help="show tracebacks")
def codecs(model: str, workers: int, numbers: int, rounds: int, as_json: bool, debug: bool) -> None:
    """What a message of each codec costs: its bytes, and the time to make and to read it."""
    from rich.table import Table

    from paceline.bench.codecs import bench_codecs
    from paceline.report.words import size

    result = bench_codecs(model, workers, rounds, numbers, say)
    if (console := shown(result, as_json)) is None:
        return
    ring = result["ring_bytes"]
    sizes = Table(
        title=(
            f"{model}: {size(result['plain_bytes'])} of float32; a ring of {workers} sends"
            f" {size(ring)} per worker and step"
        ),
        title_justify="left",
    )
    times = Table()
    for heading in (
        "codec",
        "message",
        "smaller",
        "goal",
        f"per worker, P={workers}",
        "of the ring's",
    ):
        sizes.add_column(heading, justify="left" if heading == "codec" else "right")
    for heading in ("codec", "memcpys*", "min - max", "goal"):
        times.add_column(heading, justify="left" if heading == "codec" else "right")
    for row in result["codecs"]:
        own = row["memcpys"]
        smaller, sent = f"1/{row['smaller']:.1f}", row["per_worker_bytes"]
        goal = f"1/{row['smaller_goal']:g}" if row["smaller_goal"] else ""
        sizes.add_row(
            row["codec"],
            size(row["message_bytes"]),
            smaller,
            goal,
            size(sent),
            f"{sent / ring:.3f}",
        )
        goal = f"{row['memcpys_goal']:g}" if row["memcpys_goal"] else ""
        times.add_row(
            row["codec"], f"{own['median']:.1f}", f"{own['min']:.1f} - {own['max']:.1f}", goal
        )
    console.print(sizes)
    console.print(times)
    what = (
        f"* encode and decode of {result['numbers'] / 1e6:g} M numbers, one thread, no error"
        " feedback, in times of one memcpy"
    )
    console.print(
        f"{what} ({result['memcpy_ms']:.1f} ms); medians of {rounds} rounds", highlight=False
    )
    for row in result["codecs"]:
        if (beside := row["against_hook"]) is not None:
            spread = f"({beside['min']:.2f} - {beside['max']:.2f})"
            console.print(
                f"PyTorch's own {row['codec']} hook takes {beside['median']:.2f} times as long"
                f" {spread}",
                highlight=False,
            )
    machine(console, result)


@bench.command()
@click.option(
    "--rounds", default=5, show_default=True, type=click.IntRange(1), help="interleaved rounds"
)
@click.option(
    "--steps", default=400, show_default=True, type=click.IntRange(30), help="steps per round"
)
@click.option("--batch-size", default=64, show_default=True, type=click.IntRange(2))
@click.option(
    "--slower",
    default=3.0,
    show_default=True,
    type=click.FloatRange(1.0),
    help="how much slower worker 1 is",
)
@click.option("--data-dir", default=None, metavar="DIR", help="where MNIST is looked for first")
@click.option(
    "--json", "as_json", is_flag=True, help="print everything measured to standard output"
)
@click.option("--debug", is_flag=True, help="show tracebacks")
def balance(
    rounds: int,
    steps: int,
    batch_size: int,
    slower: float,
    data_dir: str | None,
    as_json: bool,
    debug: bool,
) -> None:
    """Two workers, one of them slowed down: all-reduce with batch sizes by speed, without, and the
    ideal.
    """
    import torch

    torch.set_num_threads(1)
    from rich.table import Table

    from paceline.bench.balance import bench_balance

    result = bench_balance(data_dir, rounds, steps, batch_size, slower, say)
    if (console := shown(result, as_json)) is None:
        return
    title = (
        f"cnn on {result['data']}, batch {batch_size} x 2, worker 1 {slower:g} times as slow,"
        f" {steps} steps, {rounds} rounds"
    )
    table = Table(title=title, title_justify="left")
    for heading in ("", "median", "min - max", "goal"):
        table.add_column(heading, justify="left" if not heading else "right")
    for row in result["rows"]:
        digits = {"samples/s": ",.0f", "accuracy": ".3f"}.get(row["unit"], ".2f")
        table.add_row(
            row["title"],
            f"{row['median']:{digits}}",
            f"{row['min']:{digits}} - {row['max']:{digits}}",
            row["goal"],
        )
    console.print(table)
    machine(console, result)


@bench.command()
@click.option(
    "--rounds",
    default=31,
    show_default=True,
    type=click.IntRange(2),
    help="pairs of blocks, in turns",
)
@click.option("--steps", default=10, show_default=True, type=click.IntRange(1), help="per block")
@click.option("--batch-sizes", default="64,256", show_default=True, metavar="N,N")
@click.option("--data-dir", default=None, metavar="DIR", help="where MNIST is looked for first")
@click.option(
    "--json", "as_json", is_flag=True, help="print everything measured to standard output"
)
@click.option("--debug", is_flag=True, help="show tracebacks")
def privacy(
    rounds: int, steps: int, batch_sizes: str, data_dir: str | None, as_json: bool, debug: bool
) -> None:
    """Private training against plain training and against Opacus, one thread: mlp and cnn."""
    import torch

    torch.set_num_threads(1)
    from rich.table import Table

    from paceline.bench.privacy import bench_privacy
    from paceline.errors import BadRequest
    from paceline.report.words import size

    if not all(n.strip().isdigit() and int(n) for n in batch_sizes.split(",")):
        raise BadRequest(f"--batch-sizes {batch_sizes}: numbers like 64,256")
    result = bench_privacy(
        data_dir, rounds, steps, tuple(int(n) for n in batch_sizes.split(",")), say
    )
    if (console := shown(result, as_json)) is None:
        return
    rates = Table(
        title=f"samples/s on {result['data']}, one thread, noise {result['noise']:g}",
        title_justify="left",
    )
    ratios = Table(
        title=f"ratios of neighbouring blocks of {steps} steps, {rounds} pairs",
        title_justify="left",
    )
    for heading in ("model", "batch", "contender", "samples/s"):
        rates.add_column(heading, justify="right" if heading in ("batch", "samples/s") else "left")
    for heading in ("model", "batch", "ratio", "median", "middle half", "goal"):
        ratios.add_column(heading, justify="left" if heading in ("model", "ratio") else "right")
    for case in result["cases"]:
        name, batch = case["model"], str(case["batch_size"])
        for contender, rate in sorted(case["samples_per_s"].items(), key=lambda pair: -pair[1]):
            rates.add_row(name, batch, contender, f"{rate:,.0f}")
        for r in case["ratios"]:
            spread = " - ".join(f"{q:.2f}" for q in r["quarters"])
            ratios.add_row(
                name,
                batch,
                r["title"],
                f"{r['median']:.2f}",
                spread,
                f">= {r['goal']:g}" if r["goal"] else "",
            )
        memory = {k: size(v["peak"]) for k, v in case["memory_bytes"].items()}
        told = f"memory, {memory['private']} / {memory['plain']}"
        ratios.add_row(
            name, batch, told, f"{case['memory_ratio']:.2f}", "", f"<= {case['memory_goal']:g}"
        )
    console.print(rates)
    console.print(ratios)
    for case in result["cases"]:
        for mode, why in case["left_out"].items():
            console.print(f"Opacus, {mode}, {case['model']}: left out ({why})", highlight=False)
    machine(console, result)


@bench.command()
@click.option("--rate", default="100mbit", show_default=True, help="of every host's link")
@click.option("--workers", default=4, show_default=True, type=click.IntRange(2))
@click.option("--model", default="cnn-wide", show_default=True)
@click.option(
    "--batch-size",
    default=8,
    show_default=True,
    type=click.IntRange(1),
    help="small, so that the network counts",
)
@click.option(
    "--target",
    default=0.9,
    show_default=True,
    type=click.FloatRange(0.0, 1.0),
    help="accuracy to be reached",
)
@click.option(
    "--rounds",
    default=1,
    show_default=True,
    type=click.IntRange(1),
    help="interleaved rounds, each with its seed",
)
@click.option(
    "--contender",
    "contenders",
    multiple=True,
    metavar="STRATEGY[/CODEC]",
    help="instead of the usual ones",
)
@click.option("--data-dir", default=None, metavar="DIR", help="where MNIST is looked for first")
@click.option(
    "--json", "as_json", is_flag=True, help="print everything measured to standard output"
)
@click.option("--debug", is_flag=True, help="show tracebacks")
def network(
    rate: str,
    workers: int,
    model: str,
    batch_size: int,
    target: float,
    rounds: int,
    contenders: tuple[str, ...],
    data_dir: str | None,
    as_json: bool,
    debug: bool,
) -> None:
    """Hosts on a slow network (needs root): who reaches an accuracy first, against
    PyTorch's DDP.
    """
    import torch

    torch.set_num_threads(1)
    from rich import box
    from rich.table import Table

    from paceline.bench.network import bench_network
    from paceline.report.words import size

    result = bench_network(
        data_dir, rate, workers, model, batch_size, target, rounds, contenders, say
    )
    if (console := shown(result, as_json)) is None:
        return
    reduce = result["all_reduce"]
    theory = (
        f", {reduce['of_theory']:.2f} times 2(P-1)/P * bytes / rate" if reduce["of_theory"] else ""
    )
    spread = f"({reduce['min']:.3f} - {reduce['max']:.3f})"
    console.print(
        f"an all-reduce of {size(reduce['bytes'])} by ring takes {reduce['seconds']:.3f} s"
        f" {spread}{theory}",
        highlight=False,
    )
    title = (
        f"{model} on {result['data']}, {workers} hosts, {result['links']}, batch {batch_size} each,"
        f" until {target:.0%}"
    )
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1), show_edge=False
    )
    table.add_column("contender", no_wrap=True)
    for heading in (
        "reached\ns",
        "steps\n",
        "compute\nms",
        "codec\nms",
        "exchange\nms",
        "sent\n",
        "x ddp\n",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in result["rows"]:
        reached = f"{row['seconds']:.1f}" if row["seconds"] is not None else "never"
        ratio = f"{row['sooner']:.2f}" if row["sooner"] is not None else ""
        times = [
            f"{1e3 * row[k]:.0f}" if row[k] is not None else ""
            for k in ("compute_s", "codec_s", "exchange_s")
        ]
        table.add_row(
            row["contender"], reached, str(row["steps"]), *times, size(row["sent_bytes"]), ratio
        )
    console.print(table)
    console.print("compute, codec, exchange, sent: per worker and step", highlight=False)
    bound = f"bound (compute + communication) / compute, of plain all-reduce: {result['bound']:.2f}"
    best = (
        f"; the best is at {result['of_bound']:.2f} of it"
        if result["of_bound"] is not None
        else "; nobody got there"
    )
    console.print(bound + best, highlight=False)
    machine(console, result)


bench.add_command(prepare)
bench.add_command(shards)
