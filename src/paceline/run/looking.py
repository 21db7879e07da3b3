"""Looking at a run between its steps: evaluations, and whether the weights have converged."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.errors import NotFinite
from paceline.run.evaluation import Evaluation

if TYPE_CHECKING:
    from paceline.run.worker import Worker


class Looks:
    """The evaluations of a run: on which set, and on how much of it.

    Between steps it is the validation set, or without one the test set. The last evaluation takes
    all of both.
    """

    def __init__(self, worker: Worker) -> None:
        job = worker.job
        parts = (job, worker.replica, worker.along, worker.device)
        test, held = job.data.test, job.data.validation
        self.test = Evaluation(*parts, test) if test is not None else None
        self.validation = Evaluation(*parts, held) if held is not None else None
        self.decides = self.validation or self.test
        self.on = "validation" if held is not None else "test"
        self.glance = self.decides
        if self.decides is not None:
            self.decides.try_out()
            self.glance = self.decides.smaller(job.config.evaluate_samples)


def evaluate(worker: Worker, epoch: int | None) -> None:
    """Evaluate the consensus weights, all workers together. `epoch` None: the last
    evaluation.
    """
    looks = worker.looks
    chosen = looks.decides if epoch is None else looks.glance
    if chosen is None:
        return

    def look() -> tuple[dict[str, Any], dict[str, Any] | None]:
        worker.activity.enter("evaluate")
        weights = worker.strategy.consensus(worker.replica)
        found = _measured(worker, chosen, weights)
        if epoch is not None or looks.validation is None or looks.test is None:
            return found, None
        return found, _measured(worker, looks.test, weights)

    found, test = worker.aside("evaluation", look)
    goal = worker.config.target_accuracy
    goal = worker.config.until_accuracy if goal is None else goal
    by = worker.stopping.saw(worker.step, found["loss"], found["metrics"], chosen.higher_is_better)
    _write(
        worker,
        found,
        epoch,
        on=looks.on,
        final=epoch is None and test is None,
        reached=goal is not None and (found["accuracy"] or 0.0) >= goal,
        best=worker.stopping.improved,
        decided_by=by,
    )
    if test is not None:
        _write(worker, test, epoch, on="test", final=True)


def _measured(
    worker: Worker, evaluation: Evaluation, weights: Sequence[Tensor] | None
) -> dict[str, Any]:
    """Evaluate these weights, and beside them their moving average if the run keeps one."""
    with worker.replica.holding(weights):
        found = _described(evaluation, *evaluation.measure())
    if worker.ema is not None and worker.ema.weights:
        identical = worker.strategy.traits.replicas_identical
        with worker.replica.holding(worker.ema.agreed(worker.ctx, identical)):
            found["ema"] = _described(evaluation, *evaluation.measure())
    return found


def _described(evaluation: Evaluation, loss: float, values: dict[str, float]) -> dict[str, Any]:
    metric = None
    if name := next(reversed(values), None):
        better = evaluation.higher_is_better[name]
        metric = {"name": name, "value": values[name], "higher_is_better": better}
    return {"loss": loss, "accuracy": values.get("accuracy"), "metric": metric, "metrics": values}


def _write(worker: Worker, found: dict[str, Any], epoch: int | None, **more: Any) -> None:
    result = {"step": worker.step, "train_s": worker.timer.total_s, **found, **more}
    worker.recorder.write("evaluation", **result)
    if worker.leads:
        worker.notify("evaluation", {**result, "epoch": epoch})
    loss = found["loss"]
    if loss - loss != 0.0:
        raise NotFinite(
            f"the loss on the {more['on']} set is {loss} after step {worker.step}: try a smaller lr"
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
        weights = worker.aside("convergence", lambda: _agreed(worker))
    moved = _norm(a - b for a, b in zip(weights, worker.epoch_start, strict=True))
    size = _norm(worker.epoch_start)
    change = moved / size if size else float("inf")
    worker.say(f"weights changed by {change:.2e} (relative) in this epoch")
    worker.timer.start()
    worker.epoch_start = [w.clone() for w in weights]
    return change < worker.config.until_converged


def all_finite(worker: Worker) -> bool:
    """Whether the gradients of all workers are finite, so that a step can be made (fp16)."""
    finite, traits = worker.replica.unscale(), worker.strategy.traits
    agrees = traits.in_step and not traits.survives and traits.exchanges != "nothing"
    if worker.ctx.workers > 1 and agrees:
        votes = torch.tensor([float(not finite)])
        worker.ctx.peers.uncounted().control.all_reduce(votes, "max")
        finite = not bool(votes)
    assert worker.replica.precision.scale is not None
    worker.replica.precision.scale.update(finite)
    return finite


def _agreed(worker: Worker) -> Sequence[Tensor]:
    return worker.strategy.consensus(worker.replica) or worker.replica.weights()


def _norm(tensors: Iterable[Tensor]) -> float:
    """The Euclidean norm of all numbers together."""
    return float(sum(float(t.abs().double().square().sum()) for t in tensors) ** 0.5)
