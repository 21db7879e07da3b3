"""The section "Resources": what the workers and the servers of each setting used."""

from __future__ import annotations

import html

from paceline.report.containers import MEANING as CONTAINERS
from paceline.report.containers import OF_CONTAINERS, container_table
from paceline.report.lines import Study
from paceline.report.page.markup import breakable, prose, table
from paceline.report.resources import USED, resource_table, why_no_network, without_messages
from paceline.report.score import score_of
from paceline.report.splits import MEANING as SPLIT
from paceline.report.splits import split_table
from paceline.report.splits import told as bubbles
from paceline.report.tables import Row
from paceline.report.words import listed, percent, seconds, size

BYTES = tuple(name for name in USED if name.endswith("_bytes"))
MEANING = (
    "Each row is the mean of one worker, or of one server, over the runs. 100% of CPU is one core."
    " Bytes over the network and through memory are those of the training phase; CPU, memory and"
    " disk are those of the whole run."
)


def resources_section(study: Study) -> str:
    """Return the table of resources, one row per setting and role, and what it leaves out."""
    rows = resource_table(study)
    if not rows:
        return ""
    score = score_of(study)
    reaches = study.target is not None
    head = ["setting", "workers", "mean of", "CPU", "memory<br>RSS", "memory<br>PSS"]
    for what in ("network", "disk", "through<br>memory"):
        head += [f"{what}<br>in", f"{what}<br>out"]
    head += [f"time to<br>{100 * (study.target or 0):g}%"] if reaches else []
    head += [html.escape(score.name)] if not score.is_accuracy else []
    head += ["accuracy"] if any(r["accuracy"] is not None for r in rows) else []
    cells = [_cells(row, head, reaches, not score.is_accuracy) for row in rows]
    notes = "".join(f"<p class=note>{prose(note)}</p>" for note in _notes(study))
    return (
        f'<section id="resources"><h2>Resources</h2><p class=note>{prose(MEANING)}</p>'
        f"{table(head, cells)}{notes}{_splits(study)}{_containers(study)}</section>"
    )


def _containers(study: Study) -> str:
    """Return the table of the ranks' containers; nothing where they ran in none."""
    rows = container_table(study)
    if not rows:
        return ""
    head = ["setting", "rank", "container", "CPU", "memory", "peak"]
    for what in ("network", "block I/O"):
        head += [f"{what}<br>in", f"{what}<br>out"]
    cells = [
        [
            breakable(row["setting"]),
            f"{row['role']} {row['rank']}",
            html.escape(row["host"]),
            seconds(row["cpu_s"]) if row["cpu_s"] is not None else "–",
            *(size(row[key]) for key in OF_CONTAINERS),
        ]
        for row in rows
    ]
    return (
        f'<h3 id="containers">Containers</h3><p class=note>{prose(CONTAINERS)}</p>'
        f"{table(head, cells)}"
    )


def _splits(study: Study) -> str:
    """Return the table of the workers of split models; nothing where all models were whole."""
    rows = split_table(study)
    if not rows:
        return ""
    head = ["setting", "worker", "parameters", "activations<br>a step", "gradients<br>a step"]
    head += ["memory", "bubble", "bubble<br>in theory"]
    cells = [
        [
            breakable(row["setting"]),
            f"{row['rank']} of {row['workers']}",
            f"{row['parameters'] or 0:,.0f}",
            size(row["activation_bytes"]),
            size(row["gradient_bytes"]),
            size(row["rss_peak_bytes"]),
            *bubbles(row),
        ]
        for row in rows
    ]
    return (
        f'<h3 id="split-models">Split models</h3><p class=note>{prose(SPLIT)}</p>'
        f"{table(head, cells)}"
    )


def _cells(row: Row, head: list[str], reaches: bool, has_metric: bool) -> list[str]:
    server = row["role"] == "server"
    used = [size(row[key]) for key in BYTES]
    cells = [
        breakable(row["setting"]),
        str(row["workers"]),
        f"{row['ranks']} {row['role']}{'s' * (row['ranks'] > 1)}",
        "–" if row["cpu_percent"] is None else f"{row['cpu_percent']:.0f}%",
        *used,
    ]
    if server:  # the time and the accuracy are the run's: they stand in the row of its workers
        return cells + [""] * (len(head) - len(cells))
    if reaches:
        cells.append(_time_to(row))
    if has_metric:
        cells.append("–" if row["metric"] is None else f"{row['metric']:.4g}")
    return cells + ([percent(row["accuracy"])] if len(cells) < len(head) else [])


def _time_to(row: Row) -> str:
    if row["time_to_accuracy_s"] is not None:
        return seconds(row["time_to_accuracy_s"])
    if row["reached"]:
        return f"in {row['reached']} of {row['runs']} runs"
    return "not reached"


def _notes(study: Study) -> list[str]:
    notes = [why] if (why := why_no_network(study)) else []
    if silent := without_messages(study):
        notes.append(
            f"{listed(silent)} sent no message during the steps: such workers average after the"
            " last step, or write to one copy of the weights in shared memory."
        )
    notes.append(
        "RSS counts the pages that workers share once for each of them; PSS divides them among the"
        " workers."
    )
    notes.append("One row per worker and server of each run is in `workers.csv`.")
    return notes
