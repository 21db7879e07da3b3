"""`paceline plan`"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from paceline.planning.answer import Plan, Row

STRATEGIES = ("allreduce", "ps", "local-sgd", "gossip")
LOST = {
    "latency": "the latency of the network",
    "bandwidth": "the limit of the bandwidth",
    "waiting": "waiting for slower workers",
    "coding": "encoding and adding",
}
MOST_ROWS = 24  # of a table without --all


@click.command()
@click.argument("profile", metavar="PROFILE", type=click.Path())
@click.option(
    "--strategy",
    "strategies",
    multiple=True,
    metavar="NAME[:key=value,...]",
    help=f"a strategy; may be given several times  [default: {', '.join(STRATEGIES)}]",
)
@click.option(
    "--codec", "codecs", multiple=True, metavar="NAME", help="a codec  [default: none and fp16]"
)
@click.option(
    "--workers",
    default="1,2,4,8,16",
    show_default=True,
    metavar="1,2,4|1-16",
    help="numbers of workers to predict",
)
@click.option(
    "--network",
    default="lan",
    show_default=True,
    metavar="RATE[,latency=TIME]",
    help="the links between hosts: 10gbit,latency=50us, or lan, datacenter, wan",
)
@click.option(
    "--inside", default=None, metavar="RATE[,latency=TIME]", help="the links inside a host"
)
@click.option(
    "--hosts", default=None, metavar="NxM", help="N hosts with M workers each  [default: one each]"
)
@click.option("--cores", default=None, type=click.IntRange(1), help="of a host, for its workers")
@click.option("--servers", default=1, show_default=True, type=click.IntRange(1), help="of ps")
@click.option("--speeds", default=None, metavar="1,1,0.5", help="of the workers, repeated")
@click.option("--price", default=None, type=float, metavar="X", help="of one host, per hour")
@click.option("--batch-size", default=None, type=click.IntRange(1), help="of each worker")
@click.option("--global-batch-size", default=None, type=click.IntRange(1), help="of all workers")
@click.option("--samples", default=None, type=click.IntRange(1), help="of the data, for epochs")
@click.option("--seed", default=0, show_default=True, type=int, help="of the drawn step times")
@click.option("--all", "whole", is_flag=True, help="show all rows, not only the best")
@click.option("--json", "as_json", is_flag=True, help="print the plan as JSON")
@click.option("--plugin", multiple=True, metavar="FILE", help="a Python file that registers more")
@click.option("--debug", is_flag=True, help="show tracebacks")
def plan(
    profile: str,
    strategies: tuple[str, ...],
    codecs: tuple[str, ...],
    workers: str,
    network: str,
    inside: str | None,
    hosts: str | None,
    cores: int | None,
    servers: int,
    speeds: str | None,
    price: float | None,
    batch_size: int | None,
    global_batch_size: int | None,
    samples: int | None,
    seed: int,
    whole: bool,
    as_json: bool,
    plugin: tuple[str, ...],
    debug: bool,
) -> None:
    """Predict how fast strategies would train on a cluster, from a profile of one or two workers.

    PROFILE is a file that `paceline profile` has written. Every strategy is predicted with every
    codec and every number of workers: samples per second with a 95% interval, the speedup over one
    worker, what limits it. All figures are predictions.

    \b
    Examples:
      paceline profile --model cnn --data mnist --out profile.json
      paceline plan profile.json --network 10gbit,latency=50us --workers 1-16
      paceline plan profile.json --hosts 16x4 --cores 4 --price 1.20 --workers 4,16,64
      paceline plan profile.json --strategy ps:consistency=async --servers 2 --network wan
      paceline plan profile.json --global-batch-size 512 --codec none --codec topk --json
    """
    from paceline.errors import BadRequest
    from paceline.planning.answer import Request
    from paceline.planning.answer import plan as planned
    from paceline.planning.cluster import (
        MEMORY,
        Cluster,
        read_hosts,
        read_link,
        read_speeds,
        read_workers,
    )
    from paceline.planning.stored import read_profile
    from paceline.planning.workers import worker_of
    from paceline.registry import load_plugin

    for file in plugin:
        load_plugin(file)
    if batch_size is not None and global_batch_size is not None:
        raise BadRequest("give --batch-size or --global-batch-size, not both")
    if price is not None and not 0 <= price < float("inf"):
        raise BadRequest(f"price={price}: it must be a number, 0 or more")
    known = read_profile(profile)
    count, per_host = read_hosts(hosts) if hosts is not None else (None, 1)
    cluster = Cluster(
        read_link(network),
        MEMORY if inside is None else read_link(inside),
        count,
        per_host,
        cores,
        read_speeds(speeds) if speeds is not None else (1.0,),
        price,
    )
    request = Request(
        strategies or STRATEGIES,
        codecs or ("none", "fp16"),
        read_workers(workers),
        cluster,
        batch_size or (None if global_batch_size else known.compute.batch_sizes[-1]),
        global_batch_size,
        servers,
        samples,
        seed,
    )
    found = planned(request, worker_of(known), _progress())
    found = replace(found, notices=(*found.notices, *known.missing))
    if as_json:
        click.echo(json.dumps(found.described(), indent=2))
        return
    _show(found, network, whole, known.model.name)


def _progress() -> Callable[[int, int], None]:
    """Tell how many settings are done, on a terminal only."""
    if not sys.stderr.isatty():
        return lambda done, of: None

    def say(done: int, of: int) -> None:
        text = f"\rpredicting {done} of {of} settings" if done < of else "\r" + " " * 40 + "\r"
        click.echo(text, err=True, nl=False)

    return say


def _show(found: Plan, network: str, whole: bool, model: str) -> None:
    from rich.console import Console
    from rich.table import Table

    priced = found.cheapest is not None
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("strategy, codec", overflow="fold")
    names = ("workers", "samples/s", "95% interval", "speedup", *(("price",) if priced else ()))
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    rows = sorted(found.rows, key=lambda row: -row.prediction.samples_per_s)
    for row in rows if whole else rows[:MOST_ROWS]:
        p = row.prediction
        table.add_row(
            row.name,
            str(row.workers),
            f"{p.samples_per_s:,.0f}",
            f"{p.low:,.0f} to {p.high:,.0f}",
            f"{row.speedup:.2f}x",
            *((f"{row.price:.4g}",) if row.price is not None else ()),
        )
    Console(width=None if sys.stdout.isatty() else 100).print(table)
    if len(rows) > MOST_ROWS and not whole:
        click.echo(f"{len(rows) - MOST_ROWS} slower settings are left out: --all shows them")
    click.echo()
    for sentence in sentences(found, network, model):
        click.echo(sentence)


def sentences(found: Plan, network: str, model: str) -> list[str]:
    """The answer in words."""
    best = found.fastest
    told = [
        f"Predicted for {model} on {network}: the fastest is {_told(best)},"
        f" {best.prediction.samples_per_s:,.0f} samples/s"
        f" ({best.prediction.low:,.0f} to {best.prediction.high:,.0f}),"
        f" {best.speedup:.2f}x one worker."
    ]
    lost = {name: share for name, share in found.limits.items() if name != "computing"}
    worst = max(lost, key=lambda name: lost[name])
    limit = f"Computing takes {100 * found.limits['computing']:.0f}% of its step"
    told.append(
        f"{limit}; without {LOST[worst]} a step would be {100 * lost[worst]:.0f}% shorter."
        if lost[worst] >= 0.01
        else f"{limit}; nothing else limits it."
    )
    if found.knee is not None:
        told.append(
            f"Beyond {found.knee} workers, an added worker of {best.name} adds less than half of"
            " one worker's speed."
        )
    if found.cheapest is not None:
        told.append(
            f"The cheapest is {_told(found.cheapest)}: {found.cheapest.price:.4g} per million"
            " samples."
        )
    for (strategy, codec), rate in found.pays.items():
        told.append(_pays(strategy, codec, rate, best.workers))
    told += [f"note: {notice}" for notice in dict.fromkeys(found.notices)]
    told += [f"left out: {reason}" for reason in found.refused[:4]]
    told.append(
        "A plan predicts speed. How many steps an accuracy takes depends on the batch and the"
        " strategy: measure it by paceline study."
    )
    return told


def _told(row: Row) -> str:
    return f"{row.name} with {row.workers} worker{'s' if row.workers > 1 else ''}"


def _pays(strategy: str, codec: str, rate: float | None, workers: int) -> str:
    where = f"{strategy} with {workers} workers"
    if rate is None:
        return f"Codec {codec} does not make {where} 1% faster at any bandwidth."
    if rate == float("inf"):
        return f"Codec {codec} pays for {where} at any bandwidth."
    unit, scale = ("Gbit/s", 1e9) if rate >= 1e9 else ("Mbit/s", 1e6)
    return f"Codec {codec} pays for {where} below {rate / scale:.3g} {unit}."
