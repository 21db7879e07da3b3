"""`paceline testbed`"""

from __future__ import annotations

import click

from paceline.cli.groups import Group


@click.group(cls=Group)
def testbed() -> None:
    """Make several hosts on this machine, with links as slow as you like (needs root).

    \b
    Examples:
      paceline testbed up --hosts 4 --rate 100mbit
      paceline testbed run --strategy allreduce --workers 4 --codec sign --model cnn-wide
      paceline testbed down
      paceline train --network 100mbit --workers 4          hosts for one run only
    """


@testbed.command()
@click.option("--hosts", default=4, show_default=True, type=int, help="number of hosts")
@click.option(
    "--rate",
    default="unlimited",
    show_default=True,
    metavar="RATE",
    help="speed of each link, per direction: 10mbit, 1gbit",
)
@click.option(
    "--latency",
    default="0",
    show_default=True,
    metavar="TIME",
    help="delay from host to host: 1ms (needs netem in the kernel)",
)
@click.option("--debug", is_flag=True, help="show tracebacks")
def up(hosts: int, rate: str, latency: str, debug: bool) -> None:
    """Make the hosts. They stay up until `paceline testbed down`.

    \b
    Example:
      paceline testbed up --hosts 4 --rate 100mbit --latency 1ms
    """
    from paceline.common.links import Links
    from paceline.testbed.standing import raise_standing

    bed = raise_standing(hosts, Links.read(f"rate={rate},latency={latency}"))
    for notice in bed.notices:
        click.echo(f"note: {notice}", err=True)
    _describe()


@testbed.command()
def status() -> None:
    """Show which hosts are up.

    \b
    Example:
      paceline testbed status
    """
    _describe()


@testbed.command()
@click.option("--debug", is_flag=True, help="show tracebacks")
def down(debug: bool) -> None:
    """Remove the hosts and their links.

    \b
    Example:
      paceline testbed down
    """
    from paceline.testbed.standing import take_down

    click.echo("the testbed is down" if take_down() else "no testbed was up")


@testbed.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
@click.pass_context
def run(ctx: click.Context) -> None:
    """Run `paceline train`, with all its options, on the hosts that are up: one worker on each.

    \b
    Example:
      paceline testbed run --strategy allreduce --workers 4 --codec sign
    """
    from paceline.cli.train import train

    train.main(
        args=["--network", "standing", *ctx.args],
        prog_name="paceline testbed run",
        standalone_mode=False,
    )


def _describe() -> None:
    from paceline.testbed.standing import standing

    bed = standing()
    if bed is None:
        click.echo("no testbed is up: paceline testbed up --hosts 4 --rate 100mbit")
        return
    click.echo(f"{bed.hosts} hosts, links {bed.links} in each direction")
    for host in range(bed.hosts):
        click.echo(f"  host-{host}  {bed.address(host)}    ip netns exec {bed.namespace(host)} ...")
    click.echo(
        "train on them: paceline testbed run --strategy allreduce --workers " + str(bed.hosts)
    )
