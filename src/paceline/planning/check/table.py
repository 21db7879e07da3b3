"""Split a table that was measured elsewhere by the number of workers: fit on few, predict the rest.

Computing is fitted to the rows with one worker. The rows with two workers give the time per byte:
of the links between hosts where the two are on two hosts, inside a host where they are on one. The
latency is given, because two workers tell one sum of both. Nothing is fitted to the other rows.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.errors import BadRequest
from paceline.planning.answer import built
from paceline.planning.cluster import Cluster
from paceline.planning.measurements import Row
from paceline.planning.predict import Setting, predict
from paceline.planning.profile import Profile
from paceline.planning.workers import worker_of

FITTED_UP_TO = 2  # workers
LEAST, MOST = 1e-13, 1e-3  # seconds per byte: 80 Tbit/s to 8 kbit/s
HALVINGS = 40


@dataclass(frozen=True)
class RowCheck:
    """A row of the table beside its prediction."""

    row: Row
    predicted_s: float
    low_s: float
    high_s: float

    @property
    def error(self) -> float:
        """By which share the predicted step is too long."""
        return self.predicted_s / self.row.step_s - 1

    @property
    def covered(self) -> bool:
        return self.low_s <= self.row.step_s <= self.high_s


@dataclass(frozen=True)
class TableCheck:
    """All rows that were not used for the fit, and what was fitted."""

    strategy: str
    cluster: Cluster
    rows: tuple[RowCheck, ...]

    @property
    def median(self) -> float:
        return statistics.median(abs(each.error) for each in self.rows)

    @property
    def largest(self) -> float:
        return max(abs(each.error) for each in self.rows)

    def described(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "schema": 1,
            "strategy": self.strategy,
            "fitted_up_to_workers": FITTED_UP_TO,
            "between": vars(self.cluster.between),
            "inside": vars(self.cluster.inside),
            "rows": [
                {
                    **vars(each.row),
                    "predicted_s": each.predicted_s,
                    "low_s": each.low_s,
                    "high_s": each.high_s,
                    "error": each.error,
                    "covered": each.covered,
                }
                for each in self.rows
            ],
            "median_error": self.median,
            "largest_error": self.largest,
        }


def check_table(profile: Profile, strategy: str, cluster: Cluster, seed: int = 0) -> TableCheck:
    """Fit on the rows with one and two workers, and predict the others."""
    few = [row for row in profile.measurements if row.workers <= FITTED_UP_TO]
    rest = [row for row in profile.measurements if row.workers > FITTED_UP_TO]
    if not rest:
        raise BadRequest(
            f"the table has no row with more than {FITTED_UP_TO} workers: there is nothing to"
            " compare predictions with"
        )

    def step_s(row: Row, on: Cluster) -> tuple[float, float, float]:
        worker, _ = worker_of(profile)(row.batch_size, "none")
        made = built(strategy)
        servers = 1 if made.traits.serves == "ranks" else 0
        placed = replace(on, per_host=-(-row.workers // row.hosts))
        said = predict(Setting(made, "none", row.workers, servers), worker, placed, seed)
        return said.step_s, said.low_s, said.high_s

    apart = [row for row in few if row.hosts == 2]
    beside = [row for row in few if row.hosts == 1]
    if apart:
        cluster = _fitted(cluster, "between", apart, step_s)
    elif any(row.hosts > 1 for row in rest):
        raise BadRequest(
            "the table has no row with 2 workers on 2 hosts: the links between hosts cannot be"
            " fitted"
        )
    if beside:
        cluster = _fitted(cluster, "inside", beside, step_s)
    elif any(row.hosts < row.workers for row in rest):
        raise BadRequest(
            "the table has no row with 2 workers on 1 host: the links inside a host cannot be"
            " fitted"
        )
    return TableCheck(
        strategy, cluster, tuple(RowCheck(row, *step_s(row, cluster)) for row in rest)
    )


def _fitted(
    cluster: Cluster,
    which: str,
    rows: Sequence[Row],
    step_s: Callable[[Row, Cluster], tuple[float, float, float]],
) -> Cluster:
    """The cluster whose links make the predictions of these rows right on average, by bisection."""

    def with_(s_per_byte: float) -> Cluster:
        return replace(cluster, **{which: replace(getattr(cluster, which), s_per_byte=s_per_byte)})

    def too_long(s_per_byte: float) -> bool:
        on = with_(s_per_byte)
        return math.fsum(math.log(step_s(row, on)[0] / row.step_s) for row in rows) > 0

    low, high = LEAST, MOST
    if too_long(low):  # two workers were as fast as one
        return with_(low)
    for _ in range(HALVINGS):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if too_long(middle) else (middle, high)
    return with_(math.sqrt(low * high))
