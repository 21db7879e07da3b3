"""Evaluation on the test set: each worker takes a part, and every sample counts exactly once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paceline.data.ahead import read_in_turn
from paceline.data.base import Samples, some_of
from paceline.data.batches import evaluation_slices
from paceline.data.content import rows, to_device
from paceline.errors import BadRequest, PacelineError
from paceline.objectives.losses import advice
from paceline.objectives.metrics import Accuracy, Metric
from paceline.replica.replica import Replica
from paceline.request.job import Job
from paceline.strategies.base import Context

EVALUATION_BATCH = 500


class Evaluation:
    """Evaluates the weights that the replica holds at the moment."""

    def __init__(
        self,
        job: Job,
        replica: Replica,
        ctx: Context,
        device: torch.device,
        test: Samples | None = None,
    ) -> None:
        self.job, self.test, self.replica, self.ctx = job, test or job.data.test, replica, ctx
        self.device = device
        self.described = job.config.described()
        self.metrics = _metrics(job)
        self.higher_is_better = {m.name: m.higher_is_better for m in self.metrics}

    def smaller(self, samples: int | None) -> Evaluation:
        """Return an evaluation on `samples` samples spread over the test set, the same in every
        run.
        """
        if self.test is None or samples is None or samples >= len(self.test):
            return self
        return Evaluation(
            self.job, self.replica, self.ctx, self.device, some_of(self.test, samples)
        )

    def try_out(self) -> None:
        """Refuse a loss or metric that does not fit the outputs, before the first step."""
        test = self.test
        if test is None:
            return
        indices = torch.arange(min(2, len(test)))
        inputs, targets = to_device(self.job.split(test.batch(indices)), self.device)
        with self.replica.evaluating(), torch.no_grad():
            if self.replica.step is not None:
                self.replica.evaluate(inputs, targets)
                return
            outputs = self.replica.infer(inputs)
            try:
                self.replica.loss(outputs, targets)
                for metric in self.metrics:
                    metric.update(metric.start(len(test)), indices, outputs, targets)
            except PacelineError:
                raise
            except Exception as error:
                names = f"loss {self.described['loss']} and metric {self.described['metric']}"
                shapes = f"outputs {_shape(outputs)} and targets {_shape(targets)}"
                raise BadRequest(
                    f"{names} do not fit {shapes}: {str(error).splitlines()[0]}"
                    f"{advice(outputs, targets)}"
                ) from error

    def measure(self) -> tuple[float, dict[str, float]]:
        """Return the mean loss and every metric, the same numbers on all workers."""
        assert self.test is not None
        test, replica, samples = self.test, self.replica, len(self.test)
        sums = torch.zeros(2, dtype=torch.float64)
        states = [m.start(samples) for m in self.metrics]
        with replica.evaluating(), torch.no_grad():
            slices = evaluation_slices(
                samples, self.ctx.peers.size, self.ctx.peers.rank, EVALUATION_BATCH
            )
            for indices, batch in read_in_turn(test, slices):
                inputs, targets = to_device(self.job.split(batch), self.device)
                loss, outputs = replica.evaluate(inputs, targets)
                count = rows(inputs if targets is None else targets)
                sums += torch.tensor([float(loss) * count, count], dtype=torch.float64)
                for metric, state in zip(self.metrics, states, strict=True):
                    metric.update(state, indices, outputs, targets)
        for tensor in (sums, *states):
            self.ctx.peers.control.all_reduce(tensor)
        return float(sums[0] / sums[1]), {
            m.name: m.value(s) for m, s in zip(self.metrics, states, strict=True)
        }


def _shape(value: Any) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__


def _metrics(job: Job) -> list[Metric]:
    """Return accuracy where targets are classes, and the chosen metrics.

    The last one is the first that was chosen (`result.metric`).
    """
    chosen = job.metrics()
    if chosen and job.data.labelled and not any(isinstance(m, Accuracy) for m in chosen):
        chosen.append(Accuracy())
    return [*chosen[1:], *chosen[:1]]
