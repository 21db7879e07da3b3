"""A worker's state: written into a checkpoint, and read from it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.common.seeding import (
    derive,
    saved_random_states,
    seed_everything,
    set_random_states,
)
from paceline.data.base import Samples, Stream
from paceline.errors import BadRequest, PacelineError
from paceline.record import checkpoint

if TYPE_CHECKING:
    from paceline.run.worker import Worker


def save(worker: Worker) -> Path:
    """Write a checkpoint. All workers call it together."""
    replica, ctx = worker.replica, worker.ctx
    weights = worker.strategy.consensus(replica)
    with replica.holding(weights):
        consensus = replica.state_dict() if ctx.worker_index == 0 else None
    own = own_state(worker, worker.strategy.state())
    if not worker.strategy.replicas_identical:
        own["weights"] = [r.params.clone() for r in replica.regions]
    return checkpoint.save(
        worker.session.out / "checkpoints",
        worker.step,
        ctx.worker_index,
        consensus,
        own,
        about(worker),
        ctx.peers.barrier,
    )


def rescue(worker: Worker) -> Path:
    """Write a checkpoint with one worker's weights. A run that resumes from it restarts its
    strategy.
    """
    if worker.batches.step > worker.step:  # the step was not made
        worker.batches.give_back()
    own, weights = own_state(worker, {}), worker.replica.state_dict()
    # 0 workers: a resumed run takes the weights and the place in the data, and no worker's own
    # state
    said = {**about(worker), "workers": 0}
    folder, rank = worker.session.out / "checkpoints", worker.ctx.worker_index
    return checkpoint.save(folder, worker.step, rank, weights, own, said, lambda: None)


def own_state(worker: Worker, strategy: dict[str, Any]) -> dict[str, Any]:
    """Return the state that differs between workers."""
    return {
        "optimizer": worker.replica.optimizer.state_dict(),
        "random": saved_random_states(),
        "generators": [worker.ctx.random.get_state(), worker.ctx.shared_random.get_state()],
        "strategy": strategy,
        "epoch_start": worker.epoch_start,
        "batches": worker.batches.state(),
        "balance": worker.balance.state() if worker.balance is not None else None,
        "samples_seen": worker.replica.samples_seen,
        "privacy": worker.private.gradient.state() if worker.private is not None else None,
    }


def about(worker: Worker) -> dict[str, Any]:
    return {
        "step": worker.step,
        "workers": worker.ctx.workers,
        "train_s": worker.timer.total_s,
        "memory_format": "channels_last" if worker.replica.channels_last else "contiguous",
        "optimizer": type(worker.replica.optimizer).__name__,
        "strategy": str(worker.config.described()["strategy"]),
        "codec": str(worker.config.codec),
        "samples": _count(worker.job.data.train),
        "content": _content(worker),
        "privacy": worker.private.spent() if worker.private is not None else None,
    }


def _content(worker: Worker) -> str | None:
    """Return what identifies the prepared data: a hash of it, or in a private run a random number.

    A hash would tell something about the data, which privacy has to protect.
    """
    origin = worker.job.data.origin
    return origin.get("id" if worker.private is not None else "content")


def restore(worker: Worker) -> dict[str, Any]:
    """Load weights, optimizer and place in the data. Returns the state that differs between
    workers.

    With another number of workers than before, all of them take worker 0's.
    """
    folder, replica = worker.job.resume_from, worker.replica
    assert folder is not None
    said, optimizer = checkpoint.about(folder), replica.optimizer
    for what, there, here in (
        ("optimizer", said["optimizer"], type(optimizer).__name__),
        ("codec", said.get("codec", "none"), str(worker.config.codec)),
        ("number of training samples", said["samples"], _count(worker.job.data.train)),
        ("content of its shards", said.get("content"), _content(worker)),
    ):
        if there != here:
            raise BadRequest(
                f"{folder} was made with another {what} ({there}, not {here}): resume it with the"
                " same"
            )
    same = said["workers"] == worker.ctx.workers
    own = checkpoint.load_own(folder, worker.ctx.worker_index if same else 0)
    try:
        replica.load_state_dict(checkpoint.load_weights(folder / "model.safetensors"))
    except RuntimeError as error:
        raise BadRequest(
            f"{folder} was made with another model: {str(error).splitlines()[-1].strip()}"
        ) from None
    asked = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    optimizer.load_state_dict(own["optimizer"])
    for group, options in zip(optimizer.param_groups, asked, strict=True):
        group.update(options)  # the options that are given now replace those of then
    worker.batches.restore(own["batches"])
    worker.epoch_start = own["epoch_start"]
    replica.samples_seen = own["samples_seen"]
    worker.step, worker.timer.total_s = said["step"], said["train_s"]
    own["same_workers"], own["made_with"] = same, said.get("strategy", "another strategy")
    return own


def undo_later(worker: Worker) -> None:
    """Delete the checkpoints after the one that the run has resumed from and left behind."""
    if worker.job.resume_from is not None and worker.ctx.worker_index == 0:
        checkpoint.forget_after(worker.session.out / "checkpoints", worker.step - 1)


def restore_own(worker: Worker, own: dict[str, Any]) -> None:
    """Load what the strategy and this worker alone remember. Called after `strategy.setup`."""
    ctx = worker.ctx
    if not own["same_workers"]:
        seed_everything(derive(worker.config.seed, "resumed", worker.step, ctx.worker_index))
        return
    try:
        worker.strategy.load_state(own["strategy"])
    except PacelineError:
        raise
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
        asked = worker.config.described()["strategy"]
        raise BadRequest(
            f"{worker.job.resume_from} was made with {own['made_with']}, and {asked} cannot go on"
            " from what that remembers: resume it with the same strategy"
        ) from None
    if worker.balance is not None and own.get("balance") is not None:
        worker.balance.load(own["balance"])
    for region, weights in zip(worker.replica.regions, own.get("weights", ()), strict=False):
        region.params.copy_(weights)
    for source, state in zip((ctx.random, ctx.shared_random), own["generators"], strict=True):
        source.set_state(state)
    set_random_states(own["random"])


def _count(train: Samples | Stream) -> int | None:
    return None if isinstance(train, Stream) else len(train)
