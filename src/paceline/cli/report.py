"""`paceline report`"""

from __future__ import annotations

import click


@click.command()
@click.argument("folders", nargs=-1, required=True, type=click.Path())
@click.option(
    "--out",
    default=None,
    metavar="FILE",
    help="file of the comparison of two studies  [default: compare.html]",
)
@click.option(
    "--figures/--no-figures",
    default=True,
    help="write the charts as PNG and SVG  [default: yes]",
)
@click.option("--debug", is_flag=True, help="show tracebacks")
def report(folders: tuple[str, ...], out: str | None, figures: bool, debug: bool) -> None:
    """Write the report of a study, a run or a folder of runs from its records, or compare two.

    \b
    Examples:
      paceline report runs/study
      paceline report runs/20261115-203012-cnn-mnist-allreduce-2
      paceline report runs/study runs/study-after-the-change
    """
    from rich.console import Console

    from paceline.errors import BadRequest
    from paceline.report.compare import compare
    from paceline.report.reading import read_study
    from paceline.report.render import render
    from paceline.terminal.results import show_study

    if len(folders) > 2:
        raise BadRequest(
            f"{len(folders)} folders were given: give one to report on, or two to compare"
        )
    console = Console()
    if len(folders) == 2:
        page = compare(folders[0], folders[1], out or "compare.html")
    else:
        if out:
            raise BadRequest(
                "--out needs two studies to compare; the report of one is written into its folder"
            )
        page = render(folders[0], figures=figures)
        show_study(read_study(folders[0]), console)
    console.print(
        f"report: {page.resolve().as_uri()}", highlight=False, soft_wrap=True, markup=False
    )
