"""`paceline doctor`"""

from __future__ import annotations

import click


@click.command()
@click.option(
    "--data-dir", default=None, metavar="DIR", help="where data sets are looked for first"
)
def doctor(data_dir: str | None) -> None:
    """What works on this machine, and how to get the rest."""
    from rich.console import Console
    from rich.table import Table

    from paceline.doctor import examine

    table = Table(show_header=False)
    for finding in examine(data_dir):
        table.add_row(
            finding.what,
            "[green]yes[/green]" if finding.works else "[yellow]no[/yellow]",
            finding.detail,
        )
    Console().print(table)
