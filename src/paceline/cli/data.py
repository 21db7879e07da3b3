"""`paceline data`"""

from __future__ import annotations

import click

from paceline.cli.groups import Group


@click.group(cls=Group)
def data() -> None:
    """Get data sets. Nothing is ever downloaded unless you ask here.

    \b
    Examples:
      paceline data fetch mnist
      paceline data fetch cifar10 --data-dir ~/data
      paceline data export cifar10 --out data/cifar10-images    as folders of PNG files, in ImageNet's layout
    """


@data.command()
@click.argument("name")
@click.option(
    "--data-dir",
    default="data",
    show_default=True,
    metavar="DIR",
    help="where it goes (a run looks there too)",
)
@click.option("--quiet", is_flag=True)
@click.option("--debug", is_flag=True, help="show tracebacks")
def fetch(name: str, data_dir: str, quiet: bool, debug: bool) -> None:
    """Fetch mnist, fashion-mnist, cifar10, adult or flights, and verify every file."""
    from rich.console import Console

    from paceline.data.fetch import fetch as bring

    console = Console(stderr=True)
    if quiet:
        bring(name, data_dir)
        return
    with console.status(f"fetching {name}"):
        bring(
            name,
            data_dir,
            lambda text: console.print(text, highlight=False, soft_wrap=True, markup=False),
        )


@data.command()
@click.argument("name")
@click.option("--out", required=True, metavar="DIR", help="gets train/<class>/ and val/<class>/")
@click.option(
    "--most", type=click.IntRange(1), help="images of each class and part  [default: all]"
)
@click.option(
    "--data-dir", default=None, metavar="DIR", help="where the data set is looked for first"
)
@click.option("--debug", is_flag=True, help="show tracebacks")
def export(name: str, out: str, most: int | None, data_dir: str | None, debug: bool) -> None:
    """Write a set of images as folders of PNG files, in ImageNet's layout."""
    from rich.console import Console

    from paceline.data.export import export as write

    console = Console(stderr=True)
    with console.status(f"writing {name}"):
        written = write(
            name, out, data_dir, most, lambda text: console.print(text, highlight=False)
        )
    console.print(
        f"{written:,} images in {out}: paceline train --data imagefolder:{out}",
        highlight=False,
        soft_wrap=True,
    )
