"""The interface of strategies: when workers exchange what, with which ranks, and how stale."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from paceline.codecs.base import Codec
from paceline.codecs.feedback import build_codec
from paceline.collectives.base import Collective
from paceline.errors import BadRequest, ReplicasDiffer
from paceline.registry import Spec
from paceline.transport.base import Transport
from paceline.transport.together import allocate_like
from paceline.types import Batch, RecorderLike, Role

if TYPE_CHECKING:
    from paceline.replica.replica import Replica
    from paceline.strategies.parts.pattern import Exchange, Setting
    from paceline.strategies.parts.saved import Saved

Resume = Literal["exact", "told", "refused"]


@dataclass(frozen=True)
class Resumes:
    """What becomes of a run that goes on from a checkpoint.

    exact: as if it had not stopped. told: it goes on, and a notice says what is not as it was.
    """

    same: Resume = "exact"  # with as many workers
    fewer: Resume = "told"
    more: Resume = "told"
    after_loss: Resume = "exact"  # after a worker died
    damaged: Resume = "exact"  # from the checkpoint before the newest, which is damaged
    why: str = ""  # `same` is not exact; empty: the workers' speeds decide the result


APPROXIMATELY = Resumes("told", "told", "told", "told", "told")  # speeds decide the result


@dataclass(frozen=True)
class Traits:
    """What a strategy declares; options may change it (`self.traits = replace(...)`)."""

    exchanges: Literal["gradients", "weights", "nothing"] = "gradients"
    replicas_identical: bool = False  # after every step, on all workers, bit for bit
    serves: Literal["ranks", "thread"] | None = None
    # Synchronous: no worker leaves an exchange before all have entered it.
    in_step: bool = True
    # Where not in step: a worker that is some steps ahead of the slowest waits for it (ssp).
    bounded: bool = False
    flat: bool = True  # False: the model keeps its own tensors, without flat buffers
    shard: Literal["global", "static"] = "global"  # the default; the user may choose
    needs_processes: bool = False
    needs_shared_memory: bool = False
    needs_second_channel: bool = False  # beside the channel of the exchanges, for a thread
    # False: a worker without samples in a step gets a dummy sample with weight 0.
    skips_empty: bool = True
    most_workers: int | None = None
    alone_is_serial: bool = True  # with one worker it is plain SGD, bit for bit
    # `step` exchanges gradients and ends with `Replica.update`: a loop of the user's own may change
    # them in between (`pace.synchronize`).
    update_last: bool = False
    survives: bool = False  # the other workers go on when a worker (except the first) has died
    weighs_equally: bool = False  # its average weighs workers equally, whatever their batches
    decides_alone: bool = False  # a worker that has converged stops by itself
    resumes: Resumes = Resumes()
    # For privacy. True: only the sum of all workers' gradients is ever used, so the workers' noise
    # adds up. False: a worker's own gradient takes effect by itself. None: not stated.
    noise_adds_up: bool | None = None
    not_private_because: str = "it does not declare what it reveals (noise_adds_up)"


@dataclass
class Context:
    """All that a strategy gets from the run; it reads nothing from anywhere else."""

    transport: Transport  # all ranks: the workers, then the servers
    peers: Transport  # the workers only; its ranks are the workers' indices
    role: Role
    worker_index: int  # -1 on a server
    workers: int
    servers: tuple[int, ...]  # their ranks in `transport`
    codec: Codec
    collective: Callable[[str], Collective]  # builds a collective over the workers by name
    recorder: RecorderLike
    random: torch.Generator  # this rank's generator
    shared_random: torch.Generator  # draws the same numbers on all ranks
    init: Literal["broadcast", "seed"]
    overlap: bool = False  # whether gradients may be exchanged while the backward pass runs


class Strategy(ABC):
    """One way of keeping the workers together; a subclass's dataclass fields are its options."""

    name: ClassVar[str]
    traits: Traits = Traits()

    def __init_subclass__(cls, **options: Any) -> None:
        """Plugins written for 0.1.0 declare traits one by one, as attributes of their class."""
        super().__init_subclass__(**options)
        names = {f.name for f in fields(Traits)}
        if declared := {name: cls.__dict__[name] for name in names & cls.__dict__.keys()}:
            cls.traits = replace(cls.traits, **declared)

    _means: list[Tensor] | None = None  # memory for the consensus weights
    observed: Mapping[str, Any] = MappingProxyType({})  # recorded with each step's loss

    def setup(self, ctx: Context, replica: Replica, saved: Saved | None = None) -> None:
        """Start from the same weights on all workers: new ones, or those of a checkpoint.

        `saved` is what `state` returned when the checkpoint was made.
        """
        self.ctx = ctx
        start_together(ctx, replica)

    def begin(self, replica: Replica, batch: Batch | None) -> None:
        """Called before the forward pass, which reads the weights.

        In a loop of the user's own that is at the end of the step before, and `batch` is None.
        """
        return

    def scale(self, batch: Batch) -> float:
        """The factor on this worker's mean loss before its backward pass.

        Where gradients are exchanged it is the worker's share of the samples, so that the *sum* of
        the workers' gradients is the gradient of the whole batch.
        """
        return batch.share if self.traits.exchanges == "gradients" else 1.0

    def refuses(self, codec: Codec) -> str | None:
        """Why the strategy cannot be combined with this (lossy) codec; None: it can."""
        return f"strategy {self.name} sends nothing that a codec could compress; use --codec none"

    def pattern(self, step: int, setting: Setting) -> Sequence[Exchange]:
        """What the workers exchange in a step (counted from 0), as data, for the planner."""
        if self.traits.exchanges == "nothing":
            return ()
        raise BadRequest(
            f"strategy {self.name} does not declare its exchanges (Strategy.pattern), so its cost"
            " cannot be predicted; measure it by paceline study"
        )

    @abstractmethod
    def step(self, replica: Replica, batch: Batch) -> None:
        """Exchange, update, or both, after a backward pass has computed this worker's gradients."""

    def skip(self, replica: Replica, batch: Batch) -> None:
        """Called instead of `step` where some worker's gradients are not finite (fp16).

        No worker updates. Where weights are exchanged, they are exchanged nevertheless.
        """
        if self.traits.exchanges == "weights":
            with replica.skipping():
                self.step(replica, batch)

    def finish(self, replica: Replica) -> None:
        """Called after the last step, before the last evaluation."""
        return

    def consensus(self, replica: Replica) -> Sequence[Tensor] | None:
        """The consensus weights, which are evaluated and saved, as one flat tensor per region.

        None means the replica's own weights. All workers call this together. It averages the batch
        statistics, weighted by the samples that each worker has seen, and, where replicas may
        differ, the weights, weighted by `share`.
        """
        average_buffers(self.ctx, replica)
        if self.traits.replicas_identical or self.ctx.workers == 1:
            return None
        share = self.share()
        means = self._means = self._means or [
            allocate_like(self.ctx.transport, region.params) for region in replica.regions
        ]
        for mean, region in zip(means, replica.regions, strict=True):
            torch.mul(region.params, share, out=mean)
            self.ctx.peers.all_reduce(mean)
        self.ctx.recorder.write(
            "distance", samples=replica.samples_seen, value=distance_to(replica, means)
        )
        return means

    def share(self) -> float:
        """The weight of this worker's weights in the consensus weights, as in the next average."""
        return 1 / self.ctx.peers.size

    def state(self) -> dict[str, Any]:
        """What a checkpoint must save besides weights and optimizer; `setup` gets it back."""
        return {}

    def leave(self) -> None:
        """A worker's last call: it tells servers that it sends no more requests."""
        return

    def serve(self, ctx: Context, replica: Replica) -> None:
        """Run a server until the workers have left (only where `serves` is "ranks")."""
        raise NotImplementedError(f"{self.name} has no servers")


def traits_of(make: object) -> Traits:
    """What a registered strategy declares with its default options."""
    return getattr(make, "traits", Traits())


def codec_for(strategy: Strategy, choice: Spec | str) -> Codec:
    """Build a codec by name; raise BadRequest if the strategy cannot be combined with it."""
    codec = build_codec(choice)
    if not codec.lossless and (reason := strategy.refuses(codec)) is not None:
        raise BadRequest(f"codec {codec.name}: {reason}")
    return codec


def distance_to(replica: Replica, weights: Sequence[Tensor]) -> float:
    """The distance of a replica's weights from these weights, relative to the norm of these."""
    pairs = list(zip(replica.regions, weights, strict=True))
    apart = sum(
        float((region.params - other).abs().double().square().sum()) for region, other in pairs
    )
    length = sum(float(other.abs().double().square().sum()) for _, other in pairs)
    return math.sqrt(apart / length) if length else 0.0


def start_together(ctx: Context, replica: Replica) -> None:
    """Make all workers start from the same weights, and compare their checksums.

    Worker 0 sends its weights (init=broadcast), or all workers made them from the same seed
    (init=seed).
    """
    if ctx.workers == 1:
        return
    if ctx.init == "broadcast":
        for tensor in replica.model.state_dict(keep_vars=True).values():
            if isinstance(tensor, Tensor) and not _in_regions(tensor, replica):
                _broadcast(ctx, tensor.detach())
        for region in replica.regions:
            for flat in (region.params, region.buffers):
                if flat.numel():
                    ctx.peers.broadcast(flat)
    expect_identical(ctx, replica, "at the start")
    replica.common_buffers = [buffer.clone() for buffer in replica.float_buffers]
    replica.moved_buffers = [allocate_like(ctx.transport, b) for b in replica.float_buffers]


def expect_identical(ctx: Context, replica: Replica, when: str) -> None:
    """Raise unless all workers hold the same bits."""
    own = replica.checksum()
    low, high = torch.tensor([own]), torch.tensor([own])
    ctx.peers.control.all_reduce(low, "min")
    ctx.peers.control.all_reduce(high, "max")
    if int(low) != int(high):
        raise ReplicasDiffer(
            f"the workers' weights differ {when} (init={ctx.init}): with init=seed the model must"
            " depend on the seed only; use init=broadcast, which sends worker 0's weights to all"
        )


def average_buffers(ctx: Context, replica: Replica) -> None:
    """Average the batch statistics over the workers, weighted by samples seen.

    All workers take integer buffers from worker 0. The average is of each worker's change since the
    last agreement, so that buffers that no worker changes (tables, masks, also with inf in them)
    keep their bits.
    """
    replica.gather_buffers()
    if ctx.workers == 1:
        return
    if any(buffer.numel() for buffer in replica.float_buffers):
        seen = torch.tensor([replica.samples_seen], dtype=torch.float64)
        ctx.peers.control.all_reduce(seen)
        share = replica.samples_seen / float(seen) if float(seen) else 0.0
        for buffer, common, moved in zip(
            replica.float_buffers, replica.common_buffers, replica.moved_buffers, strict=True
        ):
            moved.zero_()
            if share:
                moved.copy_(torch.where(buffer == common, 0.0, buffer - common)).mul_(share)
            ctx.peers.all_reduce(moved)
            buffer.copy_(torch.where(moved == 0, common, common + moved))
            common.copy_(buffer)
    for buffer in replica.integer_buffers:
        _broadcast(ctx, buffer)


def _broadcast(ctx: Context, tensor: Tensor) -> None:
    """Send worker 0's tensor, which is in no region, to all."""
    whole = tensor.detach().to("cpu").contiguous()
    if whole.dtype is torch.bool:
        as_bytes = whole.to(torch.uint8)
        ctx.peers.control.broadcast(as_bytes)
        whole = as_bytes.to(torch.bool)
    else:
        ctx.peers.control.broadcast(whole)
    tensor.copy_(whole)


def _in_regions(tensor: Tensor, replica: Replica) -> bool:
    storage = tensor.untyped_storage().data_ptr()
    return any(
        storage == flat.untyped_storage().data_ptr()
        for r in replica.regions
        for flat in (r.params, r.buffers)
    )
