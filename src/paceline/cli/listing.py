"""`paceline list`"""

from __future__ import annotations

import json

import click
from rich.console import Console
from rich.table import Table

from paceline.registry import ALL, describe_kind, format_value, load_plugin


@click.command(name="list")
@click.argument("kind", type=click.Choice(list(ALL)), required=False)
@click.option("--plugin", multiple=True, metavar="FILE", help="a Python file that registers things of its own")
@click.option("--json", "as_json", is_flag=True, help="as JSON")
def listing(kind: str | None, plugin: tuple[str, ...], as_json: bool) -> None:
    """What there is, with the options of each.

    \b
    Examples:
      paceline list strategies
      paceline list models --json
      paceline list strategies --plugin my_strategy.py
    """
    for file in plugin:
        load_plugin(file)
    if as_json:
        found = {
            name: {
                e.name: {
                    "summary": e.summary,
                    "options": {
                        o.name: {"kind": describe_kind(o.kind), "default": o.default, "help": o.help}
                        for o in e.options.values()
                    },
                }
                for e in ALL[name]
            }
            for name in ([kind] if kind else ALL)
        }
        click.echo(json.dumps(found[kind] if kind else found, indent=2))
        return
    console = Console()
    if kind is None:
        for name, registry in ALL.items():
            console.print(f"[bold]{name}[/bold]: {', '.join(registry.names())}", highlight=False)
        console.print("More about each: paceline list strategies", highlight=False)
        return
    table = Table(show_lines=False)
    table.add_column(ALL[kind].kind, style="bold", no_wrap=True)
    table.add_column("what it is")
    table.add_column("options")
    for entry in ALL[kind]:
        options = "\n".join(f"{o.name}={format_value(o.default)}" for o in entry.options.values())
        table.add_row(entry.name, entry.summary, options)
    console.print(table)
