"""`paceline profile`"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import click

from paceline.cli.choices import NAME_WITH_OPTIONS, names_of
from paceline.cli.train import completer

FOLDER = click.Path(file_okay=False)  # a shell completes folders
COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9}  # of parameters


@click.command()
@click.argument("run", metavar="[RUN]", required=False, type=FOLDER)
@click.option(
    "--model",
    default=None,
    metavar=NAME_WITH_OPTIONS,
    shell_complete=completer("models"),
    help=f"the model: {', '.join(names_of('models'))}, or package.module:factory  [default: cnn]",
)
@click.option(
    "--data",
    default=None,
    metavar=NAME_WITH_OPTIONS,
    shell_complete=completer("data"),
    help=f"the data: {', '.join(names_of('data'))}, or package.module:factory  [default: mnist]",
)
@click.option(
    "--data-dir", default=None, metavar="DIR", help="where data sets are looked for first"
)
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="NAME=VALUE",
    help="any other option of train that changes a step: optimizer=adam, precision=bf16",
)
@click.option(
    "--plugin", multiple=True, metavar="FILE", help="a Python file that registers models or codecs"
)
@click.option(
    "--batch-sizes",
    default=None,
    metavar="N,N,...",
    help="samples per worker and step  [default: 16,64,256]",
)
@click.option(
    "--seconds",
    type=click.FloatRange(0.1, 3600),
    default=None,
    help="how long to measure  [default: 60]",
)
@click.option(
    "--workers",
    type=click.IntRange(1, 2),
    default=None,
    help="how many workers; links and differences in speed need 2  [default: 2, if cores allow]",
)
@click.option(
    "--transports",
    default=None,
    metavar="NAME,NAME,...",
    help="measure the links of these  [default: all that this machine has]",
)
@click.option(
    "--accuracy",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    default=None,
    help="count the steps to this test accuracy, too: a few minutes",
)
@click.option(
    "--follow",
    multiple=True,
    metavar="STRATEGY[/CODEC]",
    help="with --accuracy: count the steps of this strategy, in virtual time (may be repeated)",
)
@click.option(
    "--follow-workers",
    default=None,
    metavar="N,N,...",
    help="with --follow: the numbers of workers, up to 32  [default: 2,4,8]",
)
@click.option(
    "--measurements",
    default=None,
    metavar="FILE",
    help="a table measured elsewhere: CSV with the columns workers, hosts, batch_size, step_s",
)
@click.option(
    "--parameters",
    default=None,
    metavar="N",
    help="how many parameters the model of --measurements has: 25557032, 25.6M",
)
@click.option(
    "--out",
    default="profile.json",
    metavar="FILE",
    show_default=True,
    help="where to write the profile",
)
@click.option("--json", "as_json", is_flag=True, help="print the profile to standard output, too")
@click.option("--debug", is_flag=True, help="show tracebacks")
def profile(
    run: str | None,
    model: str | None,
    data: str | None,
    data_dir: str | None,
    settings: tuple[str, ...],
    plugin: tuple[str, ...],
    batch_sizes: str | None,
    seconds: float | None,
    workers: int | None,
    transports: str | None,
    accuracy: float | None,
    follow: tuple[str, ...],
    follow_workers: str | None,
    measurements: str | None,
    parameters: str | None,
    out: str,
    as_json: bool,
    debug: bool,
) -> None:
    """Measure what a worker's steps, codecs and links cost, for a plan.

    RUN is the folder of an earlier run: its record is used, and nothing is measured.

    \b
    Examples:
      paceline profile --model cnn --data mnist --out profile.json
      paceline profile --model mlp:hidden=512x256 --data fashion-mini --batch-sizes 32,128
      paceline profile --data fashion-mini --set optimizer=adam --transports shm,gloo
      paceline profile --accuracy 0.95 --follow local-sgd --follow allreduce/topk
      paceline profile runs/a --out profile.json
      paceline profile --measurements steps.csv --parameters 25.6M
    """
    from rich.console import Console

    from paceline.planning.profile import Profile
    from paceline.planning.stored import refuse_place, text_of, write_profile
    from paceline.terminal.profile import show_profile

    measured = {
        "model": model,
        "data": data,
        "data_dir": data_dir,
        "set": settings,
        "plugin": plugin,
        "batch_sizes": batch_sizes,
        "seconds": seconds,
        "workers": workers,
        "transports": transports,
        "accuracy": accuracy,
        "follow": follow,
        "follow_workers": follow_workers,
    }
    _refuse_mixing(run, measurements, parameters, measured)
    refuse_place(out)
    if run is not None:
        from paceline.planning.from_run import profile_of_run

        found = profile_of_run(run)
    elif measurements is not None:
        assert parameters is not None
        found = Profile.from_measurements(measurements, _count(parameters))
    else:
        found = _measure(measured)
    write_profile(found, out)
    if as_json:
        click.echo(text_of(found), nl=False)
    console = Console(stderr=as_json)
    show_profile(found, console)
    console.print(f"profile: {out}", highlight=False, soft_wrap=True, markup=False)


def _refuse_mixing(
    run: str | None, measurements: str | None, parameters: str | None, measured: dict[str, Any]
) -> None:
    """Refuse options of one source of a profile beside another source."""
    from paceline.errors import BadRequest

    if run is not None and measurements is not None:
        raise BadRequest("give RUN or --measurements, one of the two")
    source = "RUN" if run is not None else "--measurements" if measurements is not None else ""
    given = [name for name, value in measured.items() if value not in (None, ())]
    if source and given:
        flag = f"--{given[0].replace('_', '-')}"
        raise BadRequest(f"{flag} has no effect beside {source}, which is not measured here")
    if measurements is not None and parameters is None:
        raise BadRequest(
            "--measurements needs the number of the model's parameters: --parameters 25.6M, say"
        )
    if measured["follow"] and measured["accuracy"] is None:
        raise BadRequest("--follow counts the steps to an accuracy: give --accuracy 0.9, say")
    if measured["follow_workers"] and not measured["follow"]:
        raise BadRequest("--follow-workers goes with --follow STRATEGY")
    if parameters is not None and measurements is None:
        raise BadRequest("--parameters goes with --measurements; models here are counted")


def _count(text: str) -> int:
    """Read a number of parameters: `25557032`, `25.6M`."""
    from paceline.common.units import parse_unit
    from paceline.errors import BadRequest

    found = parse_unit(text.replace("_", ""), COUNTS, "parameters")
    if found < 1 or found != found or found > 1e15:
        raise BadRequest(f"parameters={text}: the model has 1 or more")
    return round(found)


def _sizes(text: str, option: str = "--batch-sizes", like: str = "16,64,256") -> list[int]:
    from paceline.errors import BadRequest

    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and 0 < int(part) < 10**9 for part in parts):
        raise BadRequest(f"{option} {text}: give integers of 1 or more, like {like}")
    return sorted({int(part) for part in parts})


def _measure(asked: dict[str, Any]) -> Any:
    import torch

    from paceline.common.cores import cores
    from paceline.common.warned import warnings_once
    from paceline.planning.measure.accuracy import measure_accuracy
    from paceline.planning.measure.whole import BATCH_SIZES, SHARES, Wishes, measure
    from paceline.request.settings import apply_settings
    from paceline.terminal.profile import ProfileBar

    torch.set_num_threads(1)  # no pool of threads here: workers are forked from this process
    names = ("model", "data", "data_dir", "plugin")
    values = {name: asked[name] for name in names if asked[name] not in (None, ())}
    named = asked["transports"]
    wishes = Wishes(
        _sizes(asked["batch_sizes"]) if asked["batch_sizes"] is not None else BATCH_SIZES,
        asked["seconds"] or 60.0,
        asked["workers"] or min(2, cores()),
        [part.strip() for part in named.split(",")] if named is not None else None,
    )
    options = apply_settings(values, list(asked["set"]))
    question = _question(asked, wishes.batch_sizes[0])
    with warnings_once(), ProfileBar(SHARES) as bar:
        found = measure(options, wishes, bar.hear)
    if question is None:
        return found
    with warnings_once():
        return replace(found, accuracy=measure_accuracy(options, question, _say))


def _question(asked: dict[str, Any], batch_size: int) -> Any:
    """What is asked about the steps to an accuracy; None: nothing."""
    from paceline.planning.measure.accuracy import Question

    if asked["accuracy"] is None:
        return None
    given = asked["follow_workers"] or "2,4,8"
    workers = _sizes(given, "--follow-workers", "2,4,8") if asked["follow"] else []
    return Question(asked["accuracy"], batch_size, asked["follow"], workers)


def _say(text: str) -> None:
    click.echo(f"counting steps: {text}", err=True)
