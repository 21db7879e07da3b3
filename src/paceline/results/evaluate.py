"""What the saved weights of a run score on a test set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.errors import BadRequest
from paceline.registry import Spec, losses, metrics
from paceline.request.config import Config
from paceline.request.job import Job
from paceline.request.prepare import prepare
from paceline.request.session import Session
from paceline.run.evaluation import Evaluation
from paceline.run.rank import Rank
from paceline.transport.alone import Alone


class _NoRecord:
    """Takes events and writes none of them."""

    def write(self, kind: str, **fields: Any) -> None:
        pass


def evaluate(
    model: nn.Module,
    record: dict[str, Any],
    data: Any,
    *,
    data_dir: str | None = None,
    metric: Any = None,
    loss: Any = None,
    step: Any = None,
) -> dict[str, Any]:
    """Return the loss and the metrics of a model on the test set of some data.

    It is the evaluation that a run with one worker makes at its end. `metric` and `loss` are those
    of the run unless others are given; `step` must be given where the run had one of its own.
    """
    saved = record["config"]
    if saved.get("step") is not None and step is None:
        raise BadRequest(
            f"the run's loss came from a step of your own ({saved['step']}): give --step"
        )
    options = {
        "model": model,
        "data": data,
        "data_dir": data_dir,
        "metric": _again("metric", metric, saved, metrics),
        "loss": _again("loss", loss, saved, losses),
        "precision": saved.get("precision"),
        "memory_format": saved.get("memory_format") or "contiguous",
        "batch_size": 1,
        "step": step,
        "lr": 0.0,
        "optimizer": "sgd",
        "transport": "inproc",
        "threads": max(1, torch.get_num_threads()),
    }
    if not any(p.requires_grad for p in model.parameters()):
        raise BadRequest("the model has no parameter that can be trained")
    config = Config.make({k: v for k, v in options.items() if v is not None})
    job = prepare(config, lambda _: Path("unused"))
    if job.data.test is None:
        raise BadRequest(
            f"data {job.data.name} has no test set: give a pair (train, test) of data sets"
        )
    return _scores(job)


def _scores(job: Job) -> dict[str, Any]:
    session = Session(job, job.out)
    place = Rank.of(session, Alone(), _NoRecord(), lambda kind, content: None)
    evaluation = Evaluation(job, place.replica(), place.ctx, session.device)
    evaluation.try_out()
    loss, scores = evaluation.measure()
    assert job.data.test is not None
    return {"loss": loss, **scores, "samples": len(job.data.test)}


def _again(name: str, given: Any, saved: dict[str, Any], registry: Any) -> Any:
    """Return the metric or loss to use: the given one, else the run's own if it has a name."""
    if given is not None:
        return given
    own = saved.get(name)
    if own is None:
        return None
    # `accuracy,auc`: parts with an equals sign and no colon are options of the one before
    parts = [p for p in str(own).split(",") if ":" in p or "=" not in p]
    if all(p in ("auto", "none") or Spec.of(p).name in registry for p in parts):
        return own
    raise BadRequest(f"the run's {name} was given in Python ({own}): give --{name}")
