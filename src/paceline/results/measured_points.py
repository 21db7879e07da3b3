"""Measured speeds as points for the page of a plan: of a study, of runs, or of a check."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from paceline.errors import BadRequest
from paceline.planning.check.ledger import Ledger
from paceline.planning.check.whole import outcome
from paceline.planning.cluster import PRESETS
from paceline.record.steady import speed_of
from paceline.report.reading import read_study


def measured_points(folder: str, network: str) -> list[dict[str, Any]]:
    """Return strategy, codec, workers and samples per second of every setting in a folder.

    Of a check, those on links of `network`.
    """
    ledger = Ledger(Path(folder))
    if ledger.exists:
        rows = outcome(ledger).rows
        here = [row for row in rows if row.case.network == PRESETS.get(network, network)]
        if not here:
            there = ", ".join(sorted({row.case.network for row in rows}))
            raise BadRequest(f"{folder} was measured on links of {there}, not of {network}")
        return [
            _point(row.case.strategy, row.case.codec, row.case.workers, row.measured, folder)
            for row in here
        ]
    found = []
    for line in read_study(folder).lines:
        speeds = line.values(speed_of)
        if speeds:
            config = line.completed[0].record["config"]
            codec = str(config.get("codec") or "none")
            speed = statistics.median(speeds)
            found.append(_point(line.strategy, codec, line.workers, speed, folder))
    return found


def _point(strategy: str, codec: str, workers: int, speed: float, where: str) -> dict[str, Any]:
    return {
        "strategy": strategy,
        "codec": codec,
        "workers": workers,
        "samples_per_s": speed,
        "from": Path(where).name,
    }
