"""When the workers talk, what they say, to whom, and how stale it may be."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from paceline.codecs.base import Codec
from paceline.codecs.feedback import build_codec
from paceline.collectives.base import Collective
from paceline.errors import BadRequest, ReplicasDiffer
from paceline.registry import Spec
from paceline.transport.metered import Metered
from paceline.types import Batch, RecorderLike, ReplicaLike, Role


@dataclass
class Context:
    """What a strategy is given: nothing is read from anywhere else."""

    transport: Metered  # all ranks: the workers, then the servers
    peers: Metered  # the workers only; here the rank is the worker's index
    role: Role
    worker_index: int  # -1 on a server
    workers: int
    servers: tuple[int, ...]  # their ranks in `transport`
    codec: Codec
    collective: Callable[[str], Collective]  # by name, over the workers; "auto" chooses
    recorder: RecorderLike
    random: torch.Generator  # this rank's own
    shared_random: torch.Generator  # the same on all ranks
    init: Literal["broadcast", "seed"]
    overlap: bool = False  # whether gradients may be exchanged while the backward pass runs


class Strategy(ABC):
    """One way of keeping the workers together; a subclass's dataclass fields are its options."""

    name: ClassVar[str]
    replicas_identical: ClassVar[bool] = False  # after every step, on all workers, bit for bit
    exchanges: Literal["gradients", "weights", "nothing"] = "gradients"
    serves: ClassVar[Literal["ranks", "thread"] | None] = None
    in_step: ClassVar[bool] = True  # an exchange ends for all when the last worker has come to it
    flat: ClassVar[bool] = True  # False: works on the plain model
    shard: ClassVar[Literal["global", "static"]] = "global"  # unless the person says otherwise
    needs_processes: ClassVar[bool] = False
    needs_shared_memory: ClassVar[bool] = False
    skips_empty: ClassVar[bool] = (
        True  # False: a worker without samples must run one anyway (its gradient counts nothing)
    )
    most_workers: ClassVar[int | None] = None
    alone_is_serial: ClassVar[bool] = True  # with one worker it is plain SGD, bit for bit
    survives: bool = False  # goes on with the others when a worker (not the first) has died
    decides_alone: ClassVar[bool] = (
        False  # a worker that has converged stops, whatever the others do
    )
    resumes_exactly: ClassVar[bool] = True  # False: what comes out depends on who is faster
    noise_adds_up: bool | None = None
    """With privacy: True where nothing but the sum of all workers' gradients is ever used, so that the noise of each is a part
    of one whole; False where a worker's own gradient takes effect by itself; None where nobody has said what it reveals."""
    not_private_because: ClassVar[str] = "nobody has stated what it reveals (noise_adds_up)"

    observed: Mapping[str, Any] = MappingProxyType(
        {}
    )  # what a step showed beside its loss: recorded with it

    def setup(self, ctx: Context, replica: ReplicaLike) -> None:
        self.ctx = ctx
        start_together(ctx, replica)

    def scale(self, batch: Batch) -> float:
        """The factor on this worker's mean loss before its backward pass.

        Where gradients are exchanged it is the worker's share of the samples, so that the *sum* of
        the gradients over the workers is the gradient of the whole step.
        """
        return batch.share if self.exchanges == "gradients" else 1.0

    def refuses(self, codec: Codec) -> str | None:
        """Why it cannot be combined with a (lossy) codec; None: it can."""
        return f"strategy {self.name} sends nothing that a codec could make smaller"

    @abstractmethod
    def step(self, replica: ReplicaLike, batch: Batch) -> None:
        """The gradients of this worker's batch are in place: talk, update, or both."""

    def finish(self, replica: ReplicaLike) -> None:
        """After the last step, before the last evaluation."""
        return

    def consensus(self, replica: ReplicaLike) -> Sequence[Tensor] | None:
        """The weights that are evaluated, saved and released, one flat tensor per region; None: the
        replica's own.

        Called on all workers together. Batch statistics are averaged here, by how many samples each
        worker has seen; and where replicas may differ, so are the weights.
        """
        average_buffers(self.ctx, replica)
        if self.replicas_identical or self.ctx.workers == 1:
            return None
        means = [region.params / self.ctx.peers.size for region in replica.regions]
        for mean in means:
            self.ctx.peers.all_reduce(mean)
        self.ctx.recorder.write(
            "distance", samples=replica.samples_seen, value=distance_to(replica, means)
        )
        return means

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold besides weights and optimizer."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        return None

    def leave(self) -> None:
        """The very last thing that a worker does: nobody will be asked for anything any more."""
        return

    def serve(self, ctx: Context, replica: ReplicaLike) -> None:
        """What a server does until the workers have left (only where `serves` is "ranks")."""
        raise NotImplementedError(f"{self.name} has no servers")


def codec_for(strategy: Strategy, choice: Spec | str) -> Codec:
    """The codec of that name, unless the strategy has a reason against it."""
    codec = build_codec(choice)
    if not codec.lossless and (reason := strategy.refuses(codec)) is not None:
        raise BadRequest(f"codec {codec.name}: {reason}")
    return codec


def distance_to(replica: ReplicaLike, weights: Sequence[Tensor]) -> float:
    """How far a replica is from these weights, relative to their length."""
    pairs = list(zip(replica.regions, weights, strict=True))
    apart = sum(
        float((region.params - other).abs().double().square().sum()) for region, other in pairs
    )
    length = sum(float(other.abs().double().square().sum()) for _, other in pairs)
    return math.sqrt(apart / length) if length else 0.0


def start_together(ctx: Context, replica: ReplicaLike) -> None:
    """All workers start from the same weights: sent by worker 0, or made from the same seed. A
    checksum proves it.
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
    replica.common_buffers = [region.buffers.clone() for region in replica.regions]


def expect_identical(ctx: Context, replica: ReplicaLike, when: str) -> None:
    """Raise unless all workers hold the same bits."""
    own = replica.checksum()
    low, high = torch.tensor([own]), torch.tensor([own])
    ctx.peers.all_reduce(low, "min")
    ctx.peers.all_reduce(high, "max")
    if int(low) != int(high):
        raise ReplicasDiffer(
            f"the workers' weights differ {when} (init={ctx.init}): with init=seed the model must"
            " depend on the seed only; init=broadcast sends worker 0's to all"
        )


def average_buffers(ctx: Context, replica: ReplicaLike) -> None:
    """Batch statistics: the mean over the workers, by samples seen. Integer buffers come from
    worker 0.

    What is averaged is how far each worker has moved since all agreed last, so that buffers which
    nobody changes (tables, masks, also with inf in them) stay as they are, bit for bit.
    """
    replica.gather_buffers()
    if ctx.workers == 1:
        return
    if any(region.buffers.numel() for region in replica.regions):
        seen = torch.tensor([replica.samples_seen], dtype=torch.float64)
        ctx.peers.all_reduce(seen)
        share = replica.samples_seen / float(seen) if float(seen) else 0.0
        for region, common in zip(replica.regions, replica.common_buffers, strict=True):
            still = region.buffers == common
            moved = (
                torch.where(still, 0.0, region.buffers - common).mul_(share)
                if share
                else torch.zeros_like(common)
            )
            ctx.peers.all_reduce(moved)
            region.buffers.copy_(torch.where(moved == 0, common, common + moved))
            common.copy_(region.buffers)
    for buffer in replica.integer_buffers:
        _broadcast(ctx, buffer)


def _broadcast(ctx: Context, tensor: Tensor) -> None:
    whole = tensor if tensor.is_contiguous() else tensor.contiguous()
    if whole.dtype is torch.bool:
        as_bytes = whole.to(torch.uint8)
        ctx.peers.broadcast(as_bytes)
        whole = as_bytes.to(torch.bool)
    else:
        ctx.peers.broadcast(whole)
    if whole is not tensor:
        tensor.copy_(whole)


def _in_regions(tensor: Tensor, replica: ReplicaLike) -> bool:
    storage = tensor.untyped_storage().data_ptr()
    return any(
        storage == flat.untyped_storage().data_ptr()
        for r in replica.regions
        for flat in (r.params, r.buffers)
    )
