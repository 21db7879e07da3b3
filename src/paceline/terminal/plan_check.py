"""Shows how far predictions were off: of runs on a testbed, or of a table measured elsewhere."""

from __future__ import annotations

import statistics
import sys

from rich.console import Console
from rich.table import Table

from paceline.planning.check.compare import Errors, Outcome, errors_of
from paceline.planning.check.table import TableCheck


def show_outcome(found: Outcome) -> None:
    """Print links, settings and errors."""
    console = Console(width=None if sys.stdout.isatty() else 100)
    for link in found.links:
        print(
            f"link {link.network}, alone: {1e3 * link.link.latency_s:.3g} ms and"
            f" {8e-6 / link.link.s_per_byte:,.4g} Mbit/s; messages of"
            f" {link.points[0][0]:,} to {link.points[-1][0]:,} bytes within"
            f" {100 * link.worst:.0f}% of that"
        )
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("setting", overflow="fold")
    for name in ("predicted", "95% interval", "measured", "spread", "error"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in found.rows:
        table.add_row(
            row.case.name + (" *" if row.told.shares_cores else ""),
            f"{row.told.samples_per_s:,.0f}",
            f"{row.told.low:,.0f} to {row.told.high:,.0f}",
            f"{row.measured:,.0f}",
            f"{100 * row.spread:.0f}%",
            f"{100 * row.error:+.1f}%",
        )
    print()
    console.print(table)
    print("\nSamples per second. The predictions were written before anything was measured.")
    for sentence in outcome_sentences(found):
        print(sentence)


def outcome_sentences(found: Outcome) -> list[str]:
    told = []
    if (apart := errors_of(found.apart)) is not None:
        told.append(f"Workers with cores of their own: {_errors(apart)}")
    if (sharing := errors_of(found.sharing)) is not None:
        shares = [row.told.moving_share for row in found.sharing]
        told.append(
            f"* Moving the bytes takes {100 * statistics.median(shares):.0f}% of this machine's"
            f" cores (median), which the workers share: {_errors(sharing)}"
        )
    return told


def _errors(errors: Errors) -> str:
    return (
        f"{errors.count} settings, median error {100 * errors.median:.1f}%, ninetieth percentile"
        f" {100 * errors.ninetieth:.1f}%; {errors.covered} of {errors.count} intervals hold the"
        f" measured speed (half-width {100 * errors.half_width:.0f}%)."
    )


def show_table(found: TableCheck) -> None:
    """Print the rows of a table beside their predictions."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in (
        "workers",
        "hosts",
        "batch",
        "measured step",
        "predicted",
        "95% interval",
        "error",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for each in found.rows:
        row = each.row
        table.add_row(
            str(row.workers),
            str(row.hosts),
            str(row.batch_size),
            f"{1e3 * row.step_s:,.4g} ms",
            f"{1e3 * each.predicted_s:,.4g} ms",
            f"{1e3 * each.low_s:,.4g} to {1e3 * each.high_s:,.4g}",
            f"{100 * each.error:+.1f}%",
        )
    Console(width=None if sys.stdout.isatty() else 100).print(table)
    covered = sum(each.covered for each in found.rows)
    print(
        f"\n{found.strategy}, fitted to the rows with 1 and 2 workers: links of"
        f" {8e-9 / found.cluster.between.s_per_byte:,.3g} Gbit/s between hosts and"
        f" {8e-9 / found.cluster.inside.s_per_byte:,.3g} Gbit/s inside a host."
    )
    print(
        f"{len(found.rows)} rows predicted: median error {100 * found.median:.1f}%, largest"
        f" {100 * found.largest:.1f}%; {covered} of {len(found.rows)} intervals hold the measured"
        " step."
    )
