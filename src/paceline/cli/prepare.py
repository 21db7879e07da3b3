"""`paceline prepare`"""

from __future__ import annotations

import json
from typing import Any

import click

from paceline.cli.beside import beside_the_cluster


@click.command()
@click.argument("what", required=False)
@click.option(
    "--recipe", metavar="FILE", help="a TOML file that describes your own table (docs/data.md)"
)
@click.option("--out", metavar="DIR", required=True, help="folder to write the shards to")
@click.option(
    "--engine",
    default="auto",
    show_default=True,
    metavar="[auto|polars|spark|local]",
    help="auto decides by the size of the sources; polars is for tables, local for images",
)
@click.option(
    "--master",
    default="",
    metavar="URL",
    help="Spark's master: local[4], spark://host:port  [default: the one of `paceline cluster`,"
    " else local[*]]",
)
@click.option(
    "--shards",
    default=4,
    show_default=True,
    type=int,
    help="shards of the training part; the test part has fewer",
)
@click.option(
    "--data-dir",
    metavar="DIR",
    help="folder in which data sets are looked for first, before ./data and the cache",
)
@click.option(
    "--size",
    type=int,
    default=0,
    help="images: side of the square input in pixels  [default: as the first image]",
)
@click.option(
    "--no-persist",
    is_flag=True,
    help="Spark: compute intermediate results twice instead of keeping them",
)
@click.option("--force", is_flag=True, help="replace shards that are there")
@click.option("--json", "as_json", is_flag=True, help="print the manifest to standard output")
@click.option("--quiet", is_flag=True, help="print only errors")
@click.option("--debug", is_flag=True, help="show tracebacks")
def prepare(
    what: str | None,
    recipe: str | None,
    out: str,
    engine: str,
    master: str,
    shards: int,
    data_dir: str | None,
    size: int,
    no_persist: bool,
    force: bool,
    as_json: bool,
    quiet: bool,
    debug: bool,
) -> None:
    """Make shards of a table or of a folder of images, for `--data shards:DIR`.

    WHAT is flights, adult or imagefolder:PATH.

    \b
    Examples:
      paceline data fetch flights && paceline prepare flights --out data/flights-shards
      paceline prepare adult --engine spark --master spark://127.0.0.1:7077 --out data/adult-shards
      paceline prepare --recipe mine.toml --out data/mine
      paceline prepare imagefolder:photos --size 224 --shards 16 --out data/photos
      paceline train --data shards:data/flights-shards --model mlp --metric auc --workers 2
    """
    if engine == "spark" or (engine == "auto" and master == "containers"):
        beside_the_cluster(master, file=recipe)
    from rich.console import Console

    from paceline.cli.show import show_prepared
    from paceline.data.prepare.anything import prepare as make

    console = Console(stderr=True)
    options: dict[str, Any] = {
        "master": master,
        "shards": shards,
        "data_dir": data_dir,
        "size": size,
    }
    options |= {"persist": not no_persist, "force": force}
    if quiet:
        manifest = make(what, out=out, recipe=recipe, engine=engine, **options)
    else:
        with console.status("starting") as status:
            manifest = make(
                what,
                out=out,
                recipe=recipe,
                engine=engine,
                say=lambda text: _tell(console, status, text),
                **options,
            )
    if as_json:
        click.echo(json.dumps(manifest.described(), indent=1))
    if not quiet:
        show_prepared(manifest, out, to_stderr=as_json)


def _tell(console: Any, status: Any, text: str) -> None:
    """Print what was decided, so that it stays; show what is being done as the status."""
    if text.startswith("engine "):
        console.print(text, highlight=False, markup=False)
    else:
        status.update(text)
