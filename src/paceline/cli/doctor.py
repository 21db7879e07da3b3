"""`paceline doctor`"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from paceline.errors import BadRequest

if TYPE_CHECKING:
    from paceline.doctor.machine import Finding


@click.command()
@click.option(
    "--data-dir", default=None, metavar="DIR", help="folder in which data sets are looked for first"
)
@click.option("--json", "as_json", is_flag=True, help="print JSON to standard output")
@click.option("--gpu", is_flag=True, help="check this machine's GPUs, in about five minutes")
@click.option(
    "--device",
    type=click.Choice(["cuda", "cpu"]),
    default=None,
    help="with --gpu: cpu rehearses the same checks on the CPU, with gloo  [default: cuda]",
)
@click.option(
    "--cluster",
    is_flag=True,
    help="what the ranks of a job would find: start it with the job's launcher",
)
@click.option(
    "--wait",
    default=None,
    type=click.FloatRange(min=1),
    metavar="SECONDS",
    help="with --cluster: the longest wait for other ranks  [default: 10]",
)
@click.option(
    "--insecure", is_flag=True, help="with --cluster: as of train: the ranks have no secret"
)
@click.option(
    "--out",
    default=None,
    metavar="PATH",
    help="with --gpu: a small file to send to the project  [default: gpu.json]; with --cluster:"
    " the folder of the job, which all hosts must see",
)
@click.option("--debug", is_flag=True, help="show tracebacks")
def doctor(
    data_dir: str | None,
    as_json: bool,
    gpu: bool,
    device: str | None,
    cluster: bool,
    wait: float | None,
    insecure: bool,
    out: str | None,
    debug: bool,
) -> None:
    """Show what works on this machine, and how to get the rest. Everything is tried out.

    \b
    Examples:
      paceline doctor
      paceline doctor --json | jq '."transport mpi".ok'
      paceline doctor --gpu                           parity, nccl, resume; writes gpu.json
      paceline doctor --gpu --device cpu              the same checks on the CPU, to rehearse
      srun paceline doctor --cluster --out SHARED     ranks, hosts, cores, addresses, folder
    """
    if cluster:
        if gpu or device is not None:
            raise BadRequest("--cluster and --gpu are two checks: make one after the other")
        _check_cluster(Path(out) if out else None, insecure, wait or 10.0, as_json)
        return
    if wait is not None or insecure:
        raise BadRequest("--wait and --insecure belong to --cluster: paceline doctor --cluster")
    if gpu:
        _check_gpu(device or "cuda", Path(out or "gpu.json"), as_json)
        return
    if device is not None or out is not None:
        raise BadRequest(
            "--device belongs to --gpu: paceline doctor --gpu"
            if device is not None
            else "--out belongs to --gpu and to --cluster: paceline doctor --gpu"
        )
    _examine(data_dir, as_json)


def _examine(data_dir: str | None, as_json: bool) -> None:
    from paceline.doctor import examine

    findings = examine(data_dir)
    if as_json:
        facts = {f.name: {"ok": f.ok, "detail": f.detail, "fix": f.fix or None} for f in findings}
        click.echo(json.dumps(facts, indent=2))
        return
    _show(findings)


def _show(findings: Sequence[Finding]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(show_header=False)
    for found in findings:
        told = f"{found.detail}: {found.fix}" if found.fix else found.detail
        mark = "[green]yes[/green]" if found.ok else "[yellow]no[/yellow]"
        table.add_row(found.name, mark, escape(told))
    Console().print(table)


def _check_cluster(out: Path | None, insecure: bool, wait_s: float, as_json: bool) -> None:
    """Rank 0 prints what all have found; every rank exits with 1 where something is missing."""
    from paceline.doctor.cluster import examine_cluster

    report = examine_cluster(out, insecure, wait_s)
    if report.leads and as_json:
        click.echo(json.dumps(report.described(), indent=2))
    elif report.leads:
        _show(report.findings)
        missing = ", ".join(found.name for found in report.findings if not found.ok)
        click.echo(f"missing: {missing}" if missing else "nothing is missing", err=True)
    elif not report.complete:
        for found in report.findings:
            if not found.ok:
                click.echo(f"paceline: rank {report.rank}: {found.detail}", err=True)
    report.end()
    if not report.ok:
        raise click.exceptions.Exit(1)


def _check_gpu(device: str, out: Path, as_json: bool) -> None:
    """Print the checks as they are made, then a table; exit with 1 where a check has failed."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from paceline.doctor import gpu
    from paceline.record.writer import write_json

    if not out.parent.is_dir():
        raise BadRequest(f"--out {out}: there is no folder {out.parent}")
    marks = {True: "[green]yes[/green]", False: "[red]no[/red]", None: "[yellow]-[/yellow]"}
    table = Table("check", "right", "s", "what was found")
    made = []
    with gpu.here(device) as (place, names):
        click.echo(f"{', '.join(names)}: about five minutes", err=True)
        for check in gpu.checks(place):
            made.append(check)
            click.echo(f"{check.name}: {check.detail}", err=True)
            table.add_row(
                escape(check.name), marks[check.ok], f"{check.seconds:g}", escape(check.detail)
            )
        content = gpu.described(place, made, names)
    write_json(out, content)
    if as_json:
        click.echo(json.dumps(content, indent=2))
    else:
        Console().print(table)
    right, wrong = (sum(c.ok is value for c in made) for value in (True, False))
    rehearsed = ", a rehearsal on the CPU" if content["rehearsal"] else ""
    click.echo(
        f"{right} right, {wrong} wrong, {len(made) - right - wrong} not made{rehearsed}: {out}",
        err=True,
    )
    if wrong or not content["rehearsal"]:
        click.echo(
            f"Please attach {out} to an issue of the project: versions, names of GPUs and these"
            " checks, no paths and no host names.",
            err=True,
        )
    if wrong:
        raise click.exceptions.Exit(1)
