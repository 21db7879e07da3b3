"""`paceline data`"""

from __future__ import annotations

import click

from paceline.cli.groups import Group


@click.group(cls=Group)
def data() -> None:
    """Fetch data sets, and export them. Paceline downloads nothing unless you ask here.

    \b
    Examples:
      paceline data fetch mnist
      paceline data fetch cifar10 --data-dir ~/data
      paceline data export cifar10 --out data/cifar10-images
    """


@data.command()
@click.argument("name")
@click.option(
    "--data-dir",
    default="data",
    show_default=True,
    metavar="DIR",
    help="folder to write to (a run looks there too)",
)
@click.option("--quiet", is_flag=True, help="print only errors")
@click.option("--debug", is_flag=True, help="show tracebacks")
def fetch(name: str, data_dir: str, quiet: bool, debug: bool) -> None:
    """Fetch a data set and verify every file. NAME is mnist, fashion-mnist, cifar10, adult or
    flights.

    \b
    Examples:
      paceline data fetch mnist
      paceline data fetch cifar10 --data-dir ~/data
    """
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
@click.option(
    "--out", required=True, metavar="DIR", help="folder to write train/<class>/ and val/<class>/ to"
)
@click.option(
    "--most",
    type=click.IntRange(1),
    help="at most so many images of each class, in each part  [default: all]",
)
@click.option(
    "--data-dir",
    default=None,
    metavar="DIR",
    help="folder in which the data set is looked for first",
)
@click.option("--debug", is_flag=True, help="show tracebacks")
def export(name: str, out: str, most: int | None, data_dir: str | None, debug: bool) -> None:
    """Write a set of images as folders of PNG files, in ImageNet's layout.

    \b
    Examples:
      paceline data export cifar10 --out data/cifar10-images
      paceline data export mnist --out data/digits --most 100
    """
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
