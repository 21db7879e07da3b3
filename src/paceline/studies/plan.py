"""The runs of a study and their order: one round per seed, every setting once in each round."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.data.base import Stream
from paceline.errors import BadRequest
from paceline.request.config import Config
from paceline.request.prepare import prepare
from paceline.studies.grid import Setting, StudySpec
from paceline.studies.points import alone


@dataclass(frozen=True)
class PlannedRun:
    """One setting with one seed."""

    setting: Setting
    seed: int

    @property
    def name(self) -> str:
        return f"{self.setting.slug}-s{self.seed}"


def rounds_of(spec: StudySpec) -> list[list[PlannedRun]]:
    """Return one round per seed.

    Each round has its own random order. The order depends on the seed alone, so a study that is
    started again continues in the same order.
    """
    rounds = []
    for seed in spec.seeds:
        planned = [PlannedRun(setting, seed) for setting in spec.settings()]
        random.Random(f"order {seed}").shuffle(planned)
        rounds.append(planned)
    return rounds


def runs_of(spec: StudySpec) -> list[dict[str, Any]]:
    """Return the runs as `study.json` lists them, in the order of the grid."""
    return [
        {
            "name": PlannedRun(setting, seed).name,
            "label": setting.label,
            "workers": setting.workers,
            "seed": seed,
            "varied": setting.varied,
            "options": {k: str(v) for k, v in setting.options.items()},
        }
        for setting in spec.settings()
        for seed in spec.seeds
    ]


def scaled(options: dict[str, Any], spec: StudySpec) -> dict[str, Any]:
    """Return a run's options with the amount of work that the study's scaling asks for.

    Strong scaling changes nothing. With weak scaling each worker gets the batch size and the number
    of steps of the serial run.
    """
    if spec.scaling == "strong":
        return options
    serial = prepare(Config.make({**alone(options), "threads": 1}), lambda c: Path("."))
    if isinstance(serial.data.train, Stream):
        raise BadRequest(
            'scaling = "weak" needs the number of training samples, which a stream does not tell:'
            ' use scaling = "strong" with `steps`'
        )
    per_epoch = -(-len(serial.data.train) // serial.batch_sizes[0])
    steps = min(s for s in (serial.steps, (serial.epochs or 1) * per_epoch) if s is not None)
    kept = {k: v for k, v in options.items() if k not in ("global_batch_size", "epochs", "steps")}
    return {
        **kept,
        "batch_size": options.get("batch_size", serial.batch_sizes[0]),
        "steps": steps,
        "epochs": None,
    }
