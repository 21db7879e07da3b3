"""`paceline report`"""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("folders", nargs=-1, required=True, type=click.Path())
@click.option(
    "--out",
    default=None,
    metavar="FILE",
    help="where the comparison of two studies goes  [default: compare.html]",
)
@click.option(
    "--figures/--no-figures",
    default=True,
    help="pictures of the charts as PNG and SVG  [default: yes]",
)
@click.option("--debug", is_flag=True, help="show tracebacks")
def report(folders: tuple[str, ...], out: str | None, figures: bool, debug: bool) -> None:
    """Make the report of a study, a run or a folder of runs again, from its records; or compare two
    of them.

    \b
    Examples:
      paceline report runs/study
      paceline report runs/20261115-203012-cnn-mnist-allreduce-2
      paceline report runs/study runs/study-after-the-change
    """
    from rich.console import Console

    from paceline.cli.study import show_study
    from paceline.errors import BadRequest
    from paceline.report.compare import compare
    from paceline.report.render import render

    if len(folders) > 2:
        raise BadRequest(f"{len(folders)} folders: one to report on, or two to compare")
    console = Console()
    if len(folders) == 2:
        page = compare(folders[0], folders[1], out or "compare.html")
    else:
        if out:
            raise BadRequest(
                "--out is for comparing two studies; the report of one goes into its own folder"
            )
        page = render(folders[0], figures=figures)
        show_study(Path(folders[0]), console)
    console.print(
        f"report: {page.resolve().as_uri()}", highlight=False, soft_wrap=True, markup=False
    )
