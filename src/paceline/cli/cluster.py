"""`paceline cluster`"""

from __future__ import annotations

import click

from paceline.cli.groups import Group


@click.group(cls=Group)
def cluster() -> None:
    """Start and stop a Spark cluster on this machine, which other machines cannot reach.

    \b
    Examples:
      paceline cluster up --workers 3
      paceline prepare flights --engine spark --out data/f-shards
      paceline train --launcher spark --workers 3
      paceline cluster down
    """


@cluster.command()
@click.option("--workers", default=3, show_default=True, type=int, help="number of workers")
@click.option("--cores", default=1, show_default=True, type=int, help="cores of each worker")
@click.option(
    "--memory",
    default="1g",
    show_default=True,
    metavar="SIZE",
    help="memory of each worker: 512m, 4g",
)
@click.option(
    "--folder",
    default=None,
    metavar="DIR",
    help="folder for its files while it is up  [default: a new one in /tmp]",
)
@click.option("--debug", is_flag=True, help="show tracebacks")
def up(workers: int, cores: int, memory: str, folder: str | None, debug: bool) -> None:
    """Start the cluster. It stays up until `paceline cluster down`.

    \b
    Examples:
      paceline cluster up
      paceline cluster up --workers 2 --cores 2 --memory 4g
    """
    from rich.console import Console

    from paceline.spark import standalone

    console = Console(stderr=True)
    if console.is_terminal:
        with console.status("starting a Spark cluster (about ten seconds)") as shown:
            standalone.up(
                workers,
                cores,
                memory,
                folder,
                say=lambda text: shown.update(f"{text} (about ten seconds in all)"),
            )
    else:
        standalone.up(workers, cores, memory, folder, say=lambda text: click.echo(text, err=True))
    _describe()


@cluster.command()
def status() -> None:
    """Show whether the cluster is up, and where it listens.

    \b
    Example:
      paceline cluster status
    """
    _describe()


@cluster.command()
@click.option("--debug", is_flag=True, help="show tracebacks")
def down(debug: bool) -> None:
    """Stop the cluster and everything that runs on it, and remove its files.

    \b
    Example:
      paceline cluster down
    """
    from paceline.spark import standalone

    there = standalone.standing()
    drivers = there.drivers() if there is not None else []
    click.echo("the cluster is down" if standalone.down() else "no cluster was up")
    for pid in drivers:
        click.echo(
            f"note: process {pid} used the cluster and may wait forever: kill {pid}", err=True
        )


def _describe() -> None:
    from paceline.spark import marked, standalone

    there = standalone.standing()
    if there is None:
        click.echo("no cluster is up: paceline cluster up --workers 3")
        return
    each = f"{there.cores} core{'s' if there.cores > 1 else ''} and {there.memory}"
    click.echo(
        f"{there.workers} worker{'s' if there.workers > 1 else ''} with {each} each, authenticated"
        " and encrypted"
    )
    click.echo(f"  master    {there.master}")
    click.echo(f"  web page  {there.ui}")
    click.echo(f"  logs      {there.folder / 'logs'}")
    if (running := len(there.executors())) > 0:
        click.echo(f"  at work   {running} executor{'s' if running > 1 else ''}")
    ports = there.listening()
    reachable = [
        f"{name} on {host}:{port}" for name, host, port in ports if not marked.is_loopback(host)
    ]
    where = (
        f"reachable from other machines: {', '.join(reachable)}"
        if reachable
        else f"all {len(ports)} on loopback"
    )
    click.echo(f"  ports     {where}")
    for name in there.ended():
        click.echo(f"note: {name} has ended: run paceline cluster down, then up", err=True)
    click.echo(
        f"use it: paceline train --launcher spark --workers {there.workers} --strategy allreduce"
        "  (it is found; prepare --engine spark finds it, too)"
    )
