"""Shows a plan: a table, and the answer in words."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table

from paceline.planning.answer import Plan, Row

LOST = {
    "latency": "the latency of the network",
    "bandwidth": "the limit of the bandwidth",
    "waiting": "waiting for slower workers",
    "coding": "encoding and adding",
}
MOST_ROWS = 24  # of a table, unless all are asked for


def show_plan(found: Plan, network: str, whole: bool, model: str) -> None:
    """Print the table and the sentences."""
    console = Console(width=None if sys.stdout.isatty() else 100)
    rows = sorted(found.rows, key=_sooner if found.soonest else _faster)
    console.print(_table(rows if whole else rows[:MOST_ROWS], found))
    if len(rows) > MOST_ROWS and not whole:
        print(f"{len(rows) - MOST_ROWS} slower settings are left out: show them by --all")
    print()
    for sentence in sentences(found, network, model):
        print(sentence)


def _faster(row: Row) -> float:
    return -row.prediction.samples_per_s


def _sooner(row: Row) -> float:
    return row.seconds[0] if row.seconds else float("inf")


def _table(rows: list[Row], found: Plan) -> Table:
    priced, timed = found.cheapest is not None, found.soonest is not None
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("strategy, codec", overflow="fold")
    names = ["workers", "samples/s", "95% interval", "speedup"]
    names += [f"seconds to {found.accuracy:g}"] if timed else []
    for name in (*names, *(("price",) if priced else ())):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        p = row.prediction
        table.add_row(
            row.name,
            str(row.workers),
            f"{p.samples_per_s:,.0f}",
            f"{p.low:,.0f} to {p.high:,.0f}",
            f"{row.speedup:.2f}x",
            *((f"{row.seconds[0]:,.1f}" if row.seconds else "?",) if timed else ()),
            *((f"{row.price:.4g}",) if row.price is not None else ()),
        )
    return table


def sentences(found: Plan, network: str, model: str) -> list[str]:
    """The answer in words."""
    best = found.fastest
    told = [
        f"Predicted for {model} on {network}: the fastest is {_told(best)},"
        f" {best.prediction.samples_per_s:,.0f} samples/s"
        f" ({best.prediction.low:,.0f} to {best.prediction.high:,.0f}),"
        f" {best.speedup:.2f}x one worker."
    ]
    if found.limits:
        told.append(_limit(found.limits))
    told += _of_accuracy(found)
    if found.knee is not None:
        told.append(
            f"Beyond {_counted(found.knee)}, an added worker of {best.name} adds less than half of"
            " one worker's speed."
        )
    if found.cheapest is not None:
        told.append(
            f"The cheapest is {_told(found.cheapest)}: {found.cheapest.price:.4g} per million"
            " samples."
        )
    for (strategy, codec), rate in found.pays.items():
        told.append(_pays(strategy, codec, rate, best.workers))
    told += [f"note: {notice}" for notice in dict.fromkeys(found.notices)]
    told += [f"left out: {reason}" for reason in found.refused[:4]]
    told.append(
        "Steps to the accuracy were counted on one machine: paceline study confirms them."
        if found.soonest
        else "A plan predicts speed. How many steps an accuracy takes depends on the batch and the"
        " strategy: paceline profile --accuracy counts them; measure it by paceline study."
    )
    return told


def _limit(limits: dict[str, float]) -> str:
    lost = {name: share for name, share in limits.items() if name != "computing"}
    worst = max(lost, key=lambda name: lost[name])
    limit = f"Computing takes {100 * limits['computing']:.0f}% of its step"
    if lost[worst] < 0.01:
        return f"{limit}; nothing else limits it."
    return f"{limit}; without {LOST[worst]} a step would be {100 * lost[worst]:.0f}% shorter."


def _of_accuracy(found: Plan) -> list[str]:
    """The time and the money to the accuracy, where the steps to it are known."""
    soonest = found.soonest
    if soonest is None or soonest.seconds is None:
        return []
    seconds, low, high = soonest.seconds
    told = [
        f"It reaches an accuracy of {found.accuracy:g} first with {_told(soonest)}: after"
        f" {seconds:,.0f} s ({low:,.0f} to {high:,.0f})."
    ]
    cheapest = found.cheapest_to_accuracy
    if cheapest is not None and cheapest.seconds is not None:
        told.append(
            f"The cheapest way to it is {_told(cheapest)}: {cheapest.price_to_accuracy:.4g}, after"
            f" {cheapest.seconds[0]:,.0f} s."
        )
    unknown = sum(row.seconds is None for row in found.rows)
    if unknown:
        told.append(
            f"For {unknown} of {len(found.rows)} settings the steps to it are not known:"
            " paceline profile --accuracy ... --follow STRATEGY counts them."
        )
    return told


def _told(row: Row) -> str:
    return f"{row.name} with {_counted(row.workers)}" if row.workers > 1 else "one worker alone"


def _counted(workers: int) -> str:
    return "one worker" if workers == 1 else f"{workers} workers"


def _pays(strategy: str, codec: str, rate: float | None, workers: int) -> str:
    where = f"{strategy} with {workers} workers"
    if rate is None:
        return f"Codec {codec} does not make {where} 1% faster at any bandwidth."
    if rate == float("inf"):
        return f"Codec {codec} pays for {where} at any bandwidth."
    unit, scale = ("Gbit/s", 1e9) if rate >= 1e9 else ("Mbit/s", 1e6)
    return f"Codec {codec} pays for {where} below {rate / scale:.3g} {unit}."
