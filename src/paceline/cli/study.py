"""`paceline study`"""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paceline.launch.signals import held_back

if TYPE_CHECKING:
    from rich.console import Console

    from paceline.report.lines import Spread
    from paceline.studies.grid import StudySpec


@click.command()
@click.argument("file", required=False, type=click.Path())
@click.option(
    "--out",
    default=None,
    metavar="DIR",
    help="where it is kept, and looked for  [default: runs/NAME]",
)
@click.option(
    "--short",
    is_flag=True,
    help="the file's short setting: the same study in seconds, to see that it works",
)
@click.option("--full", is_flag=True, help="the file's full setting: nothing cut")
@click.option(
    "--seeds", default=None, type=click.IntRange(1), metavar="N", help="every setting so many times"
)
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="NAME=VALUE",
    help="an option of `train` for all runs",
)
@click.option(
    "--data-dir", default=None, metavar="DIR", help="where data sets are looked for first"
)
@click.option(
    "--fetch",
    is_flag=True,
    help="fetch the data if it is not here; without a network, go on with fashion-mini",
)
@click.option(
    "--dry-run", is_flag=True, help="list the runs and about how long they take; run nothing"
)
@click.option("--retry-failed", is_flag=True, help="run again what has failed")
@click.option(
    "--figures/--no-figures",
    default=True,
    help="pictures of the charts as PNG and SVG  [default: yes]",
)
@click.option("--quiet", is_flag=True, help="say nothing unless something goes wrong")
@click.option(
    "--progress/--no-progress", default=None, help="a live table (default: when this is a terminal)"
)
@click.option("--debug", is_flag=True, help="show tracebacks")
def study(
    file: str | None,
    out: str | None,
    short: bool,
    full: bool,
    seeds: int | None,
    settings: tuple[str, ...],
    data_dir: str | None,
    fetch: bool,
    dry_run: bool,
    retry_failed: bool,
    figures: bool,
    quiet: bool,
    progress: bool | None,
    debug: bool,
) -> None:
    """Measure a grid of settings fairly, and report. Without FILE: all strategies, one to five
    workers, on MNIST.

    Started again, it goes on where it was stopped.

    \b
    Examples:
      paceline study --fetch
      paceline study studies/stragglers.toml
      paceline study studies/optimizers.toml --set workers=2 --seeds 3
      paceline study --dry-run
    """
    with held_back():
        import torch
        from rich.console import Console

        from paceline.errors import BadRequest, Interrupted, RunFailed
        from paceline.report.render import render
        from paceline.studies.grid import BUILTIN, StudySpec
        from paceline.studies.plan import rounds_of
        from paceline.studies.runner import run_study
        from paceline.terminal.study import StudyTable
    torch.set_num_threads(1)  # no pool of threads here: workers are forked from this process

    if short and full:
        raise BadRequest("--short or --full, not both")
    spec = StudySpec.read(file or BUILTIN, "short" if short else "full" if full else "")
    spec = spec.changed(settings, seeds=seeds, data_dir=data_dir)
    messages, console = Console(stderr=True), Console()
    if fetch:
        spec = _fetched(spec, data_dir, messages)
    if dry_run:
        _list_runs(spec, console)
        return
    folder = (
        Path(out)
        if out
        else Path("runs") / (spec.name + ("-short" if short else "-full" if full else ""))
    )
    began = time.monotonic()
    try:
        with StudyTable(quiet=quiet, live=progress) as table:
            records = run_study(spec, folder, table, retry_failed=retry_failed, clean=True)
    except KeyboardInterrupt:
        raise Interrupted(
            f"interrupted; what was measured is in {folder}, and the same command goes on from"
            " there"
        ) from None
    if not quiet:
        messages.print(
            f"{len(records)} runs in {(time.monotonic() - began) / 60:.1f} minutes; making the"
            " report",
            highlight=False,
        )
    page = render(folder, figures=figures)
    if not quiet:
        show_study(folder, console)
        console.print(
            f"report: {page.resolve().as_uri()}", highlight=False, soft_wrap=True, markup=False
        )
    asked = {p.name for p in itertools.chain(*rounds_of(spec)) if not p.setting.baseline}
    if not any(r["status"] == "completed" for name, r in records.items() if name in asked):
        raise RunFailed("no run that was asked for was completed: see above")


def show_study(folder: Path, console: Console) -> None:
    """The answer, and one table."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from paceline.cli.show import machine_line
    from paceline.report.answer import answer, best_lines
    from paceline.report.reading import read_study
    from paceline.report.score import score_of
    from paceline.report.words import size, times, with_range

    found = read_study(folder)
    score = score_of(found)
    beside = not score.is_accuracy and any(line.accuracy for line in found.lines)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False)
    headings = [
        "setting",
        "best\nworkers",
        "training",
        "against\nserial",
        f"test\n{score.name}",
        *(["test\naccuracy"] * beside),
    ]
    headings += [f"time to\n{100 * found.target:g}%"] if found.target is not None else []
    narrow = console.width < 100  # then names matter more than the last columns
    for heading in (*headings, *([] if narrow else ["sent\na step"])):
        table.add_column(
            heading,
            justify="left" if heading == "setting" else "right",
            no_wrap=heading != "setting",
            overflow="fold",
        )
    for line in best_lines(found):
        gain, sent = found.serial_speedup(line), line.per_step("payload_sent_bytes")
        row: list[Any] = [
            Text(line.label + (" *" if line.oversubscribed else "")),
            str(line.workers),
            with_range(line.train_s, ".2f"),
        ]
        form, scale = (".2f", 100) if score.is_accuracy else (".4g", 1)
        row += [times(gain.mean if gain else None), _cell(score.spread(line), form, scale, narrow)]
        row += [_cell(line.accuracy, ".2f", 100, narrow)] * beside
        if found.target is not None:
            reached = line.time_to_accuracy
            row.append("not reached" if reached is None else _cell(reached, ".2f", 1, narrow))
        table.add_row(
            *row, *([] if narrow else [size(sent.mean) if sent and line.workers > 1 else "–"])
        )
    for sentence in answer(found):
        console.print(sentence.replace("`", ""), highlight=False, markup=False)
    console.print(table)
    notes = "Seconds; accuracy in per cent; means, in brackets the lowest and the highest run. "
    notes += "Each setting at its own best number of workers."
    if any(line.oversubscribed for line in best_lines(found)):
        notes += f" * oversubscribed: more workers and servers than the {found.cores} cores."
    console.print(notes, style="dim", highlight=False)
    for line in found.lines:
        if line.errors:
            console.print(
                f"{line.id} {line.errors[0]}",
                style="red",
                highlight=False,
                markup=False,
                soft_wrap=True,
            )
    console.print(machine_line(found.environment), style="dim", highlight=False)


def _cell(spread: Spread | None, form: str, scale: float, narrow: bool) -> str:
    """A mean with its range; without it where there is little room."""
    from paceline.report.words import with_range

    if spread is None or not narrow:
        return with_range(spread, form, scale)
    return f"{spread.mean * scale:{form}}"


def _fetched(spec: StudySpec, data_dir: str | None, messages: Console) -> StudySpec:
    """With its data here, or with what is built in."""
    from paceline.data.fetch import RECIPES
    from paceline.data.fetch import fetch as bring
    from paceline.errors import DataUnavailable

    def say(text: str) -> None:
        messages.print(text, highlight=False, soft_wrap=True, markup=False)

    for name in sorted(
        {str(s.options.get("data", "mnist")) for s in spec.settings()} & set(RECIPES)
    ):
        try:
            bring(name, data_dir or "data", say)
        except DataUnavailable as error:
            say(f"note: {str(error).split('. Copy')[0]}; going on with fashion-mini")
            built_in = replace(
                spec,
                target_accuracy=0.6,
                cut="no network: 6,000 images of clothes that are built in",
            )
            return built_in.changed(["data=fashion-mini", "data_share=1.0"])
    return spec


def _list_runs(spec: StudySpec, console: Console) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from paceline.studies.estimate import Estimator

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False)
    for heading in ("setting", "workers", "threads", "seeds", "about"):
        table.add_column(heading, justify="left" if heading == "setting" else "right")
    estimator, total = Estimator(), 0.0
    for setting in spec.settings():
        guess = estimator.seconds(setting)
        total += (guess or 0.0) * len(spec.seeds)
        about = "?" if guess is None else f"{guess:.0f} s"
        table.add_row(
            Text(setting.label),
            str(setting.workers),
            str(setting.options["threads"]),
            str(len(spec.seeds)),
            about,
        )
    console.print(table)
    runs = len(spec.settings()) * len(spec.seeds)
    budget = (
        f"; seeds after the first are left out after {spec.budget_s:.0f} s" if spec.budget_s else ""
    )
    about = f"{total:.0f} s" if total < 120 else f"{total / 60:.0f} minutes"
    told = (
        f"about {about} on this machine (an estimate)"
        if total
        else "for how long could not be tried out"
    )
    console.print(f"{runs} runs, {told}{budget}", highlight=False)
