"""`paceline doctor`"""

from __future__ import annotations

import json

import click


@click.command()
@click.option(
    "--data-dir", default=None, metavar="DIR", help="folder in which data sets are looked for first"
)
@click.option("--json", "as_json", is_flag=True, help="print JSON to standard output")
@click.option("--debug", is_flag=True, help="show tracebacks")
def doctor(data_dir: str | None, as_json: bool, debug: bool) -> None:
    """Show what works on this machine, and how to get the rest. Everything is tried out.

    \b
    Examples:
      paceline doctor
      paceline doctor --json | jq '."transport mpi".ok'
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from paceline.doctor import examine

    findings = examine(data_dir)
    if as_json:
        facts = {f.name: {"ok": f.ok, "detail": f.detail, "fix": f.fix or None} for f in findings}
        click.echo(json.dumps(facts, indent=2))
        return
    table = Table(show_header=False)
    for found in findings:
        told = f"{found.detail}: {found.fix}" if found.fix else found.detail
        mark = "[green]yes[/green]" if found.ok else "[yellow]no[/yellow]"
        table.add_row(found.name, mark, escape(told))
    Console().print(table)
