"""`paceline study`"""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from paceline.cli.against import check_against
from paceline.cli.beside import beside_the_cluster
from paceline.cli.watch import say_page
from paceline.common.warned import warnings_once
from paceline.launch.signals import interrupted

if TYPE_CHECKING:
    from rich.console import Console

    from paceline.studies.grid import StudySpec


@click.command()
@click.argument("file", required=False, type=click.Path())
@click.option(
    "--out",
    default=None,
    metavar="DIR",
    help="folder of the study, new or to be continued  [default: runs/NAME]",
)
@click.option(
    "--short",
    is_flag=True,
    help="the file's [short] variant: a quick trial of the study",
)
@click.option("--full", is_flag=True, help="the file's [full] variant: nothing is cut")
@click.option(
    "--budget",
    default=None,
    metavar="TIME",
    help="the time that the study may take: 10min, 90s, 2h; what screening leaves of it goes into"
    " confirming the best settings",
)
@click.option(
    "--confirm",
    default=None,
    type=click.IntRange(0),
    metavar="N",
    help="how many settings to confirm  [default: 2 with a budget]",
)
@click.option(
    "--seeds",
    default=None,
    type=click.IntRange(1),
    metavar="N",
    help="run every setting with N seeds",
)
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="NAME=VALUE",
    help="set an option of `train` for all runs",
)
@click.option(
    "--data-dir", default=None, metavar="DIR", help="search data sets in this folder first"
)
@click.option(
    "--fetch",
    is_flag=True,
    help="download missing data; without a network, use the built-in fashion-mini",
)
@click.option(
    "--dry-run", is_flag=True, help="list the runs with an estimate of their time; run nothing"
)
@click.option(
    "--against",
    default=None,
    metavar="CHECKOUT",
    help="run no study: compare the speed of this version of Paceline with that in CHECKOUT",
)
@click.option(
    "--fail-if",
    default=None,
    metavar="slower=P%",
    help="with --against: exit with 1 if this version is slower by more than P percent",
)
@click.option(
    "--plan",
    default=None,
    metavar="PROFILE",
    help="predict the settings from a profile before they run, and show both in the report",
)
@click.option("--retry-failed", is_flag=True, help="repeat failed runs")
@click.option(
    "--figures/--no-figures",
    default=True,
    help="write the charts as PNG and SVG  [default: yes]",
)
@click.option("--quiet", is_flag=True, help="print errors only")
@click.option(
    "--progress/--no-progress", default=None, help="show a live table  [default: on a terminal]"
)
@click.option("--watch", is_flag=True, help="show a live page in the browser during the study")
@click.option("--debug", is_flag=True, help="show tracebacks")
def study(
    file: str | None,
    out: str | None,
    short: bool,
    full: bool,
    budget: str | None,
    confirm: int | None,
    seeds: int | None,
    settings: tuple[str, ...],
    data_dir: str | None,
    fetch: bool,
    dry_run: bool,
    against: str | None,
    fail_if: str | None,
    plan: str | None,
    retry_failed: bool,
    figures: bool,
    quiet: bool,
    progress: bool | None,
    watch: bool,
    debug: bool,
) -> None:
    """Measure a grid of settings and write a report.

    Without FILE it compares all strategies on MNIST, with 1, 2 and as many workers as cores. First
    it screens all settings in short runs; then it confirms the best beside serial, in many blocks
    of half a minute. Started again, the study continues where it was stopped.

    \b
    Examples:
      paceline study --fetch
      paceline study studies/stragglers.toml
      paceline study studies/optimizers.toml --set workers=2 --seeds 3
      paceline study my.toml --budget 20min
      paceline study my.toml --plan profile.json
      paceline study --dry-run
    """
    import torch
    from rich.console import Console

    from paceline.api import on_a_cluster
    from paceline.errors import BadRequest, RunFailed
    from paceline.record.formats import PREDICTED
    from paceline.report.predicted import beside_measured, error_sentence
    from paceline.report.reading import read_study
    from paceline.report.render import render
    from paceline.results.foretold import foretell_cores, foretell_settings
    from paceline.studies.grid import BUILTIN, StudySpec
    from paceline.studies.plan import rounds_of
    from paceline.studies.runner import run_study
    from paceline.terminal.results import show_study
    from paceline.terminal.study import StudyTable
    from paceline.watch.beside import page_beside

    torch.set_num_threads(1)  # workers are forked from this process: it must have no thread pool

    if short and full:
        raise BadRequest("--short and --full were given: use one of them")
    spec = StudySpec.read(file or BUILTIN, "short" if short else "full" if full else "")
    spec = spec.changed(settings, seeds=seeds, budget=budget, confirm=confirm, data_dir=data_dir)
    messages, console = Console(stderr=True), Console()
    if fetch:
        spec = _fetched(spec, data_dir, messages)
    if dry_run:
        _list_runs(spec, console)
        return
    if spec.base.get("launcher") == "spark":
        beside_the_cluster(spec.base.get("master"), watch, file, without=["--fetch"])
    folder = (
        Path(out)
        if out
        else Path("runs") / (spec.name + ("-short" if short else "-full" if full else ""))
    )
    if against is not None or fail_if is not None:
        check_against(spec, against, fail_if, folder, quiet)
        return
    if plan is not None and not (folder / PREDICTED).exists():
        foretell_settings(spec.settings(), plan, folder)
    began = time.monotonic()
    try:
        with (
            page_beside(folder, watch, say_page),
            warnings_once(),
            StudyTable(quiet=quiet, live=progress) as table,
        ):
            records = run_study(
                spec, folder, table, retry_failed=retry_failed, clean=True, elsewhere=on_a_cluster
            )
    except KeyboardInterrupt:
        raise interrupted(
            f"; {folder} holds the runs so far, and the same command continues there"
        ) from None
    if not quiet:
        messages.print(
            f"{len(records)} runs in {(time.monotonic() - began) / 60:.1f} minutes; making the"
            " report",
            highlight=False,
        )
    foretell_cores(read_study(folder))
    page = render(folder, figures=figures)
    if not quiet:
        done = read_study(folder)
        show_study(done, console)
        if plan is not None and (beside := beside_measured(done)):
            console.print(error_sentence(beside), highlight=False)
        console.print(
            f"report: {page.resolve().as_uri()}", highlight=False, soft_wrap=True, markup=False
        )
    asked = {p.name for p in itertools.chain(*rounds_of(spec)) if not p.setting.baseline}
    if not any(r["status"] == "completed" for name, r in records.items() if name in asked):
        raise RunFailed("no run of the study was completed: see the errors above")


def _fetched(spec: StudySpec, data_dir: str | None, messages: Console) -> StudySpec:
    """Download the study's data; without a network, change the study to the built-in data."""
    from paceline.data.fetch import RECIPES
    from paceline.data.fetch import fetch as bring
    from paceline.errors import DataUnavailable

    def say(text: str) -> None:
        messages.print(text, highlight=False, soft_wrap=True, markup=False)

    if (images := spec.prepare.get("images")) in RECIPES:
        bring(str(images), data_dir or "data", say)
    for name in sorted(
        {str(s.options.get("data", "mnist")) for s in spec.settings()} & set(RECIPES)
    ):
        try:
            bring(name, data_dir or "data", say)
        except DataUnavailable as error:
            say(f"note: {str(error).split('. Copy')[0]}; using fashion-mini instead")
            built_in = replace(
                spec,
                target_accuracy=0.6,
                cut="no network: 6,000 images of clothes that are built in",
            )
            return built_in.changed(["data=fashion-mini", "data_share=1.0"])
    return spec


def _list_runs(spec: StudySpec, console: Console) -> None:
    """Print the settings with an estimate of their time."""
    from paceline.studies.estimate import Estimator
    from paceline.terminal.fitting import WRAP, Column, drop, fit_table

    settings, estimator = spec.settings(), Estimator()
    guesses = [estimator.seconds(setting) for setting in settings]
    threads = Column("threads", [str(s.options["threads"]) for s in settings])
    seeds = Column("seeds", [str(len(spec.seeds)) for _ in settings])
    columns = [
        Column("workers", [str(s.workers) for s in settings]),
        threads,
        seeds,
        Column("about", ["?" if guess is None else f"{guess:.0f} s" for guess in guesses]),
    ]
    names = [setting.label for setting in settings]
    steps = [WRAP, drop(seeds), drop(threads)]
    console.print(fit_table(console, "setting", names, columns, steps))
    total = sum(guess or 0.0 for guess in guesses) * len(spec.seeds)
    best = f"confirming the best {spec.confirms}" if spec.confirms else ""
    budget = f" of a budget of {spec.budget}; the rest goes into {best}" if spec.budget else ""
    budget = budget or (f"; then {best}" if best else "")
    about = f"{total:.0f} s" if total < 120 else f"{total / 60:.0f} minutes"
    told = f"about {about} on this machine (an estimate)" if total else "no estimate was possible"
    console.print(f"{len(settings) * len(spec.seeds)} runs, {told}{budget}", highlight=False)
