"""`paceline list`"""

from __future__ import annotations

import json

import click
from rich.console import Console
from rich.table import Table

from paceline.cli.groups import Choice
from paceline.common.values import describe_kind, format_value
from paceline.errors import BadRequest
from paceline.registry import ALL, load_plugin


@click.command(name="list")
@click.argument("kind", type=Choice("list", list(ALL)), required=False)
@click.option("--plugin", multiple=True, metavar="FILE", help="a Python file that registers more")
@click.option(
    "--capabilities", is_flag=True, help="try out which operations each transport supports here"
)
@click.option("--json", "as_json", is_flag=True, help="print JSON to standard output")
@click.option("--debug", is_flag=True, help="show tracebacks")
def listing(
    kind: str | None, plugin: tuple[str, ...], capabilities: bool, as_json: bool, debug: bool
) -> None:
    """List what is registered, with the options of each.

    \b
    Examples:
      paceline list strategies
      paceline list models --json
      paceline list transports --capabilities
      paceline list strategies --plugin my_strategy.py
    """
    for file in plugin:
        load_plugin(file)
    if capabilities:
        if kind != "transports":
            raise BadRequest(
                "--capabilities goes with transports: paceline list transports --capabilities"
            )
        _show_capabilities(as_json)
        return
    if as_json:
        found = {
            name: {
                e.name: {
                    "summary": e.summary,
                    "options": {
                        o.name: {
                            "kind": describe_kind(o.kind),
                            "default": o.default,
                            "help": o.help,
                        }
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
        console.print("Options of one kind: paceline list strategies", highlight=False)
        return
    table = Table(show_lines=False)
    table.add_column(ALL[kind].kind, style="bold", no_wrap=True)
    table.add_column("what it is")
    table.add_column("options")
    for entry in ALL[kind]:
        options = "\n".join(f"{o.name}={format_value(o.default)}" for o in entry.options.values())
        table.add_row(entry.name, entry.summary, options)
    console.print(table)


def _show_capabilities(as_json: bool) -> None:
    import torch

    torch.set_num_threads(1)  # no pool of threads here: ranks are forked from this process
    from paceline.launch.capabilities import capabilities

    Console(stderr=True).print(
        "trying every operation on two ranks of every transport ...", highlight=False
    )
    rows = capabilities()
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    found = {(r["operation"], r["transport"], r["device"]): r["how"] for r in rows}
    styles = {"native": "green", "ours": "cyan", "not possible": "dim", "not tested": "yellow"}
    console = Console()
    for device in dict.fromkeys(r["device"] for r in rows):
        table = Table(title=f"device {device}", title_justify="left")
        table.add_column("operation")
        names = list(dict.fromkeys(r["transport"] for r in rows))
        for name in names:
            table.add_column(name)
        for operation in dict.fromkeys(r["operation"] for r in rows):
            answers = [found[(operation, name, device)] for name in names]
            table.add_row(
                operation,
                *(f"[{styles[a]}]{'-' if a == 'not possible' else a}[/]" for a in answers),
            )
        console.print(table)
    console.print(
        "native: the library's own operation works here. ours: Paceline's schedule over the"
        " transport's messages works here. -: the transport does not reach that device."
        " not tested: this machine lacks what the transport needs.",
        highlight=False,
    )
