"""Looking at a run between its steps: evaluations, and whether the weights have converged."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from paceline.errors import NotFinite

if TYPE_CHECKING:
    from paceline.run.worker import Worker


def evaluate(worker: Worker, epoch: int | None) -> None:
    """Evaluate the consensus weights, all workers together. `epoch` None: the last
    evaluation.
    """
    with worker.aside("evaluation"):
        weights = worker.strategy.consensus(worker.replica)
        with worker.replica.holding(weights):
            loss, values = (worker.evaluation if epoch is None else worker.glance).measure()
    accuracy = values.get("accuracy")
    until, target = worker.config.until_accuracy, worker.config.target_accuracy
    worker.target_reached = until is not None and accuracy is not None and accuracy >= until
    goal = target if target is not None else until
    metric = None
    if name := next(reversed(values), None):
        better = getattr(worker.evaluation.metrics[-1], "higher_is_better", True)
        metric = {"name": name, "value": values[name], "higher_is_better": better}
    result = {
        "step": worker.step,
        "train_s": worker.timer.total_s,
        "loss": loss,
        "accuracy": accuracy,
        "metric": metric,
        "reached": goal is not None and accuracy is not None and accuracy >= goal,
        "final": epoch is None,
    }
    worker.recorder.write("evaluation", **result)
    if worker.leads:
        worker.notify("evaluation", {**result, "epoch": epoch})
    if not loss - loss == 0.0:
        raise NotFinite(
            f"the loss on the test set is {loss} after step {worker.step}: try a smaller lr"
        )


def converged(worker: Worker) -> bool:
    """Whether the weights changed by less than --until-converged (relative) in this epoch.

    All workers see the same consensus weights, and so the same change; where a strategy lets
    workers decide alone, each looks at its own weights.
    """
    assert worker.config.until_converged is not None
    if worker.strategy.traits.decides_alone:
        weights: Sequence[Tensor] = worker.replica.weights()
    else:
        with worker.aside("convergence"):
            weights = worker.strategy.consensus(worker.replica) or worker.replica.weights()
    moved = _norm(a - b for a, b in zip(weights, worker.epoch_start, strict=True))
    size = _norm(worker.epoch_start)
    change = moved / size if size else float("inf")
    worker.say(f"weights changed by {change:.2e} (relative) in this epoch")
    worker.timer.start()
    worker.epoch_start = [w.clone() for w in weights]
    return change < worker.config.until_converged


def _norm(tensors: Iterable[Tensor]) -> float:
    """The Euclidean norm of all numbers together."""
    return float(sum(float(t.abs().double().square().sum()) for t in tensors) ** 0.5)
