"""`paceline plan`"""

from __future__ import annotations

import html
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paceline.cli.plan_check import CHECKED_WORKERS, check_by_runs, check_by_table

if TYPE_CHECKING:
    from paceline.planning.answer import Plan


@click.command()
@click.argument("profile", metavar="PROFILE", type=click.Path())
@click.option(
    "--strategy",
    "strategies",
    multiple=True,
    metavar="NAME[:key=value,...]",
    help="a strategy; may be given several times  [default: allreduce, ps, local-sgd, gossip]",
)
@click.option(
    "--codec", "codecs", multiple=True, metavar="NAME", help="a codec  [default: none and fp16]"
)
@click.option(
    "--parallel",
    multiple=True,
    metavar="FORM[:key=value,...]",
    help="split the model: layers, pipeline:micro=8, tensor, domain; runs it in virtual time",
)
@click.option(
    "--workers",
    default=None,
    metavar="1,2,4|1-16",
    help="numbers of workers to predict  [default: 1,2,4,8,16; with --check 3,4]",
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
@click.option("--overlap", is_flag=True, help="of allreduce: exchange inside the backward pass")
@click.option("--samples", default=None, type=click.IntRange(1), help="of the data, for epochs")
@click.option("--seed", default=0, show_default=True, type=int, help="of the drawn step times")
@click.option("--all", "whole", is_flag=True, help="show all rows, not only the best")
@click.option("--check", is_flag=True, help="measure drawn settings, and compare them")
@click.option("--settings", default=6, show_default=True, type=click.IntRange(1), help="of --check")
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(1), help="of --check")
@click.option("--out", default=None, metavar="DIR", help="a folder for the page, or for --check")
@click.option(
    "--measured", default=None, metavar="DIR", help="a study, runs or a check: points on the page"
)
@click.option("--data-dir", default=None, metavar="DIR", help="where data sets are looked for")
@click.option("--json", "as_json", is_flag=True, help="print the plan as JSON")
@click.option("--plugin", multiple=True, metavar="FILE", help="a Python file that registers more")
@click.option("--debug", is_flag=True, help="show tracebacks")
def plan(
    profile: str,
    strategies: tuple[str, ...],
    codecs: tuple[str, ...],
    parallel: tuple[str, ...],
    workers: str | None,
    network: str,
    inside: str | None,
    hosts: str | None,
    cores: int | None,
    servers: int,
    speeds: str | None,
    price: float | None,
    batch_size: int | None,
    global_batch_size: int | None,
    overlap: bool,
    samples: int | None,
    seed: int,
    whole: bool,
    check: bool,
    settings: int,
    repeats: int,
    out: str | None,
    measured: str | None,
    data_dir: str | None,
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
      paceline plan profile.json --parallel pipeline:micro=8 --parallel tensor --workers 2,4
      paceline plan profile.json --network lan --out plan                # plan/plan.html
      paceline plan profile.json --check --network 100mbit --out check   # needs root
    """
    import torch

    from paceline.errors import BadRequest
    from paceline.planning.answer import map_of
    from paceline.planning.ask import CODECS, STRATEGIES, WORKERS, answer, cluster_of, request_of
    from paceline.planning.cluster import read_workers
    from paceline.planning.stored import read_profile
    from paceline.planning.workers import worker_of
    from paceline.registry import load_plugin
    from paceline.results.measured_points import measured_points
    from paceline.terminal.plan import show_plan

    if measured is not None and out is None:
        raise BadRequest("--measured shows points on the page: give --out DIR, too")
    for file in plugin:
        load_plugin(file)
    known = read_profile(profile)
    cluster = cluster_of(network, inside, hosts, cores, speeds, price)
    if check and known.source == "measurements":
        check_by_table(known, strategies, cluster, seed, as_json)
        return
    if check:
        check_by_runs(
            profile,
            known,
            strategies or STRATEGIES,
            codecs or CODECS,
            read_workers(workers or CHECKED_WORKERS),
            network,
            batch_size or known.compute.batch_sizes[0],
            settings,
            repeats,
            seed,
            out or "plan-check",
            data_dir,
            as_json,
        )
        return
    request = request_of(
        known,
        cluster,
        strategies or STRATEGIES,
        codecs or CODECS,
        workers or WORKERS,
        batch_size,
        global_batch_size,
        servers,
        samples,
        seed,
        parallel,
    )
    if parallel:
        torch.set_num_threads(1)
    found = answer(known, request, network, data_dir, overlap, _progress())
    if as_json:
        click.echo(json.dumps(found.described(), indent=2))
    else:
        show_plan(found, network, whole, known.model.name)
    if out is not None:
        points = measured_points(measured, network) if measured else []
        cells = map_of(request, found, worker_of(known, overlap))
        _write_page(found, cells, points, network, known.model.name, Path(out))


def _progress() -> Callable[[int, int], None]:
    """Tell how many settings are done, on a terminal only."""
    if not sys.stderr.isatty():
        return lambda done, of: None

    def say(done: int, of: int) -> None:
        text = f"\rpredicting {done} of {of} settings" if done < of else "\r" + " " * 40 + "\r"
        click.echo(text, err=True, nl=False)

    return say


def _write_page(
    found: Plan,
    cells: list[dict[str, Any]],
    points: list[dict[str, Any]],
    network: str,
    model: str,
    folder: Path,
) -> None:
    """Write plan.json and plan.html into a folder."""
    from paceline.common.files import write_whole
    from paceline.errors import BadRequest
    from paceline.report.plan_page import plan_page
    from paceline.report.render import library
    from paceline.terminal.plan import sentences

    described = {**found.described(), "map": cells, "measured": points}
    best = found.soonest or found.fastest
    codec = "" if best.codec == "none" else f" --codec {best.codec}"
    way = "--parallel" if best.splits else "--strategy"
    command = f"paceline train --model {model} {way} {best.strategy}{codec}"
    text = plan_page(
        described,
        f"A plan for {model}",
        f"Predicted for links of {html.escape(network)} between hosts; nothing here was measured"
        + (" but the points." if points else "."),
        sentences(found, network, model),
        f"{command} --workers {best.workers}",
        library(),
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / "plan.json", json.dumps(described, indent=1) + "\n")
        write_whole(folder / "plan.html", text)
    except OSError as error:
        raise BadRequest(f"out={folder} cannot be written: {error.strerror}") from None
    click.echo(f"page: {(folder / 'plan.html').resolve().as_uri()}", err=True)
