"""`paceline bench`: a command for every module of `paceline.bench`."""

from __future__ import annotations

import json
from typing import Any

import click

from paceline.bench.parts.benchmark import Benchmark, Option, load, names
from paceline.cli.choices import NAME_WITH_OPTIONS, names_of
from paceline.cli.groups import Group


class Benchmarks(Group):
    what = "benchmark"

    def list_commands(self, ctx: click.Context) -> list[str]:
        return names()

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        return command_of(name, load(name)) if name in names() else None


@click.group(cls=Benchmarks)
def bench() -> None:
    """Benchmark Paceline against PyTorch's DDP, gloo, Open MPI, pandas and Opacus.

    Contenders run in turns, and the figures are ratios of neighbouring runs.

    \b
    Examples:
      paceline bench strategies
      paceline bench strategies --rounds 9 --json
      paceline bench collectives --workers 2 --sizes 4KB,1MB,10MB
      paceline bench codecs --model cnn-wide --workers 4
      paceline bench balance
      paceline bench privacy
      paceline bench prepare --millions 0.3
      paceline bench shards
      paceline bench network --rate 100mbit                  (needs root)
    """


def command_of(name: str, benchmark: Benchmark) -> click.Command:
    """Make the command of a benchmark: its own options, --json and --debug."""

    def run(as_json: bool, debug: bool, **options: Any) -> None:
        measure_and_print(benchmark, options, as_json)

    return click.Command(
        name,
        help=benchmark.__doc__,
        callback=run,
        params=[
            *(option_of(key, option) for key, option in benchmark.OPTIONS.items()),
            click.Option(
                ["--json", "as_json"],
                is_flag=True,
                help="print everything measured to standard output",
            ),
            click.Option(["--debug"], is_flag=True, help="show tracebacks"),
        ],
    )


def option_of(key: str, option: Option) -> click.Option:
    kind: Any = {int: click.INT, float: click.FLOAT}.get(type(option.default), click.STRING)
    if kind is click.INT:
        kind = click.IntRange(option.least, option.most)
    elif kind is click.FLOAT:
        kind = click.FloatRange(option.least, option.most)
    text, metavar = option.help, option.metavar
    if option.names:
        text, metavar = f"{text}: {', '.join(names_of(option.names))}", NAME_WITH_OPTIONS
    return click.Option(
        ["--" + key.replace("_", "-"), key],
        default=option.default,
        show_default=option.default not in (None, ()),
        type=kind,
        metavar=metavar,
        multiple=option.repeated,
        help=text,
    )


def measure_and_print(benchmark: Benchmark, options: dict[str, Any], as_json: bool) -> None:
    import torch
    from rich.console import Console

    from paceline.bench.parts.table import print_parts
    from paceline.cli.show import machine_line
    from paceline.record.machine import environment

    torch.set_num_threads(1)  # no pool of threads here: workers are forked from this process
    messages = Console(stderr=True)
    result = benchmark.measure(lambda text: messages.print(text, highlight=False), **options)
    result["environment"] = environment()
    if as_json:
        click.echo(json.dumps(result, indent=2))
        return
    console = Console()
    print_parts(console, benchmark.show(result))
    console.print(machine_line(result["environment"]), style="dim", highlight=False)
