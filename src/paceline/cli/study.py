"""`paceline study`"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.table import Table

    from paceline.study.runner import Line


@click.command()
@click.option("--data", default="mnist", show_default=True, metavar="X", help="a data source")
@click.option("--data-dir", default=None, metavar="DIR", help="where data sets are looked for first")
@click.option("--fetch", is_flag=True, help="fetch the data if it is not here; without a network, go on with fashion-mini")
@click.option("--model", default="cnn", show_default=True, metavar="X")
@click.option("--epochs", default=1, show_default=True, type=click.IntRange(1))
@click.option("--global-batch-size", default=128, show_default=True, type=click.IntRange(2), help="the same for every line")
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(1), help="every line is run so often, interleaved")
@click.option("--out", default=None, metavar="DIR", help="[default: runs/<time>-study]")
@click.option("--debug", is_flag=True, help="show tracebacks")
def study(
    data: str,
    data_dir: str | None,
    fetch: bool,
    model: str,
    epochs: int,
    global_batch_size: int,
    rounds: int,
    out: str | None,
    debug: bool,
) -> None:
    """Measure serial training against two workers, and PyTorch's own DDP, on the same work.

    \b
    Examples:
      paceline study --fetch
      paceline study --data fashion-mini --epochs 2 --rounds 5
    """
    import torch

    torch.set_num_threads(1)  # no pool of threads here: workers are forked from this process
    from rich.console import Console

    from paceline.data.fetch import RECIPES
    from paceline.data.fetch import fetch as bring
    from paceline.errors import BadRequest, DataUnavailable, RunFailed
    from paceline.progress import Watch
    from paceline.study.runner import builtin, run_study

    messages = Console(stderr=True)
    if fetch and data in RECIPES:
        try:
            bring(
                data,
                data_dir or "data",
                lambda text: messages.print(text, highlight=False, soft_wrap=True, markup=False),
            )
        except DataUnavailable as error:
            reason = str(error).split(". Copy")[0]
            messages.print(f"note: {reason}; going on with fashion-mini", highlight=False, soft_wrap=True, markup=False)
            data = "fashion-mini"
    folder = Path(out) if out else Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-study"
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadRequest(f"out={folder} is not empty: choose another folder")
    base: dict[str, Any] = {"model": model, "data": data, "epochs": epochs, "global_batch_size": global_batch_size}
    if data_dir:
        base["data_dir"] = data_dir
    settings = builtin()
    total, done = len(settings) * rounds, 0
    watches: list[Watch] = []

    def watch(setting: Any, number: int, job: Any) -> Any:
        nonlocal done
        done += 1
        close()
        label = f"{done}/{total} {setting.label}"
        watches.append(Watch(job, label=label))
        watches[-1].__enter__()
        if not watches[-1].live:
            messages.print(label, highlight=False)
        return watches[-1].listen

    def close() -> None:
        while watches:
            watches.pop().__exit__(None, None, None)

    try:
        lines = run_study(settings, base, rounds, folder, watch)
    finally:
        close()
    console = Console()
    console.print(
        f"{model} on {data}, {epochs} epoch{'s' * (epochs > 1)}, global batch {global_batch_size}",
        style="bold",
        highlight=False,
    )
    console.print(_table(lines))
    _legend(console, lines, rounds)
    if all(line.error for line in lines):
        raise RunFailed("every run of the study failed: see above")
    console.print(f"results: {folder / 'results.csv'}", highlight=False, soft_wrap=True)


def _table(lines: list[Line]) -> Table:
    from rich import box
    from rich.table import Table

    from paceline.cli.show import number, percent, size

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False)
    for heading in (
        "strategy",
        "workers\nx threads",
        "test\naccuracy",
        "training",
        "samples/s",
        "spread",
        "speed-up",
        "sent\na step",
    ):
        table.add_column(heading, justify="left" if heading == "strategy" else "right", no_wrap=True)
    baseline = lines[0].median("train_s")
    for line in lines:
        setting, own = line.setting, line.median("train_s")
        name, shape = setting.strategy + (" *" if line.oversubscribed else ""), f"{setting.workers} x {setting.threads}"
        if own is None:
            table.add_row(name, shape, "failed")
            continue
        rates = line.values("samples_per_s")
        table.add_row(
            name,
            shape,
            percent(line.median("test_accuracy")),
            f"{own:.2f} s",
            number(line.median("samples_per_s"), ",.0f"),
            f"±{50 * (max(rates) - min(rates)) / statistics.median(rates):.0f}%",
            f"{baseline / own:.2f}x" if baseline else "-",
            size(line.sent_bytes_per_step()) if setting.workers > 1 else "-",
        )
    return table


def _legend(console: Any, lines: list[Line], rounds: int) -> None:

    for line in lines:
        if line.error:
            console.print(f"{line.setting.label} failed: {line.error}", style="red", highlight=False)
    record = next((r for line in lines for r in line.records), None)
    if record is None:
        return
    env = record["environment"]
    console.print(
        f"Median of {rounds} interleaved round{'s' * (rounds > 1)}; speed-up = training time of serial with one thread / "
        "own; spread = half of max - min. Start-up, loading and evaluation are not in the training time. "
        f"Memory format: {record['config']['memory_format']}.",
        highlight=False,
    )
    if any(line.oversubscribed for line in lines):
        console.print(f"* oversubscribed: more threads than the {env['cores']} cores of this machine.", style="yellow")
    console.print(
        f"{env['cpu']}, {env['cores']} cores, torch {env['torch']}, Python {env['python']}",
        style="dim",
        highlight=False,
    )
