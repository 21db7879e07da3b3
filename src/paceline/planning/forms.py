"""Predict models that are split over workers: the form's own code, in virtual time.

A table of step times says nothing about the layers of a model. So a few steps are run on the
transport `emulated`: all workers as threads of this process, one at a time, each with the processor
time of its own computing, and messages that cost what the described network says.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from pathlib import Path
from typing import Any

from paceline.errors import BadRequest
from paceline.launch.run import run
from paceline.planning.predict import UNSEEN, Prediction
from paceline.planning.profile import Profile
from paceline.record.steady import speed_of
from paceline.request.config import Config
from paceline.request.prepare import prepare

MOST_WORKERS = 16  # as threads of one process
STEPS, RUNS = 16, 2


def predict_form(
    form: str, workers: int, batch_size: int, profile: Profile, network: str, more: dict[str, Any]
) -> Prediction:
    """Predict a form with `batch_size` samples per worker in a step, all workers in one copy."""
    if not 2 <= workers <= MOST_WORKERS:
        raise BadRequest(f"split models are predicted with 2 to {MOST_WORKERS} workers")
    if profile.source != "measured" or profile.model.name in ("own", "unknown"):
        raise BadRequest(
            "split models are predicted by running the model: profile a built-in one, by paceline"
            " profile --model"
        )
    records = [
        _run(form, workers, batch_size, profile, network, more, seed) for seed in range(RUNS)
    ]
    samples = workers * batch_size
    logs = [math.log(samples / speed_of(record)) for record in records]
    middle = statistics.fmean(logs)
    deviation = math.hypot(statistics.stdev(logs), UNSEEN)
    ranks = records[0]["workers"]
    return Prediction(
        workers,
        batch_size,
        math.exp(middle),
        math.exp(middle - 1.96 * deviation),
        math.exp(middle + 1.96 * deviation),
        statistics.fmean(w["compute_s"] / w["steps"] for w in ranks),
        sum((w["payload_sent_bytes"] or 0) / w["steps"] for w in ranks),
        0.0,
        0.0,
        workers,
    )


def _run(
    form: str,
    workers: int,
    batch_size: int,
    profile: Profile,
    network: str,
    more: dict[str, Any],
    seed: int,
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="paceline-plan-") as temporary:
        out = Path(temporary) / "run"
        options = {
            **more,
            "model": profile.model.name,
            "data": profile.data,
            "parallel": form,
            "workers": workers,
            "global_batch_size": workers * batch_size,
            "transport": "emulated",
            "network": network,
            "steps": STEPS,
            "epochs": 10_000,
            "evaluate_every": str(1 << 30),
            "evaluate_samples": 1,
            "threads": 1,
            "seed": seed,
            "out": str(out),
        }
        job = prepare(Config.make(options), lambda _: out)
        return run(job, lambda kind, content: None, clean=True)
