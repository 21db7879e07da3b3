"""Estimate how long a study takes, from a short serial run of each model on each data set.

The estimate assumes that P workers are P times as fast up to the number of cores, and that further
workers do not help.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.common.cores import cores
from paceline.data.base import Stream
from paceline.errors import PacelineError
from paceline.launch.run import run
from paceline.request.config import Config
from paceline.request.prepare import prepare
from paceline.studies.grid import Setting
from paceline.studies.points import alone

TRIAL_STEPS = 15
CALIBRATES = (
    "model",
    "data",
    "data_dir",
    "data_share",
    "batch_size",
    "global_batch_size",
    "optimizer",
    "loss",
    "metric",
    "plugin",
)


@dataclass(frozen=True)
class TrialSpeed:
    """The speed of a short serial run."""

    samples_per_s: float
    start_s: float  # before the first step and after the last
    samples: int  # in one epoch
    batch: int


class Estimator:
    """Estimates runs; it tries out each model on each data set once."""

    def __init__(self) -> None:
        self._speeds: dict[str, TrialSpeed | None] = {}

    def seconds(self, setting: Setting) -> float | None:
        """Return the time of one run; None where the trial failed (the run then says why)."""
        options = setting.options
        trial = {k: v for k, v in alone(options).items() if k in CALIBRATES}
        key = repr(sorted((k, str(v)) for k, v in trial.items()))
        if key not in self._speeds:
            self._speeds[key] = _try_out(trial)
        speed = self._speeds[key]
        if speed is None:
            return None
        threads = options.get("threads", 1)
        helping = cores() if threads == "auto" else min(setting.workers * int(threads), cores())
        samples: float = speed.samples * int(options.get("epochs") or 1)
        if options.get("steps"):
            batch = speed.batch * (1 if options.get("global_batch_size") else setting.workers)
            by_steps = int(options["steps"]) * batch
            samples = min(samples, by_steps) if options.get("epochs") else by_steps
        return speed.start_s + samples / (speed.samples_per_s * helping)


def _try_out(options: dict[str, Any]) -> TrialSpeed | None:
    with tempfile.TemporaryDirectory(prefix="paceline-estimate-") as folder:
        config = {
            **options,
            "steps": TRIAL_STEPS,
            "threads": 1,
            "memory_format": "contiguous",
            "out": f"{folder}/trial",
        }
        began = time.perf_counter()
        try:
            job = prepare(Config.make(config), lambda c: Path(folder))
            result = run(job, lambda kind, content: None, clean=True)["result"]
        except PacelineError:
            return None
        samples = 0 if isinstance(job.data.train, Stream) else len(job.data.train)
        return TrialSpeed(
            result["samples_per_s"],
            time.perf_counter() - began - result["train_s"],
            samples,
            job.batch_sizes[0],
        )
