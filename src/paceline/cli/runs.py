"""`paceline runs`, `paceline show` and `paceline evaluate`: runs that have ended."""

from __future__ import annotations

import json
from typing import Any

import click

from paceline.cli.choices import NAME_WITH_OPTIONS
from paceline.cli.groups import Choice
from paceline.cli.train import completer

FOLDER = click.Path(file_okay=False)  # a shell completes folders


@click.command()
@click.argument("folder", metavar="[DIR]", default="runs", type=FOLDER)
@click.option("--json", "as_json", is_flag=True, help="print a JSON list to standard output")
@click.option("--debug", is_flag=True, help="show tracebacks")
def runs(folder: str, as_json: bool, debug: bool) -> None:
    """List the runs of a folder, the newest first  [default: runs].

    \b
    Examples:
      paceline runs
      paceline runs runs/study                the runs of a study
      paceline runs --json | jq '.[0].folder'
    """
    from rich.console import Console

    from paceline.results.past import past_runs, studies_in
    from paceline.terminal.past import runs_lines

    found, damaged = past_runs(folder)
    if as_json:
        click.echo(json.dumps([run.plain() for run in found], indent=2))
    console = Console()
    if found and not as_json:
        for line in runs_lines(found, console.width):
            console.print(line, soft_wrap=True)
    elif not as_json:
        click.echo(f"{folder} holds no run")
    for sentence in damaged:
        click.echo(f"left out: {sentence}", err=True)
    if not as_json:
        for study in studies_in(folder):
            click.echo(f"{study} is a study: paceline runs {study}, paceline report {study}")


@click.command()
@click.argument("run", metavar="RUN", type=FOLDER)
@click.option("--json", "as_json", is_flag=True, help="print run.json, notices and options as JSON")
@click.option("--debug", is_flag=True, help="show tracebacks")
def show(run: str, as_json: bool, debug: bool) -> None:
    """Show a finished run: its results, its workers, its notices, its options.

    \b
    Examples:
      paceline show runs/20261115-203012-cnn-mnist-allreduce-2
      paceline show runs/a --json
    """
    from pathlib import Path

    from paceline.record.reader import read_run
    from paceline.results.history import notices
    from paceline.results.past import decided_options, given_options

    record, folder = read_run(run), Path(run)
    given, decided = given_options(record["config"]), decided_options(record["config"])
    said = notices(folder)
    if as_json:
        more = {"notices": said, "options": given, "decided": decided}
        click.echo(json.dumps({**record, **more}, indent=2))
        return
    from paceline.cli.show import show_past

    show_past(record, folder, said, given, decided)


@click.command()
@click.argument("run", metavar="RUN", type=FOLDER)
@click.option(
    "--data",
    default=None,
    metavar=NAME_WITH_OPTIONS,
    shell_complete=completer("data"),
    help="the data whose test set is used  [default: the run's own]",
)
@click.option(
    "--data-dir", default=None, metavar="DIR", help="where data sets are looked for first"
)
@click.option(
    "--metric",
    default=None,
    metavar=NAME_WITH_OPTIONS,
    shell_complete=completer("metrics"),
    help="the metric, or package.module:factory  [default: the run's own]",
)
@click.option(
    "--loss",
    default=None,
    metavar=NAME_WITH_OPTIONS,
    shell_complete=completer("losses"),
    help="the loss, or package.module:factory  [default: the run's own]",
)
@click.option(
    "--step",
    default=None,
    metavar="MODULE:FUNCTION",
    help="the training step of your own that the run had",
)
@click.option(
    "--model",
    default=None,
    metavar=NAME_WITH_OPTIONS,
    shell_complete=completer("models"),
    help="the model, or package.module:factory, where the record cannot name it",
)
@click.option(
    "--which",
    default="last",
    type=Choice("kind of weights", ["last", "best", "ema"]),
    help="the weights: of the end, of the best evaluation, or averaged  [default: last]",
)
@click.option("--json", "as_json", is_flag=True, help="print the scores as JSON")
@click.option("--debug", is_flag=True, help="show tracebacks")
def evaluate(
    run: str,
    data: str | None,
    data_dir: str | None,
    metric: str | None,
    loss: str | None,
    step: str | None,
    model: str | None,
    which: Any,
    as_json: bool,
    debug: bool,
) -> None:
    """Print the loss and the metrics of a run's saved weights on a test set.

    \b
    Examples:
      paceline evaluate runs/a
      paceline evaluate runs/a --data imagefolder:photos --json
      paceline evaluate runs/a --data mydata:make --metric auc --model mynet:Net
    """
    from rich.console import Console

    from paceline.results.run import Run
    from paceline.terminal.pairs import pairs_table

    found = Run.open(run, model).evaluate(
        data, metric=metric, loss=loss, step=step, which=which, data_dir=data_dir
    )
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    Console().print(pairs_table(_shown(*each) for each in found.items()))


def _shown(name: str, value: float) -> tuple[str, str]:
    if name == "samples":
        return name, f"{value:,}"
    return f"test {name}", f"{100 * value:.2f}%" if name == "accuracy" else f"{value:.4f}"
