"""`paceline train`"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import click
from click.shell_completion import CompletionItem

from paceline.common.files import read_toml
from paceline.launch.signals import held_back
from paceline.request.config import Config, apply_settings

COMPLETED_FROM = {
    "strategy": "strategies",
    "model": "models",
    "data": "data",
    "optimizer": "optimizers",
    "lr_schedule": "schedules",
    "loss": "losses",
    "metric": "metrics",
    "codec": "codecs",
    "transport": "transports",
}


def _completer(
    plural: str,
) -> Callable[[click.Context, click.Parameter, str], list[CompletionItem]]:
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
    """A flag per option of the configuration; only what was given is passed on."""
    for name, field in reversed(Config.options().items()):
        default = "" if field.default in (None, ()) else f"  [default: {field.default}]"
        extra: dict[str, Any] = {"multiple": True} if name in ("plugin", "faults") else {}
        if name in COMPLETED_FROM:
            extra["shell_complete"] = _completer(COMPLETED_FROM[name])
        if field.metadata["kind"] is bool:
            extra, default = {"is_flag": True}, ""
        else:
            extra["metavar"] = "X"
        command = click.option(
            "--" + name.replace("_", "-"),
            name,
            default=None,
            help=f"{field.metadata['help']}{default}",
            **extra,
        )(command)
    return command


class GroupedCommand(click.Command):
    """Help with the options under headings."""

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
    help="any option, also inside: strategy.collective=native",
)
@click.option("--json", "as_json", is_flag=True, help="print run.json to standard output")
@click.option("--quiet", is_flag=True, help="say nothing unless something goes wrong")
@click.option(
    "--progress/--no-progress", default=None, help="a live bar (default: when this is a terminal)"
)
@click.option("--debug", is_flag=True, help="show tracebacks")
def train(
    file: str | None,
    settings: tuple[str, ...],
    as_json: bool,
    quiet: bool,
    progress: bool | None,
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
      paceline train --model mypackage.nets:make_net --data imagefolder:photos
    """
    values: dict[str, Any] = read_toml(file) if file else {}
    values.update({k: v for k, v in flags.items() if v is not None and v != ()})
    if values.get(
        "resume"
    ):  # an option inside a choice is set in the choice of the run that goes on
        from paceline.request.earlier import load_config

        saved = load_config(values["resume"])
        inside = {
            s.partition(".")[0].replace("-", "_") for s in settings if "." in s.partition("=")[0]
        }
        values = {**{k: v for k, v in saved.items() if k in inside}, **values}
    values = apply_settings(values, list(settings))

    with held_back():
        import torch

        from paceline.api import make_job, meet, silent, start
        from paceline.cli.show import show_run
        from paceline.terminal.run import Watch
    torch.set_num_threads(1)  # no pool of threads here: workers are forked from this process

    meeting = meet()
    job = make_job(values, meeting)
    quiet = quiet or silent(meeting)
    with Watch(job, quiet=quiet, live=progress) as watch:
        run = start(job, watch.listen, clean=True, meeting=meeting)
    if as_json and not silent(meeting):
        click.echo(json.dumps(run.record, indent=2))
    if not quiet:
        show_run(run.record, run.out, to_stderr=as_json)
