"""Count the steps to an accuracy: branched training at two batch sizes, and strategies in virtual
time.

All runs begin from one model that has been trained for some steps. The learning rate grows with the
square root of the batch of all workers.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import nn

from paceline.errors import BadRequest
from paceline.launch.run import run
from paceline.planning.accuracy import APART, Accuracy, Branch, Followed
from paceline.planning.measure.compute import batches_of
from paceline.request.config import Config
from paceline.request.job import Job
from paceline.request.prepare import prepare

COMMON_STEPS = 40  # that all branches have in common
MOST_STEPS = 2000
EVALUATE_EVERY, EVALUATE_SAMPLES = 5, 1000
NOISE_BATCHES = 16
MOST_WORKERS = 32  # as threads, with real gradients

Say = Callable[[str], None]


@dataclass(frozen=True)
class Question:
    """How many steps are to be counted."""

    accuracy: float
    batch_size: int  # of each worker; the other is `APART` times as large
    strategies: Sequence[str] = ()  # each may have a codec: "allreduce/topk"
    workers: Sequence[int] = ()
    seeds: int = 3

    def __post_init__(self) -> None:
        if not 0 < self.accuracy < 1:
            raise BadRequest(f"accuracy={self.accuracy:g}: it must be between 0 and 1")
        if any(not 1 < number <= MOST_WORKERS for number in self.workers):
            raise BadRequest(
                f"strategies are followed with 2 to {MOST_WORKERS} workers, which are threads here"
            )


def measure_accuracy(options: dict[str, Any], question: Question, say: Say) -> Accuracy:
    """Train from one common model on, with `options` of `train`, and count the steps."""
    with tempfile.TemporaryDirectory(prefix="paceline-steps-") as temporary:
        runs = _Runs(options, question, Path(temporary), say)
        runs.begin()
        sizes = (question.batch_size, APART * question.batch_size)
        branches = tuple(
            Branch(size, tuple(runs.serial(size, seed) for seed in range(question.seeds)))
            for size in sizes
        )
        followed = tuple(
            Followed(
                strategy,
                workers,
                question.batch_size,
                (runs.followed(strategy, codec or "none", workers),),
                codec or "none",
            )
            for strategy, _, codec in (way.partition("/") for way in question.strategies)
            for workers in question.workers
        )
        return Accuracy(
            question.accuracy, COMMON_STEPS, "sqrt", branches, runs.noise_scale(sizes), followed
        )


class _Runs:
    """Runs that begin from one model."""

    def __init__(self, options: dict[str, Any], question: Question, folder: Path, say: Say) -> None:
        self.options, self.question, self.folder, self.say = options, question, folder, say
        self.model: nn.Module | None = None
        self.count = 0
        self.lr = float(Config.make(options).lr)

    def begin(self) -> None:
        """Train the model that all runs begin from."""
        self.say(f"{COMMON_STEPS} steps in common")
        more = {"strategy": "serial", "workers": 1, "steps": COMMON_STEPS, "epochs": 10_000,
                "batch_size": self.question.batch_size, "evaluate_every": str(1 << 30),
                "threads": 1}  # fmt: skip
        job = self._job(self.options | more)
        run(job, lambda kind, content: None, clean=True)
        model = job.model()
        model.load_state_dict(load_file(job.out / "model.safetensors"))
        self.model = model

    def serial(self, batch_size: int, seed: int) -> int:
        self.say(f"one worker, batches of {batch_size}, seed {seed}")
        more = {"strategy": "serial", "workers": 1, "seed": seed + 1}
        return self._steps(more, batch_size, batch_size)

    def followed(self, strategy: str, codec: str, workers: int) -> int:
        self.say(f"{strategy}, codec {codec}, {workers} workers")
        each = self.question.batch_size
        more = {
            "strategy": strategy,
            "workers": workers,
            "codec": codec,
            "transport": "simulated",
            "faults": ["compute:seconds=0.01,noise=0.1"],
        }
        return self._steps(more, each, each * workers)

    def _steps(self, more: dict[str, Any], batch_size: int, whole: int) -> int:
        options = {
            **self.options,
            **more,
            "model": self.model,
            "batch_size": batch_size,
            "lr": self.lr * math.sqrt(whole / self.question.batch_size),
            "steps": MOST_STEPS,
            "epochs": 10_000,
            "evaluate_every": str(EVALUATE_EVERY),
            "evaluate_samples": EVALUATE_SAMPLES,
            "until_accuracy": self.question.accuracy,
            "threads": 1,
        }
        job = self._job(options)
        record = run(job, lambda kind, content: None, clean=True)
        steps = record["result"]["steps_to_accuracy"]
        if steps is None:
            raise BadRequest(
                f"{more['strategy']} with {more['workers']} workers did not reach"
                f" {self.question.accuracy:g} in {MOST_STEPS} steps: ask for a lower accuracy, or"
                " another learning rate"
            )
        return int(steps) + COMMON_STEPS

    def _job(self, options: dict[str, Any]) -> Job:
        out = self.folder / str(self.count)
        self.count += 1
        return prepare(Config.make({**options, "out": str(out)}), lambda _: out)

    def noise_scale(self, sizes: tuple[int, int]) -> float | None:
        """B_noise = tr S / |G|^2 from the gradients of two batch sizes at the common model.

        Numerator and denominator are averaged separately, then divided.
        """
        self.say("the noise of the gradients")
        assert self.model is not None
        job = self._job({**self.options, "model": self.model, "strategy": "serial", "workers": 1,
                         "batch_size": sizes[0], "steps": 1, "threads": 1})  # fmt: skip
        squares = [self._mean_square(job, size) for size in sizes]
        small, large = sizes
        signal = (large * squares[1] - small * squares[0]) / (large - small)
        noise = (squares[0] - squares[1]) / (1 / small - 1 / large)
        return noise / signal if signal > 0 and noise > 0 else None

    def _mean_square(self, job: Job, size: int) -> float:
        assert self.model is not None
        model, loss = self.model, job.loss()
        found = []
        for batch in islice(batches_of(job, size, 0), NOISE_BATCHES):
            model.zero_grad()
            loss(model(batch.inputs), batch.targets).backward()
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            found.append(float(sum((g.double() ** 2).sum() for g in grads)))
        model.zero_grad()
        return math.fsum(found) / max(1, len(found))
