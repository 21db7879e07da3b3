"""`paceline cluster`"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from paceline.cli.groups import Group

if TYPE_CHECKING:
    from paceline.spark.containers import ContainerCluster


@click.group(cls=Group)
def cluster() -> None:
    """Start and stop a Spark cluster on this machine, which other machines cannot reach.

    \b
    Examples:
      paceline cluster up --workers 3
      paceline cluster up --containers
      paceline prepare flights --engine spark --out data/f-shards
      paceline train --launcher spark --workers 3
      paceline cluster down
    """


@cluster.command()
@click.option("--workers", default=3, show_default=True, type=int, help="number of workers")
@click.option(
    "--cores",
    default=None,
    type=int,
    help="tasks that each worker takes at once  [default: 1; in containers 2]",
)
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
    help="folder for its files while it is up  [default: a new one in /tmp]; in containers: the"
    " folder that all of them see  [default: this one]",
)
@click.option("--containers", is_flag=True, help="in containers of Docker or Podman")
@click.option(
    "--image",
    default="",
    metavar="NAME",
    help="containers: an image that has Paceline  [default: built from this checkout]",
)
@click.option(
    "--build-options",
    default="",
    metavar="OPTIONS",
    help="containers: further options of `docker build`, for a proxy or an index of packages",
)
@click.option(
    "--run-options",
    default="",
    metavar="OPTIONS",
    help="containers: further options of `docker run` for the workers, such as '--cpus 1'",
)
@click.option(
    "--page-port",
    default=0,
    metavar="PORT",
    type=int,
    help="containers: port of the master's page, on loopback  [default: a free one]",
)
@click.option("--debug", is_flag=True, help="show tracebacks")
def up(
    workers: int,
    cores: int | None,
    memory: str,
    folder: str | None,
    containers: bool,
    image: str,
    build_options: str,
    run_options: str,
    page_port: int,
    debug: bool,
) -> None:
    """Start the cluster. It stays up until `paceline cluster down`.

    \b
    Examples:
      paceline cluster up
      paceline cluster up --workers 2 --cores 2 --memory 4g
      paceline cluster up --containers
      paceline cluster up --containers --build-options '--build-arg PIP_EXTRA_INDEX_URL=URL'
    """
    from rich.console import Console

    from paceline.errors import BadRequest
    from paceline.spark import containers as contained
    from paceline.spark import standalone

    if not containers and (image or build_options or run_options or page_port):
        raise BadRequest(
            "--image, --build-options, --run-options and --page-port need --containers"
        )

    def start(say: Callable[[str], None]) -> None:
        if containers:
            contained.up(
                workers,
                cores or 2,
                memory,
                folder,
                image=image,
                build_options=build_options,
                run_options=run_options,
                page_port=page_port,
                say=say,
            )
        else:
            standalone.up(workers, 1 if cores is None else cores, memory, folder, say=say)

    console = Console(stderr=True)
    long = "" if containers else " (about ten seconds in all)"
    if console.is_terminal:
        with console.status("starting a Spark cluster") as shown:
            start(lambda text: shown.update(f"{text}{long}"))
    else:
        start(lambda text: click.echo(text, err=True))
    _describe()


@cluster.command(context_settings={"ignore_unknown_options": True})
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("--debug", is_flag=True, help="show tracebacks")
def run(command: tuple[str, ...], debug: bool) -> None:
    """Run a command in a container beside the cluster's, where executors can reach it.

    `paceline train`, `study` and `prepare` do so by themselves.

    \b
    Example:
      paceline cluster run -- python my_driver.py
    """
    from paceline.spark import driver

    there = driver.wanted(driver.SYMBOL)
    if there is not None:
        raise SystemExit(driver.run(there, command))
    raise SystemExit(subprocess.call(command))  # this is such a container


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
    from paceline.spark import containers, standalone

    if containers.down():
        click.echo("the cluster is down")
        return
    there = standalone.standing()
    drivers = there.drivers() if there is not None else []
    click.echo("the cluster is down" if standalone.down() else "no cluster was up")
    for pid in drivers:
        click.echo(
            f"note: process {pid} used the cluster and may wait forever: kill {pid}", err=True
        )


def _describe() -> None:
    from paceline.spark import containers, marked, standalone

    if (contained := containers.standing()) is not None:
        _describe_containers(contained)
        return
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


def _describe_containers(there: ContainerCluster) -> None:
    states = there.states()
    each = f"{there.cores} task{'s' if there.cores > 1 else ''} and {there.memory}"
    click.echo(
        f"{there.workers} worker{'s' if there.workers > 1 else ''} in containers of {there.engine},"
        f" with {each} each, authenticated and encrypted"
    )
    click.echo(f"  web page    {there.page}")
    click.echo(f"  folder      {there.folder}, which all containers see")
    click.echo(f"  containers  {', '.join(there.name(role) for role in there.roles)}")
    if drivers := [role for role in states if role.startswith("driver")]:
        click.echo(f"  at work     {', '.join(there.name(role) for role in drivers)}")
    for role in there.ended():
        click.echo(
            f"note: {role} has ended ({states.get(role, 'removed')}): paceline cluster down, then"
            " up --containers",
            err=True,
        )
    click.echo(
        f"use it: paceline train --launcher spark --workers {there.workers} --strategy allreduce"
    )
