"""The tables of a report: the settings against serial, and what they used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from paceline.report.answer import best_lines
from paceline.report.columns import measured
from paceline.report.containers import MEANING, OF_CONTAINERS, container_table
from paceline.report.document.inline import Text, code, over, plain, prose, strong
from paceline.report.judge import serial_speedup, speed
from paceline.report.lines import INSECURE, Line, Spread, Study
from paceline.report.resources import resource_table, why_no_network, without_messages
from paceline.report.score import score_of
from paceline.report.splits import MEANING as SPLIT
from paceline.report.splits import split_table
from paceline.report.splits import told as bubbles
from paceline.report.tables import Row
from paceline.report.words import count, listed, percent, seconds, size, times, with_range

NONE = "–"
TEXT, NUMBER = "text", "number"
Cells = Sequence[tuple[str, str, Text]]  # (heading, kind, cell) of one row


@dataclass(frozen=True)
class Table:
    """Rows of cells under a heading each, with a caption above and notes below."""

    title: str  # of its section
    caption: Text
    head: list[str]
    kinds: list[str]  # of each column: text or number
    rows: list[list[Text]]
    notes: list[Text] = field(default_factory=list)
    wide: bool = False  # needs the long side of the paper


def main_table(study: Study) -> Table:
    """Return each setting at its best number of workers; all settings where one has no time."""
    lines = best_lines(study) or [x for x in study.lines if x.completed]
    several = len(study.lines) > len(lines) > 1
    confirmed = ", or as it was confirmed" if study.confirmed else ""
    shown = f", each at its best number of workers{confirmed}" if several else ""
    return _settings(study, lines, "Result", _about(study, lines, shown))


def all_settings(study: Study) -> Table | None:
    """Return every setting with every number of workers; None where the main table has them."""
    if len(study.lines) <= len(best_lines(study)):
        return None
    about = _about(study, study.lines, ", with every number of workers")
    return _settings(study, study.lines, "All settings", about)


def _about(study: Study, lines: Sequence[Line], shown: str) -> str:
    if len(lines) == 1:
        return "The result and the costs of the run." if len(study.runs) == 1 else "The result."
    against = any(serial_speedup(study, x) for x in lines)
    speed_of = "Speed against serial, " if against else "Training time, "
    return f"{speed_of}{score_of(study).name} and costs of the settings{shown}."


def _settings(study: Study, lines: Sequence[Line], title: str, caption: str) -> Table:
    rows = [_cells(study, line) for line in lines]
    return _table(title, caption, rows, _notes(study, lines))


def _table(
    title: str, caption: str, rows: Sequence[Cells], notes: Sequence[str], wide: bool = False
) -> Table:
    """Return a table without the columns that no row has a value in."""
    kept = [
        i for i in range(len(rows[0])) if any(row[i][2] not in (plain(NONE), ()) for row in rows)
    ]
    return Table(
        title,
        prose(caption),
        [rows[0][i][0] for i in kept],
        [rows[0][i][1] for i in kept],
        [[row[i][2] for i in kept] for row in rows],
        [prose(note) for note in notes],
        wide,
    )


def _cells(study: Study, line: Line) -> Cells:
    found, score = measured(study, line), score_of(study)
    form, scale, unit = (".2f", 100, "%") if score.is_accuracy else (".4g", 1, "")
    dagger = " †" if line.oversubscribed else ""
    sent = found["sent_bytes"] if line.workers > 1 else None
    cells = [
        ("setting", TEXT, code(line.label)),
        ("workers", NUMBER, plain(f"{line.workers}{dagger}")),
        ("speed against\nserial (95%\ninterval)", TEXT, _speed(study, line)),
        ("pairs", TEXT, _wins(study, line)),
        ("training", NUMBER, plain(_mean(found["train_s"], seconds))),
        (f"test\n{score.name}", NUMBER, _ranged(score.spread(line), form, scale, unit)),
    ]
    if any(serial_speedup(study, x) for x in study.lines):
        cells = [cell for cell in cells if cell[0] != "training"]
    if not score.is_accuracy:
        beside = _ranged(found["accuracy"], ".2f", 100, "%")
        cells.append(("test\naccuracy", NUMBER, beside))
    if study.target is not None:
        cells.append((f"time to\n{100 * study.target:g}%", NUMBER, plain(_time_to(line))))
    return [
        *cells,
        ("epsilon", NUMBER, plain(_mean(found["epsilon"], lambda v: f"{v:.3g}"))),
        ("bytes\nper step", NUMBER, plain(_mean(sent, size))),
        ("CPU of\na worker", NUMBER, plain(_mean(found["cpu_percent"], lambda v: f"{v:.0f}%"))),
        ("memory of\na worker", NUMBER, plain(_mean(found["rss_peak_bytes"], size))),
    ]


def _mean(spread: Spread | None, form: Callable[[float], str]) -> str:
    return NONE if spread is None else form(spread.mean)


def _ranged(spread: Spread | None, form: str, scale: float, unit: str) -> Text:
    """Return the mean over the range of the runs."""
    mean, _, between = with_range(spread, form, scale, unit).partition(" ")
    return over(plain(mean), plain(between)) if between else plain(mean)


def _speed(study: Study, line: Line) -> Text:
    """Return `1.55x (1.38 to 1.74)`, strong where it differs from serial's beyond noise."""
    if not line.completed:
        return plain("failed")
    found, verdict = serial_speedup(study, line), speed(study, line, study.serial(line))
    if found is None or (verdict is None and len(study.lines) == 1):
        return plain(NONE)
    mean = times(found.mean)
    told = strong(mean) if verdict is not None and verdict.differs else plain(mean)
    if verdict is None or verdict.estimate is None:
        return told
    return over(told, plain(f"({found.low:.2f} to {found.high:.2f})"))


def _wins(study: Study, line: Line) -> Text:
    """Return `faster in 9 of 9 blocks`, or that there was one run."""
    verdict = speed(study, line, study.serial(line))
    if verdict is None or verdict.estimate is None:
        return plain(NONE if verdict is None else "one run")
    side = "faster" if verdict.apart < 0 else "slower"
    if not verdict.counted:
        return plain(side)
    return over(plain(f"{side} in"), plain(verdict.counted.removeprefix("in ")))


def _time_to(line: Line) -> str:
    reached, runs = line.reached
    if line.time_to_accuracy is not None:
        return seconds(line.time_to_accuracy.mean)
    return f"in {reached} of {runs} runs" if reached else "not reached" if runs else NONE


def _notes(study: Study, lines: Sequence[Line]) -> list[str]:
    several = any(len(x.completed) > 1 for x in lines)
    notes = []
    if several:
        notes.append("Scores are means over the runs, with the lowest and the highest in brackets.")
    verdicts = [v for x in lines if (v := speed(study, x, study.serial(x))) is not None]
    if any(v.differs for v in verdicts):
        holm = any(v.estimate is not None for v in verdicts)
        corrected = ", corrected by Holm's rule for the number of settings" if holm else ""
        notes.append(f"A speed in bold differs from serial's beyond noise{corrected}.")
    if any(v.counted for v in verdicts):
        notes.append(
            "The pairs are blocks or rounds in which the setting and serial ran on the same work;"
            " the count is of those on the side of the mean."
        )
    if any(x.workers > 1 for x in lines):
        servers = " and servers" if any(x.servers for x in lines) else ""
        notes.append(
            f"Bytes are what all workers{servers} send, divided by the workers' steps."
            " 100% of CPU is one core."
        )
    if any(x.oversubscribed for x in lines):
        cores = count(study.cores, "core")
        notes.append(f"† oversubscribed: more workers and servers than the {cores}.")
    if any(x.insecure for x in lines):
        notes.append(INSECURE)
    if cut := str(study.definition.get("cut") or ""):
        notes.append(f"This study was cut to be quick: {cut.rstrip('.')}.")
    if study.about.get("cut_seeds"):
        notes.append(f"Because of the time budget, {study.about['cut_seeds']} were run.")
    return [" ".join(notes)] if notes else []


# --- resources

USED = (
    ("memory\nRSS", "rss_peak_bytes"),
    ("memory\nPSS", "pss_peak_bytes"),
    ("network\nin", "net_received_bytes"),
    ("network\nout", "net_sent_bytes"),
    ("disk\nin", "disk_read_bytes"),
    ("disk\nout", "disk_write_bytes"),
    ("through\nmemory in", "memory_received_bytes"),
    ("through\nmemory out", "memory_sent_bytes"),
)

CONTAINED = tuple(
    zip(
        ("memory", "peak", "network\nin", "network\nout", "block I/O\nin", "block I/O\nout"),
        OF_CONTAINERS,
        strict=True,
    )
)


def used(study: Study) -> Table:
    """Return what one worker, and one server, of each setting used."""
    notes = [
        "Each row is the mean of one worker, or of one server, over the runs. 100% of CPU is one"
        " core. Bytes over the network and through memory are those of the training phase; CPU,"
        " memory and disk are those of the whole run. RSS counts the pages that workers share once"
        " for each of them; PSS divides them among the workers."
    ]
    if why := why_no_network(study):
        notes.append(why)
    if silent := without_messages(study):
        notes.append(
            f"{listed(silent)} sent no message during the steps: such workers average after the"
            " last step, or write to one copy of the weights in shared memory."
        )
    rows = [_used(study, row) for row in resource_table(study)]
    caption = "CPU, memory, network, disk and shared memory of one worker and of one server."
    return _table("Resources", caption, rows, notes, wide=True)


def containers(study: Study) -> Table | None:
    """Return what the container of each rank used; None where the ranks ran in none."""
    rows = [
        [
            ("setting", TEXT, code(row["setting"])),
            ("rank", TEXT, plain(f"{row['role']} {row['rank']}")),
            ("container", TEXT, plain(row["host"])),
            ("CPU", NUMBER, plain(NONE if row["cpu_s"] is None else seconds(row["cpu_s"]))),
            *((title, NUMBER, plain(size(row[key]))) for title, key in CONTAINED),
        ]
        for row in container_table(study)
    ]
    caption = "CPU, memory, network and block I/O of the container of each rank."
    return _table("Containers", caption, rows, [MEANING], wide=True) if rows else None


def splits(study: Study) -> Table | None:
    """Return what each worker of split models held and sent; None where all models were whole."""
    rows = []
    for row in split_table(study):
        measured, theory = bubbles(row)
        rows.append(
            [
                ("setting", TEXT, code(row["setting"])),
                ("worker", TEXT, plain(f"{row['rank']} of {row['workers']}")),
                ("parameters", NUMBER, plain(f"{row['parameters'] or 0:,.0f}")),
                ("activations\na step", NUMBER, plain(size(row["activation_bytes"]))),
                ("gradients\na step", NUMBER, plain(size(row["gradient_bytes"]))),
                ("memory", NUMBER, plain(size(row["rss_peak_bytes"]))),
                ("bubble", NUMBER, plain(measured)),
                ("bubble\nin theory", NUMBER, plain(theory)),
            ]
        )
    caption = "What each worker of a split model held and sent."
    return _table("Split models", caption, rows, [SPLIT], wide=True) if rows else None


def _used(study: Study, row: Row) -> Cells:
    worker, score = row["role"] == "worker", score_of(study)
    cpu = NONE if row["cpu_percent"] is None else f"{row['cpu_percent']:.0f}%"
    cells = [
        ("setting", TEXT, code(row["setting"])),
        ("workers", NUMBER, plain(str(row["workers"]))),
        ("mean of", TEXT, plain(count(row["ranks"], row["role"]))),
        ("CPU", NUMBER, plain(cpu)),
        *((title, NUMBER, plain(size(row[key]))) for title, key in USED),
    ]
    # the time and the score are the run's: they stand in the row of its workers
    if study.target is not None:
        line = study.line(row["setting"], row["workers"])
        reached = _time_to(line) if line is not None and worker else ""
        cells.append((f"time to\n{100 * study.target:g}%", NUMBER, plain(reached)))
    if not score.is_accuracy:
        told = score.text(row["metric"]) if worker else ""
        cells.append((score.name, NUMBER, plain(told)))
    told = percent(row["accuracy"]) if worker else ""
    return [*cells, ("accuracy", NUMBER, plain(told))]
