"""`paceline watch`"""

from __future__ import annotations

import click


@click.command()
@click.argument("folder", metavar="DIR", type=click.Path())
@click.option(
    "--port",
    default=0,
    type=click.IntRange(0, 65535),
    metavar="N",
    help="port of the page on 127.0.0.1  [default: a free one]",
)
@click.option(
    "--browser/--no-browser", default=True, help="open a browser  [default: if there is a display]"
)
@click.option("--debug", is_flag=True, help="show tracebacks")
def watch(folder: str, port: int, browser: bool, debug: bool) -> None:
    """Show a run or a study as a live page on this machine, until Ctrl-C.

    DIR is the folder of a run or a study, under way, finished, or not begun yet.

    \b
    Examples:
      paceline watch runs/study
      paceline watch runs/a --port 8000
      paceline train --data fashion-mini --watch      the page together with the run
    """
    from paceline.watch.server import serve
    from paceline.watch.state import existing

    path = existing(folder)
    serve(path, port, lambda url: click.echo(f"{url}  (Ctrl-C ends it)"), browser)


def say_page(text: str) -> None:
    """Print the address of a page, or why there is none, also with --quiet: it was asked for."""
    click.echo(f"watch: {text}", err=True)
