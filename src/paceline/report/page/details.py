"""The end of the page: all results, and what is needed to repeat the study."""

from __future__ import annotations

import html

from paceline.report.columns import bytes_heading, measured
from paceline.report.command import study_command
from paceline.report.lines import Line, Spread, Study
from paceline.report.page.markup import breakable, command_box, definitions, folded_json, table
from paceline.report.page.summary import has_accuracy_beside, score_cell, workers_cell
from paceline.report.score import score_of
from paceline.report.simulated import about_simulated
from paceline.report.words import entries, size, with_range


def all_results(study: Study) -> str:
    """Return one row per setting and number of workers."""
    head = ["setting", "workers", "threads", "runs", "training", "samples/s", "own<br>speedup"]
    head += ["against<br>serial", "efficiency", f"test<br>{html.escape(score_of(study).name)}"]
    head += ["test<br>accuracy"] if has_accuracy_beside(study) else []
    head += [bytes_heading(study)]
    rows = [_row(study, line) for line in study.lines]
    note = (
        "<p class=note>CPU, memory, network and disk are in <a href='#resources'>Resources</a>. One"
        " row per run is in <code>results.csv</code>, one per worker and server of each run in"
        " <code>workers.csv</code>.</p>"
    )
    return f'<section id="results"><h2>All results</h2>{table(head, rows)}{note}</section>'


def _row(study: Study, line: Line) -> list[str]:
    if not line.completed:
        return [breakable(line.label), html.escape(str(line.workers)), "", "0", "failed"]
    found = measured(study, line)
    row = [
        breakable(line.label),
        workers_cell(line),
        str(line.threads),
        str(len(line.completed)),
        with_range(found["train_s"], ".2f", 1, " s"),
        _mean(found["samples_per_s"], ",.0f"),
        _mean(found["speedup"], ".2f", 1, "x"),
        _mean(found["speedup_serial"], ".2f", 1, "x"),
        _mean(found["efficiency"], ".0f", 100, "%"),
        score_cell(study, line),
    ]
    if has_accuracy_beside(study):
        row.append(with_range(found["accuracy"], ".2f", 100, "%"))
    sent = found["sent_bytes"]
    return [*row, size(sent.mean if sent else None)]


def _mean(spread: Spread | None, form: str, scale: float = 1.0, unit: str = "") -> str:
    return "–" if spread is None else f"{spread.mean * scale:{form}}{unit}"


def configuration(study: Study) -> str:
    """Return the machine, what was equal for all runs, and the options."""
    first = study.runs[0].record
    shown = {k: v for k, v in first["environment"].items() if k != "command"}
    machine = {k: entries(v) for k, v in shown.items() if v not in (None, "")}
    parts = ['<section id="repeat"><h2>How to repeat it</h2>']
    if said := study_command(study):
        parts.append(f'<div id="again">{command_box(said)}</div>')
    parts.append(definitions(machine))
    if said := about_simulated(study):
        parts.append(f"<p class=note>{html.escape(said)}</p>")
    if study.definition:
        parts += [_fairness(study), folded_json("the study", study.definition)]
        if chosen := study.about.get("memory_format"):
            formats = ", ".join(f"{v} for {k}" for k, v in chosen.items())
            parts.append(
                "<p class=note>The memory format was measured once and used for all runs:"
                f" {html.escape(formats)}.</p>"
            )
    parts.append(folded_json("the resolved configuration of the first run", first["config"]))
    if first.get("machine"):
        parts.append(folded_json("what the container used during the first run", first["machine"]))
    return "".join([*parts, "</section>"])


def _fairness(study: Study) -> str:
    base, axes = study.definition.get("base", {}), study.definition.get("axes", {})
    if study.definition.get("scaling") == "weak":
        work = "Each worker has the same batch and the same number of steps (weak scaling)."
    else:
        own_batch = "batch_size" in base or "batch_size" in axes
        batch = "the same batch for every worker" if own_batch else "the same global batch"
        work = f"Every number of workers has {batch} and the same samples (strong scaling)."
    return (
        "<p>All runs share the model, the data, the initial weights (by seed), the memory format"
        f" and the evaluation. {work} Every worker has one thread. The runs were made in random"
        " order, seed by seed. The training time leaves out start-up, loading and evaluation.</p>"
    )
