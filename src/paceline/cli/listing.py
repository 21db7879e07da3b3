"""`paceline list`"""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from paceline.cli.groups import Choice
from paceline.common.values import describe_kind, format_value
from paceline.errors import BadRequest
from paceline.registry import ALL, Entry, load_plugin


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
                    **({"traits": asdict(traits)} if (traits := _traits(e)) else {}),
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
    declare = any(_traits(entry) for entry in ALL[kind])
    if declare:
        table.add_column("declares", overflow="fold")
    for entry in ALL[kind]:
        options = "\n".join(f"{o.name}={format_value(o.default)}" for o in entry.options.values())
        declared = [_unusual(traits) if (traits := _traits(entry)) else ""] if declare else []
        table.add_row(entry.name, entry.summary, options, *declared)
    console.print(table)


def _traits(entry: Entry[Any]) -> Any:
    """What a strategy or a transport declares about itself with its default options."""
    if not hasattr(entry.make, "traits"):
        return None
    try:
        return entry.make().traits  # options may change what a strategy declares
    except TypeError:  # a transport is made of more than options
        return entry.make.traits


def _unusual(traits: Any) -> str:
    """What differs from most others, one declaration per line."""
    usual = type(traits)()
    pairs = {f.name: (getattr(traits, f.name), getattr(usual, f.name)) for f in fields(traits)}
    return "\n".join(
        name.replace("_", " ") + ("" if value is True else f": {'no' if value is False else value}")
        for name, (value, default) in pairs.items()
        if value != default and isinstance(value, bool | int | str) and " " not in str(value)
    )


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
