"""`paceline launch`"""

from __future__ import annotations

import click


@click.command(context_settings={"ignore_unknown_options": True})
@click.option("-n", "--ranks", default=2, show_default=True, type=click.IntRange(1), help="processes (workers and servers)")
@click.option("--threads", default=None, type=click.IntRange(1), help="threads per process  [default: cores // ranks]")
@click.option("--debug", is_flag=True, help="show tracebacks")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def launch(ranks: int, threads: int | None, debug: bool, script: str, arguments: tuple[str, ...]) -> None:
    """Run your own training loop on several processes of this machine (it calls paceline.join).

    \b
    Examples:
      paceline launch -n 4 train.py
      paceline launch -n 3 train.py --lr 0.1        what follows the script is the script's
    """
    from paceline.launch.script import launch as start

    start(script, arguments, ranks, threads)
