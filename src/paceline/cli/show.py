"""The tables that a command prints at its end: of a run, and of prepared data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markdown import Markdown
from rich.table import Table

from paceline.common.values import format_value
from paceline.data.manifest import Manifest
from paceline.data.prepare.report import as_text
from paceline.report.run_rows import headline, number, result_rows, seconds
from paceline.report.score import only_the_largest_class
from paceline.report.words import size
from paceline.terminal.fitting import Column, drop, fit_table
from paceline.terminal.pairs import pairs_table
from paceline.terminal.results import machine_line as machine_line


def show_past(
    record: dict[str, Any],
    out: Path,
    notices: list[str],
    given: dict[str, Any],
    decided: dict[str, Any],
) -> None:
    """Print a finished run: what `train` printed at its end, its notices, its options."""
    console = Console()
    show_run(record, out, to_stderr=False, headed=True)
    for notice in notices:
        console.print(f"note: {notice}", highlight=False, markup=False)
    for title, options in (("options", given), ("given or decided", decided)):
        words = " ".join(f"{name}={format_value(value)}" for name, value in options.items())
        console.print(f"{title}: {words}", highlight=False, markup=False)


def show_run(
    record: dict[str, Any], out: Path, to_stderr: bool, headed: bool | None = None
) -> None:
    """Print the results of a run, its workers, and what qualifies the results.

    `headed`: begin with the headline; None: unless this is a terminal, where it is above the bar.
    """
    console = Console(stderr=to_stderr)
    config, private = record["config"], record.get("privacy")
    if not console.is_terminal if headed is None else headed:
        console.print(headline(config, config.get("threads")), style="bold", highlight=False)
    if record["status"] != "completed":
        reason = record["error"] or "no reason was recorded"
        console.print(f"{record['status']}: {reason}", style="red", markup=False, highlight=False)
    console.print(pairs_table(result_rows(record)))
    if config["workers"] > 1:
        console.print(_workers(record["workers"], console))
    only = only_the_largest_class(record)
    if only:
        console.print(
            f"the accuracy is the share of the largest class ({only}): a model that always answers"
            " with that class reaches it, too",
            style="yellow",
            markup=False,
        )
    for said in (_apart(record["workers"]), _bubble(record["workers"])):
        if said:
            console.print(said, highlight=False)
    if config.get("profile"):
        _profile(console, out)
    if record.get("lost"):
        console.print(
            f"worker {', '.join(map(str, record['lost']))} was lost during the run; the others"
            " continued",
            style="yellow",
        )
    if private:
        console.print(" ".join(private["guarantee"]), highlight=False, soft_wrap=True)
        if not private["private"]:
            console.print(
                "NOT PRIVATE: with secure=false the noise is derived from the seed", style="yellow"
            )
    if config.get("oversubscribed"):
        console.print(
            f"oversubscribed: more threads than the {record['environment']['cores']} cores of this"
            " machine",
            style="yellow",
        )
    console.print(f"record: {out / 'run.json'}", highlight=False, soft_wrap=True, markup=False)


def _profile(console: Console, out: Path) -> None:
    """Print the functions and operators of worker 0 that took most time."""
    from paceline.record.reader import read_worker_events

    found = [e for own in read_worker_events(out)[:1] for e in own if e["kind"] == "profile"]
    for kind, steps in (("functions", "function_steps"), ("operators", "operator_steps")):
        if not found or not found[0][kind]:
            continue
        table = Table(
            title=f"{kind} of worker 0, over {found[0][steps]} steps", title_justify="left"
        )
        for heading in ("name", "calls", "own", "total"):
            table.add_column(
                heading,
                justify="left" if heading == "name" else "right",
                no_wrap=heading != "name",
                overflow="fold",
            )
        for row in found[0][kind][:8]:
            table.add_row(
                row["name"], f"{row['calls']:,}", seconds(row["own_s"]), seconds(row["total_s"])
            )
        console.print(table)


def _workers(workers: list[dict[str, Any]], console: Console) -> Table:
    """Return a row per rank. A server has no samples, and its times are not those of training."""

    def of_worker(worker: dict[str, Any], text: str) -> str:
        return "" if worker["role"] == "server" else text

    samples = Column("samples", [of_worker(w, f"{w['samples']:,.0f}") for w in workers])
    parts = [
        Column(part, [of_worker(w, seconds(w[f"{part}_s"])) for w in workers])
        for part in ("compute", "sync", "idle")
    ]
    cpu = Column("CPU", [number(w["cpu_percent"], ".0f") + "%" for w in workers])
    memory = Column("peak memory", [size(w["rss_peak_bytes"]) for w in workers])
    sent = Column("sent", [size(w["payload_sent_bytes"]) for w in workers])
    names = [f"{'server ' if w['role'] == 'server' else ''}{w['rank']}" for w in workers]
    columns, steps = [samples, *parts, sent, cpu, memory], [drop(cpu), drop(samples), drop(memory)]
    if any("split" in w for w in workers):  # each worker holds a part of the model
        held = Column("weights", [f"{w.get('parameters') or 0:,.0f}" for w in workers])
        inside = Column(
            "of it\nactivations", [size(w.get("activation_sent_bytes")) for w in workers]
        )
        columns = [held, *parts, sent, inside, cpu, memory]
        steps = [drop(cpu), drop(memory), drop(held)]
    return fit_table(console, "worker", names, columns, steps, Table)


def _bubble(workers: list[dict[str, Any]]) -> str:
    """Return how long the workers of a pipeline waited for each other, beside the theory."""
    found = [w for w in workers if w.get("bubble") is not None]
    if not found:
        return ""
    measured = sum(w["bubble"] for w in found) / len(found)
    theory = found[0]["split"].get("bubble_in_theory")
    cut = ", ".join(found[0]["split"].get("cut", ()))
    where = f"; the stages begin at layer {cut}" if cut else ""
    return (
        f"bubble: workers waited {measured:.0%} of the passes' time; the timetable alone has"
        f" {theory:.0%}, with equal stages and free messages{where}"
    )


def _apart(workers: list[dict[str, Any]]) -> str:
    """Return staleness, overlap and distance between replicas in one line; empty without any."""
    names = {
        "staleness_max": "staleness at most {:.0f}",
        "overlap_rate": "{:.0%} of the updates overlapped",
        "replica_distance_max": "replicas at most {:.1e} from their mean",
    }
    found = {key: [w[key] for w in workers if w.get(key)] for key in names}
    return "; ".join(names[key].format(max(values)) for key, values in found.items() if values)


def show_prepared(manifest: Manifest, out: str, to_stderr: bool = False) -> None:
    """Print the short report of prepared data, and the command that trains on it."""
    console = Console(stderr=to_stderr)
    text = as_text(manifest)
    console.print(
        Markdown(text) if console.is_terminal else text,
        highlight=False,
        soft_wrap=not console.is_terminal,
    )
    console.print(
        f"Train on it: paceline train --data shards:{out}",
        highlight=False,
        soft_wrap=True,
        markup=False,
    )
