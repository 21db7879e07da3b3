"""Metrics over a test set, of which each worker evaluates a part.

A metric's state is one float64 tensor, and the states of all workers are *summed*. Each test sample
is counted exactly once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from paceline.errors import BadRequest
from paceline.registry import metrics


class Metric(ABC):
    name: ClassVar[str]
    higher_is_better: ClassVar[bool] = True

    @abstractmethod
    def start(self, samples: int) -> Tensor:
        """Return an empty state for a test set of so many samples."""

    @abstractmethod
    def update(self, state: Tensor, indices: Tensor, outputs: Any, targets: Any) -> None:
        """Count these samples; `indices` are their places in the test set."""

    @abstractmethod
    def value(self, state: Tensor) -> float:
        """Return the metric from the summed state."""


def predicted_classes(outputs: Tensor) -> Tensor:
    """Return each row's class: the largest of several outputs, or the sign of a single logit."""
    if outputs.dim() >= 2 and outputs.shape[1] > 1:
        return outputs.argmax(1)
    return (outputs.reshape(len(outputs)) > 0).long()


@metrics.register("accuracy")
class Accuracy(Metric):
    """Share of the samples whose class is predicted correctly."""

    def start(self, samples: int) -> Tensor:
        return torch.zeros(2, dtype=torch.float64)

    def update(self, state: Tensor, indices: Tensor, outputs: Any, targets: Any) -> None:
        predicted = predicted_classes(outputs)
        right = predicted == targets.reshape(predicted.shape).long()
        state += torch.tensor([float(right.sum()), float(right.numel())], dtype=torch.float64)

    def value(self, state: Tensor) -> float:
        return float(state[0] / state[1])


@metrics.register("auc")
class AUC(Metric):
    """Area under the ROC curve for two classes, exact (ties count half)."""

    def start(self, samples: int) -> Tensor:
        return torch.zeros(2, samples, dtype=torch.float64)

    def update(self, state: Tensor, indices: Tensor, outputs: Any, targets: Any) -> None:
        if outputs.dim() == 2 and outputs.shape[1] == 2:
            score = outputs[:, 1] - outputs[:, 0]
        elif outputs.numel() == len(outputs):
            score = outputs.reshape(-1)
        else:
            raise BadRequest(
                "metric auc needs one logit or two classes per sample; this model gives"
                f" {tuple(outputs.shape)}"
            )
        state[0, indices] = score.double().cpu()
        state[1, indices] = targets.reshape(-1).double().cpu()

    def value(self, state: Tensor) -> float:
        scores, labels = state
        positive = labels > 0.5
        ups, downs = int(positive.sum()), int((~positive).sum())
        if not ups or not downs:
            return float("nan")
        _, inverse, counts = torch.unique(scores, return_inverse=True, return_counts=True)
        ends = counts.cumsum(0).double()
        ranks = ends - (counts.double() - 1) / 2  # the mean rank of equal scores
        return float((ranks[inverse][positive].sum() - ups * (ups + 1) / 2) / (ups * downs))


@metrics.register("mse")
class MeanSquaredError(Metric):
    """Mean squared error, for targets that are numbers."""

    higher_is_better = False

    def start(self, samples: int) -> Tensor:
        return torch.zeros(2, dtype=torch.float64)

    def update(self, state: Tensor, indices: Tensor, outputs: Any, targets: Any) -> None:
        errors = (outputs.reshape(targets.shape) - targets).double() ** 2
        state += torch.tensor([float(errors.sum()), float(errors.numel())], dtype=torch.float64)

    def value(self, state: Tensor) -> float:
        return float(state[0] / state[1])
