"""`paceline train`"""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Callable
from typing import Any

import click
from click.shell_completion import CompletionItem

from paceline.cli.beside import beside_the_cluster
from paceline.cli.choices import NAME_WITH_OPTIONS, names_of, one_of
from paceline.cli.watch import say_page
from paceline.common.files import read_toml
from paceline.common.warned import warnings_once
from paceline.request.config import Config
from paceline.request.settings import apply_settings

REGISTRIES = {  # by option: the registry whose names it takes
    "strategy": "strategies",
    "model": "models",
    "data": "data",
    "optimizer": "optimizers",
    "lr_schedule": "schedules",
    "loss": "losses",
    "metric": "metrics",
    "codec": "codecs",
    "parallel": "forms",
    "transport": "transports",
    "faults": "faults",
    "callbacks": "callbacks",
}
METAVARS = {
    "data_dir": "DIR",
    "out": "DIR",
    "resume": "[DIR|auto]",
    "max_time": "TIME",
    "plugin": "FILE",
    "master": "URL",
    "network": "RATE[,latency=TIME]",
    "balance": "[measured|N,N,...|runtime:X,X,...]",
    "privacy": "key=value,...",
    "batch_size": "[N|N,N,...|all]",
    "global_batch_size": "[N|all]",
    "lr_scaling": "[none|linear|sqrt][:warmup=N]",
    "evaluate_every": "[N|epoch]",
    "checkpoint_every": "[N|epoch|TIME]",
    "validation": "X",
    "best_by": "[auto|loss|METRIC]",
    "keep": "[best|last|all|N],...",
    "threads": "[N|auto]",
    "device": "[cpu|cuda|auto|...]",
    "step": "MODULE:FUNCTION",
    "groups": "PATTERN:key=value,...",
    "compile": "[BACKEND]",
    "grid": "data=N,FORM=N",
    "cut": "LAYER,...",
}


def metavar_of(name: str, kind: Any) -> str:
    """What `--help` shows for the value of an option: its choices where there are few."""
    if name == "transport":
        return one_of(["auto", *names_of("transports")])
    if name in REGISTRIES:
        return NAME_WITH_OPTIONS
    if typing.get_origin(kind) is typing.Literal:
        return one_of([str(choice) for choice in typing.get_args(kind)])
    return METAVARS.get(name, {int: "N", float: "X"}.get(kind, "TEXT"))


def help_of(name: str, field: dataclasses.Field[Any]) -> str:
    """The help line of an option: what it is, the registered names, the default."""
    text, _, default = str(field.metadata["help"]).partition("  [default: ")
    if name in REGISTRIES and name != "transport":
        what, comma, other = text.partition(", or ")
        text = f"{what}: {', '.join(names_of(REGISTRIES[name]))}{comma}{other}"
    if field.default not in (None, ()) and field.metadata["kind"] is not bool:
        default = f"{field.default}]"
    return f"{text}  [default: {default}" if default else text


def completer(
    plural: str,
) -> Callable[[click.Context, click.Parameter, str], list[CompletionItem]]:
    """Return what completes the registered names of a kind in a shell."""

    def complete(
        ctx: click.Context, parameter: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        from paceline.registry import ALL

        return [
            CompletionItem(e.name, help=e.summary)
            for e in ALL[plural]
            if e.name.startswith(incomplete)
        ]

    return complete


def options_from_config(command: Callable[..., None]) -> Callable[..., None]:
    """Add a flag for every option of the configuration; only flags that were given are passed
    on.
    """
    for name, field in reversed(Config.options().items()):
        extra: dict[str, Any] = {"metavar": metavar_of(name, field.metadata["kind"])}
        if name in ("plugin", "faults", "groups", "callbacks"):
            extra["multiple"] = True
        if name == "compile":
            extra |= {"is_flag": False, "flag_value": "inductor"}
        if name in REGISTRIES:
            extra["shell_complete"] = completer(REGISTRIES[name])
        if field.metadata["kind"] is bool:
            extra = {"is_flag": True}
        command = click.option(
            "--" + name.replace("_", "-"), name, default=None, help=help_of(name, field), **extra
        )(command)
    return command


class GroupedCommand(click.Command):
    """Shows the options under headings in `--help`."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        fields = Config.options()
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and isinstance(parameter, click.Option):
                field = fields.get(parameter.name or "")
                groups.setdefault(field.metadata["group"] if field else "Output", []).append(record)
        output = groups.pop("Output")
        for heading, records in [*groups.items(), ("Output", output)]:
            with formatter.section(heading):
                formatter.write_dl(records)


@click.command(cls=GroupedCommand)
@click.argument("file", required=False, type=click.Path())
@options_from_config
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="NAME=VALUE",
    help="set any option, also one of a choice: strategy.collective=native",
)
@click.option("--json", "as_json", is_flag=True, help="print run.json to standard output")
@click.option("--quiet", is_flag=True, help="print only errors")
@click.option(
    "--progress/--no-progress", default=None, help="show a live bar  [default: in a terminal]"
)
@click.option("--watch", is_flag=True, help="show a live page in the browser during the run")
@click.option("--debug", is_flag=True, help="show tracebacks")
def train(
    file: str | None,
    settings: tuple[str, ...],
    as_json: bool,
    quiet: bool,
    progress: bool | None,
    watch: bool,
    debug: bool,
    **flags: Any,
) -> None:
    """Train a model. FILE is a TOML file with the same option names; flags win over it.

    \b
    Examples:
      paceline train --data fashion-mini
      paceline train --model cnn --data mnist --strategy allreduce --workers 2
      paceline train --model mlp:hidden=512x256 --optimizer adam --lr 0.001 --epochs 3
      paceline train run.toml --set strategy.collective=native
      paceline train --checkpoint-every 200 --out runs/a      then: paceline train --resume runs/a
      paceline train --out runs/a --resume auto --max-time 55min    goes on, each time it is started
      paceline train --model mypackage.nets:make_net --data imagefolder:photos
      paceline train --data fashion-mini --callbacks csv --callbacks tensorboard:folder=tb
    """
    values: dict[str, Any] = read_toml(file) if file else {}
    values.update({k: v for k, v in flags.items() if v is not None and v != ()})
    from paceline.request.earlier import AUTO, load_config

    if values.get("resume") not in (None, AUTO):
        # `--set strategy.every=4` changes one option of the choice that the saved run made.
        saved = load_config(values["resume"])
        inside = {
            s.partition(".")[0].replace("-", "_") for s in settings if "." in s.partition("=")[0]
        }
        values = {**{k: v for k, v in saved.items() if k in inside}, **values}
    values = apply_settings(values, list(settings))
    if values.get("launcher") == "spark":
        beside_the_cluster(values.get("master"), watch, file)

    import torch

    from paceline.api import make_job, meet, silent, start
    from paceline.cli.show import show_run
    from paceline.terminal.run import Watch
    from paceline.watch.beside import page_beside

    torch.set_num_threads(1)  # no pool of threads here: workers are forked from this process

    meeting = meet(values)
    quiet = quiet or silent(meeting)
    with warnings_once():
        job = make_job(values, meeting)
        paged = watch and not silent(meeting)
        with page_beside(job.out, paged, say_page), Watch(job, quiet=quiet, live=progress) as shown:
            run = start(job, shown.listen, clean=True, meeting=meeting)
    if as_json and not silent(meeting):
        click.echo(json.dumps(run.record, indent=2))
    if not quiet:
        show_run(run.record, run.out, to_stderr=as_json)
