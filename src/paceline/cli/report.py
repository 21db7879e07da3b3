"""`paceline report`"""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("folders", nargs=-1, metavar="DIR [DIR]", type=click.Path())
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
@click.option(
    "--pdf",
    is_flag=False,
    flag_value="",
    default=None,
    metavar="[FILE]",
    help="write a PDF to hand in or to print  [default file: DIR/report.pdf]",
)
@click.option(
    "--markdown",
    is_flag=False,
    flag_value="",
    default=None,
    metavar="[FILE]",
    help="write Markdown, with the charts beside it  [default file: DIR/report.md]",
)
@click.option("--debug", is_flag=True, help="show tracebacks")
def report(
    folders: tuple[str, ...],
    out: str | None,
    figures: bool,
    pdf: str | None,
    markdown: str | None,
    debug: bool,
) -> None:
    """Write the report of a study, a run or a folder of runs from its records, or compare two.

    \b
    Examples:
      paceline report runs/study
      paceline report runs/study --pdf --markdown
      paceline report runs/20261115-203012-cnn-mnist-allreduce-2
      paceline report runs/study runs/study-after-the-change
    """
    from rich.console import Console

    from paceline.errors import BadRequest
    from paceline.report.compare import Comparison
    from paceline.report.reading import read_study
    from paceline.report.render import render
    from paceline.terminal.results import show_study

    if len(folders) > 2:
        raise BadRequest(
            f"{len(folders)} folders were given: give one to report on, or two to compare"
        )
    if not folders:
        raise BadRequest(
            "no folder was given: the folder of the records comes first, as in paceline report DIR"
            " --pdf FILE"
        )
    console = Console()
    if len(folders) == 2:
        if pdf is not None or markdown is not None:
            raise BadRequest(
                "--pdf and --markdown are for one study or run; the comparison of two is a page"
                " (--out FILE)"
            )
        found = Comparison.of(folders[0], folders[1])
        pages = [found.write(out or "compare.html")]
        for sentence in found.sentences:
            console.print(sentence, highlight=False, soft_wrap=True, markup=False)
    else:
        if out:
            raise BadRequest(
                "--out needs two studies to compare; the report of one is written into its folder"
            )
        check(folders[0], pdf, markdown)
        pages = [render(folders[0], figures=figures)]
        show_study(read_study(folders[0]), console)
        pages += documents(folders[0], pdf, markdown)
    for page in pages:
        console.print(
            f"report: {page.resolve().as_uri()}", highlight=False, soft_wrap=True, markup=False
        )


def check(folder: str, pdf: str | None, markdown: str | None) -> None:
    """Refuse files that cannot be written, and a missing extra, before the report is made."""
    from paceline.report.document.output import target
    from paceline.report.document.typeset import library

    if pdf is not None:
        library()
        target(folder, pdf, "report.pdf")
    if markdown is not None:
        target(folder, markdown, "report.md")


def documents(folder: str, pdf: str | None, markdown: str | None) -> list[Path]:
    """Write what was asked for beside the page; an empty name is the default file."""
    from paceline.report.document.markdown import write_markdown
    from paceline.report.document.typeset import write_pdf

    found = [write_pdf(folder, pdf or None)] if pdf is not None else []
    return found + ([write_markdown(folder, markdown or None)] if markdown is not None else [])
