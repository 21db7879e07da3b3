"""How far predictions were off."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.planning.check.cases import Case, Foretold, Seen
from paceline.planning.check.links import LinkFound


@dataclass(frozen=True)
class Compared:
    """One setting: predicted, and measured several times."""

    case: Case
    told: Foretold
    seen: tuple[Seen, ...]

    @property
    def measured(self) -> float:
        """Samples per second, the median of the runs."""
        return statistics.median(each.samples_per_s for each in self.seen)

    @property
    def error(self) -> float:
        """By which share the prediction is too high."""
        return self.told.samples_per_s / self.measured - 1

    @property
    def spread(self) -> float:
        """Of the runs, from the slowest to the fastest, as a share of their median."""
        speeds = [each.samples_per_s for each in self.seen]
        return (max(speeds) - min(speeds)) / self.measured

    @property
    def covered(self) -> bool:
        return self.told.low <= self.measured <= self.told.high

    @property
    def half_width(self) -> float:
        return (self.told.high - self.told.low) / 2 / self.told.samples_per_s


@dataclass(frozen=True)
class Errors:
    """Of several settings."""

    count: int
    median: float
    ninetieth: float  # percentile
    largest: float
    covered: int
    half_width: float  # the median


def errors_of(rows: Sequence[Compared]) -> Errors | None:
    if not rows:
        return None
    sizes = sorted(abs(row.error) for row in rows)
    at = 0.9 * (len(sizes) - 1)
    low = int(at)
    high = min(low + 1, len(sizes) - 1)
    return Errors(
        len(rows),
        statistics.median(sizes),
        sizes[low] + (at - low) * (sizes[high] - sizes[low]),
        sizes[-1],
        sum(row.covered for row in rows),
        statistics.median(row.half_width for row in rows),
    )


@dataclass(frozen=True)
class Outcome:
    """A whole check."""

    rows: tuple[Compared, ...]
    links: tuple[LinkFound, ...]

    @property
    def apart(self) -> list[Compared]:
        """Settings whose workers have the cores to themselves, as far as moving bytes goes."""
        return [row for row in self.rows if not row.told.shares_cores]

    @property
    def sharing(self) -> list[Compared]:
        return [row for row in self.rows if row.told.shares_cores]

    def described(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "schema": 1,
            "links": [
                {
                    "network": link.network,
                    "latency_s": link.link.latency_s,
                    "s_per_byte": link.link.s_per_byte,
                    "burst_bytes": link.link.burst_bytes,
                    "message_bytes": link.link.message_bytes,
                    "points": [
                        {"bytes": size, "measured_s": s, "predicted_s": link.predicted_s(size)}
                        for size, s in link.points
                    ],
                }
                for link in self.links
            ],
            "rows": [
                {
                    "strategy": row.case.strategy,
                    "codec": row.case.codec,
                    "workers": row.case.workers,
                    "network": row.case.network,
                    "model": row.case.model,
                    "batch_size": row.case.batch_size,
                    "predicted_samples_per_s": row.told.samples_per_s,
                    "predicted_low": row.told.low,
                    "predicted_high": row.told.high,
                    "measured_samples_per_s": [each.samples_per_s for each in row.seen],
                    "error": row.error,
                    "covered": row.covered,
                    "moving_share": row.told.moving_share,
                    "cpu_share": statistics.median(each.cpu_share for each in row.seen),
                }
                for row in self.rows
            ],
            "synthetic": _plain(errors_of(self.apart)),
            "shared_cores": _plain(errors_of(self.sharing)),
        }


def _plain(errors: Errors | None) -> dict[str, Any] | None:
    return None if errors is None else dict(vars(errors))
