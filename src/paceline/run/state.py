"""A worker's state: written into a checkpoint, and set up again from it, all in one place."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.common.seeding import (
    derive,
    saved_random_states,
    seed_everything,
    set_random_states,
)
from paceline.data.accumulated import without_accumulation
from paceline.data.base import Samples, Stream
from paceline.errors import BadRequest
from paceline.record import checkpoint
from paceline.registry import Spec
from paceline.run.whole import (
    file_writers,
    load_weights,
    own_optimizer,
    whole_optimizer,
    with_tensors,
)
from paceline.strategies.parts.saved import Saved, on_device

if TYPE_CHECKING:
    from paceline.replica.replica import Replica
    from paceline.run.worker import Worker
    from paceline.strategies.base import Context, Strategy


def save(worker: Worker, best: bool = False) -> Path:
    """Write a checkpoint, perhaps that of the best evaluation. All workers call it together."""
    replica, ctx = worker.replica, worker.ctx
    weights = worker.strategy.consensus(replica)
    consensus, split = None, worker.job.arrangement.form is not None
    own, files = own_state(worker, worker.strategy.state()), {}
    if split:
        own["optimizer"] = None
    if worker.along.worker_index == 0:
        with replica.holding(weights):
            state = replica.state_dict()
        if split:
            files = file_writers(replica.part, state, replica.optimizer)
            own["optimizer"] = whole_optimizer(
                replica.part, replica.optimizer, worker.whole_order, in_file=bool(files)
            )
        consensus = None if files else replica.part.gather(state)
    if not worker.strategy.traits.replicas_identical and not split:
        own["weights"] = [r.params.clone() for r in replica.regions]
    path = checkpoint.save(
        worker.session.out / "checkpoints",
        worker.step,
        ctx.worker_index,
        consensus,
        own,
        about(worker),
        ctx.peers.barrier,
        worker.resumed_at,
        worker.keep,
        best,
        files,
    )
    worker.resumed_at = None
    return path


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
    scale = worker.replica.precision.scale
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
        "loss_scale": scale.state() if scale is not None else None,
        "stopping": worker.stopping.state(),
        "ema": worker.ema.weights if worker.ema is not None else None,
    }


def about(worker: Worker) -> dict[str, Any]:
    return {
        "step": worker.step,
        "workers": worker.ctx.workers,
        "members": list(worker.gathering.members),
        "train_s": worker.timer.total_s,
        "memory_format": "channels_last" if worker.replica.channels_last else "contiguous",
        "optimizer": type(worker.replica.optimizer).__name__,
        "strategy": str(worker.config.described()["strategy"]),
        "codec": str(worker.config.codec),
        "samples": _count(worker.job.data.train),
        "content": _content(worker),
        "privacy": worker.private.spent() if worker.private is not None else None,
        "arrangement": str(worker.job.arrangement),
    }


def _content(worker: Worker) -> str | None:
    """Return what identifies the prepared data: a hash of it, or in a private run a random number.

    A hash would tell something about the data, which privacy has to protect.
    """
    origin = worker.job.data.origin
    return origin.get("id" if worker.private is not None else "content")


@dataclass
class Memory:
    """What a checkpoint holds for one worker."""

    folder: Path
    said: dict[str, Any]  # its checkpoint.json
    members: frozenset[int]  # the workers that made their own part and are here again
    own: dict[str, Any]  # this worker's part, or worker 0's where this worker is new
    mine: bool
    told: list[str] = field(default_factory=list)  # sentences for the user
    anew: list[str] = field(default_factory=list)  # what could not be taken over


def set_up(worker: Worker) -> None:
    """Set up replica, strategy, random numbers and private side.

    They are new, or set up with what a checkpoint remembers.
    """
    memory = _read(worker) if worker.job.resume_from is not None else None
    if memory is not None:
        _load_replica(worker, memory)
    saved = _saved(worker, memory) if memory is not None else None
    set_up_strategy(worker.strategy, worker.along, worker.replica, saved)
    if memory is not None:
        _load_own(worker, memory)
        worker.resumed_at = worker.step = memory.said["step"]
        if told := _told(worker, memory):
            worker.say(f"going on from step {worker.step}: {'; '.join(told)}")
    if worker.private is not None:
        spent = memory.own.get("privacy") if memory is not None and memory.mine else None
        worker.private.attach(worker.replica, spent)
        for notice in worker.private.gradient.clipper.notices:
            worker.say(notice)


def _read(worker: Worker) -> Memory:
    """Read this worker's part of a checkpoint; refuse one of another optimizer, codec or data."""
    folder, ctx = worker.job.resume_from, worker.ctx
    assert folder is not None
    said = checkpoint.about(folder)
    for what, there, here in (
        ("optimizer", said["optimizer"], type(worker.replica.optimizer).__name__),
        ("codec", said.get("codec", "none"), str(worker.config.codec)),
        ("number of training samples", said["samples"], _count(worker.job.data.train)),
        ("content of its shards", said.get("content"), _content(worker)),
    ):
        if there != here:
            raise BadRequest(
                f"{folder} was made with another {what} ({there}, not {here}): resume it with the"
                " same"
            )
    made = checkpoint.members(folder, said)
    arrangement = str(worker.job.arrangement)
    alike = said.get("arrangement", f"data={ctx.workers},whole=1") == arrangement
    members = made if said["workers"] == ctx.workers and alike else frozenset()
    mine = ctx.worker_index in members
    own = checkpoint.load_own(folder, ctx.worker_index if mine else min(made, default=0))
    memory = Memory(folder, said, members, own, mine)
    if not alike and said["workers"]:
        memory.told.append(f"{arrangement} instead of {said.get('arrangement', 'whole copies')}")
    return memory


def _load_replica(worker: Worker, memory: Memory) -> None:
    """Load the consensus weights, the optimizer and the place in the data.

    A worker that has no part in the checkpoint takes worker 0's.
    """
    replica, own = worker.replica, memory.own
    try:
        replica.load_state_dict(load_weights(replica.part, memory.folder / "model.safetensors"))
    except RuntimeError as error:
        raise BadRequest(
            f"{memory.folder} was made with another model: {str(error).splitlines()[-1].strip()}"
        ) from None
    kept = own["optimizer"]
    if kept is None or worker.job.arrangement.form is not None:
        kept = checkpoint.load_own(memory.folder, 0)["optimizer"]
    if worker.job.arrangement.form is None:
        kept = with_tensors(kept, memory.folder)
    else:
        order = worker.whole_order
        kept = own_optimizer(replica.part, kept, replica.optimizer, order, memory.folder)
    replica.load_optimizer(kept)
    several = worker.config.accumulate > 1
    place = own["batches"]
    worker.batches.restore(place if several else without_accumulation(place))
    if replica.precision.scale is not None and own.get("loss_scale") is not None:
        replica.precision.scale.restore(own["loss_scale"])
    if own.get("stopping") is not None:
        worker.stopping.restore(own["stopping"])
    if worker.ema is not None and own.get("ema"):
        worker.ema.weights = on_device(own["ema"], worker.device)
    worker.epoch_start = on_device(own["epoch_start"], worker.device)
    replica.samples_seen = own["samples_seen"]
    worker.timer.total_s = memory.said["train_s"]


def _saved(worker: Worker, memory: Memory) -> Saved | None:
    """What the strategy is set up with; None where it begins anew."""
    asked, made = _names(worker, memory.said)
    if not memory.said["workers"]:
        memory.told.append(f"a server was lost before this checkpoint, so {asked} begins anew")
        return None
    if Spec.of(made).name != Spec.of(asked).name:
        memory.told.append(f"{asked} goes on from a checkpoint of {made}")
        if not memory.mine:
            return None
    return Saved(
        on_device(memory.own["strategy"], worker.device),
        _refusal(worker, memory),
        memory.mine,
        memory.members,
        memory.anew,
    )


def _names(worker: Worker, said: dict[str, Any]) -> tuple[str, str]:
    """The strategy of this run and that of the checkpoint, as the user writes them."""
    asked = str(worker.config.described()["strategy"])
    return asked, str(said.get("strategy", asked))  # 0.1.0 did not save it


def _refusal(worker: Worker, memory: Memory) -> str:
    asked, made = _names(worker, memory.said)
    return (
        f"{memory.folder} was made with {made}, and {asked} cannot go on from what that"
        " remembers: resume it with the same strategy"
    )


def set_up_strategy(
    strategy: Strategy, ctx: Context, replica: Replica, saved: Saved | None
) -> None:
    """Set a strategy up, new or with what a checkpoint remembers."""
    if saved is None:
        strategy.setup(ctx, replica)
    elif "saved" in inspect.signature(strategy.setup).parameters:
        strategy.setup(ctx, replica, saved)
    else:  # a plugin that was written for 0.1.0
        strategy.setup(ctx, replica)
        if saved.own and hasattr(strategy, "load_state"):
            strategy.load_state(dict(saved.state))


def _load_own(worker: Worker, memory: Memory) -> None:
    """Load what is this worker's alone: weights, batch sizes, random numbers."""
    own, ctx = memory.own, worker.ctx
    ctx.shared_random.set_state(own["generators"][1])
    if not memory.mine:
        step = memory.said["step"]
        seed_everything(derive(worker.config.seed, "resumed", step, ctx.worker_index))
        return
    if worker.balance is not None and own.get("balance") is not None:
        worker.balance.load(own["balance"])
    for region, weights in zip(worker.replica.regions, own.get("weights", ()), strict=False):
        region.params.copy_(weights)
    ctx.random.set_state(own["generators"][0])
    set_random_states(own["random"])


def _told(worker: Worker, memory: Memory) -> list[str]:
    """What is not as it was, for the user."""
    before, now, told = memory.said["workers"], worker.ctx.workers, memory.told
    if before and before != now:
        told.append(
            f"{now} workers instead of {before}, with new random numbers"
            + ("" if worker.strategy.traits.replicas_identical else " and worker 0's optimizer")
        )
    elif before and (gone := sorted(set(range(now)) - memory.members)):
        names = ", ".join(str(w) for w in gone)
        told.append(f"worker {names} had been lost and begins with worker 0's optimizer")
    if memory.anew:
        told.append(f"these begin anew: {', '.join(memory.anew)}")
    if worker.strategy.traits.resumes.same != "exact":
        told.append(
            worker.strategy.traits.resumes.why
            or f"{worker.strategy.name} depends on the workers' speeds, so the result is not"
            " the one that an unbroken run has"
        )
    return told


def _count(train: Samples | Stream) -> int | None:
    return None if isinstance(train, Stream) else len(train)
