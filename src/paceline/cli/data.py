"""`paceline data`"""

from __future__ import annotations

import click


@click.group()
def data() -> None:
    """Get data sets. Nothing is ever downloaded unless you ask here.

    \b
    Examples:
      paceline data fetch mnist
      paceline data fetch cifar10 --data-dir ~/data
    """


@data.command()
@click.argument("name")
@click.option("--data-dir", default="data", show_default=True, metavar="DIR", help="where it goes (a run looks there too)")
@click.option("--quiet", is_flag=True)
@click.option("--debug", is_flag=True, help="show tracebacks")
def fetch(name: str, data_dir: str, quiet: bool, debug: bool) -> None:
    """Fetch mnist, fashion-mnist or cifar10, and verify every file."""
    from rich.console import Console

    from paceline.data.fetch import fetch as bring

    console = Console(stderr=True)
    if quiet:
        bring(name, data_dir)
        return
    with console.status(f"fetching {name}"):
        bring(name, data_dir, lambda text: console.print(text, highlight=False, soft_wrap=True, markup=False))
