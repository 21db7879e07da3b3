"""Measure how long workers compute in a step: by batch size, alone, and beside each other.

In every round each batch size has a block of steps on worker 0 alone, one on worker 1 alone, and
one on both at once. So slow changes of the machine hit everything that is compared alike. The first
round warms up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from paceline.data.base import Stream
from paceline.data.batches import ShardBatches, StreamBatches
from paceline.errors import BadRequest
from paceline.planning.compute import PARTS, Compute, Steps
from paceline.planning.fit import median, quantiles
from paceline.replica.replica import Replica
from paceline.request.job import Job
from paceline.transport.base import Transport
from paceline.types import Batch

BLOCK_S = 0.25  # the aim for a block: many steps, and several rounds within the time
MOST_STEPS = 64  # of a block
LEAST_ROUNDS = 2  # at least, also where they take longer than planned
READY_STEPS = 10
MOST_SKIPPED = 1000  # batches of another size than was asked for
ROUNDS_AIMED_AT = 8

Progress = Callable[[float], None]  # takes the share of the time that has passed


@dataclass
class Measured:
    """What one worker measured: per batch size the steps of every block, alone and together.

    A step is its seconds of loading, forward, backward, update.
    """

    alone: dict[int, list[tuple[float, ...]]] = field(default_factory=dict)
    together: dict[int, list[tuple[float, ...]]] = field(default_factory=dict)
    cpu_s: dict[int, list[float]] = field(default_factory=dict)  # of each step alone
    ready: tuple[float, ...] = ()


class Loop:
    """One worker's steps as a run makes them, without an exchange, timed in parts."""

    def __init__(self, job: Job, replica: Replica, worker: int, batch_sizes: Sequence[int]) -> None:
        self.replica = replica
        self._forward_ended = 0.0
        self._batches = {size: iter(batches_of(job, size, worker)) for size in batch_sizes}
        if replica.step is not None:
            replica.step = self._marked(replica.step)
        else:
            replica.loss = self._marked(replica.loss)

    def _marked(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Note when the loss is computed: the forward pass ends there."""

        def marked(*given: object) -> Tensor:
            loss = function(*given)
            self._forward_ended = time.perf_counter()
            return loss

        return marked

    def step(self, batch_size: int) -> tuple[float, ...]:
        """Make a step with a full batch; return the seconds of its four parts."""
        for _ in range(MOST_SKIPPED):
            began = time.perf_counter()
            batch = next(self._batches[batch_size])
            if batch.weight == batch_size:  # the last batch of an epoch may be smaller
                break
        else:
            raise BadRequest(
                f"this data gives no batches of {batch_size} samples, but of {batch.weight:g}: use"
                f" --batch-sizes {batch.weight:g}"
            )
        loaded = time.perf_counter()
        self.replica.forward_backward(batch, batch.share)
        computed = time.perf_counter()
        self._update()
        updated = time.perf_counter()
        forward = self._forward_ended
        return loaded - began, forward - loaded, computed - forward, updated - computed

    def _update(self) -> None:
        """Take the optimizer's step; float16 skips it where gradients are not finite."""
        finite, scale = self.replica.unscale(), self.replica.precision.scale
        if scale is not None:
            scale.update(finite)
        if finite:
            self.replica.update()

    def ready(self, batch_size: int, count: int = READY_STEPS) -> tuple[float, ...]:
        """Return when each gradient is complete, as a fraction of the backward pass.

        In the order of the flat gradients; 1 for one that the backward pass does not reach.
        """
        at: dict[int, float] = {}
        fractions: dict[int, list[float]] = {id(p): [] for p, _ in self.replica.places}
        hooks = [
            p.register_post_accumulate_grad_hook(
                lambda p: at.__setitem__(id(p), time.perf_counter())
            )
            for p, _ in self.replica.places
        ]
        try:
            for _ in range(count):
                at.clear()
                backward_s = self.step(batch_size)[2]
                for parameter, seen in fractions.items():
                    when = at.get(parameter, float("inf")) - self._forward_ended
                    seen.append(min(1.0, max(0.0, when / backward_s)))
        finally:
            for hook in hooks:
                hook.remove()
        return tuple(median(seen) for seen in fractions.values())


def batches_of(job: Job, batch_size: int, worker: int) -> Iterator[Batch]:
    """The batches that a worker of a run with this batch size gets."""
    train, device = job.data.train, torch.device("cpu")
    if isinstance(train, Stream):
        return iter(
            StreamBatches(
                train, batch_size, job.workers, worker, job.config.seed, device, False, job.split
            )
        )
    config = job.config.merged({"batch_size": batch_size})
    shards = replace(job, config=config, batch_sizes=(batch_size,) * job.workers).shards()
    return iter(ShardBatches(train, shards, worker, device, False, job.config.seed, job.split))


def measure_steps(
    loop: Loop,
    batch_sizes: Sequence[int],
    transport: Transport,
    seconds: float,
    progress: Progress = lambda share: None,
) -> Measured:
    """Make blocks of steps until the time is over, in step with the other worker."""
    found = Measured(
        {b: [] for b in batch_sizes}, {b: [] for b in batch_sizes}, {b: [] for b in batch_sizes}
    )
    began = time.perf_counter()
    counts = _steps_per_block(loop, batch_sizes, transport, seconds)
    number = 0
    while _agreed(transport, number < LEAST_ROUNDS or time.perf_counter() - began < seconds):
        for size in batch_sizes:
            for turn in range(transport.size):
                transport.barrier()
                if turn == transport.rank:
                    for _ in range(counts[size]):
                        cpu_s = time.process_time()
                        found.alone[size].append(loop.step(size))
                        found.cpu_s[size].append(time.process_time() - cpu_s)
            transport.barrier()
            if transport.size > 1:
                steps = [loop.step(size) for _ in range(counts[size])]
                # The other worker may have ended its block: the last steps are not together.
                found.together[size] += steps[: max(1, len(steps) - 1)]
            progress(min(1.0, (time.perf_counter() - began) / seconds))
        number += 1
    if transport.rank == 0:
        found.ready = loop.ready(batch_sizes[len(batch_sizes) // 2])
    transport.barrier()
    return found


def _steps_per_block(
    loop: Loop, batch_sizes: Sequence[int], transport: Transport, seconds: float
) -> dict[int, int]:
    """Warm up, and return how many steps fill a block; worker 0 decides for both."""
    blocks = ROUNDS_AIMED_AT * len(batch_sizes) * (2 * transport.size - 1)
    aim = min(BLOCK_S, seconds / blocks)
    counts = torch.ones(len(batch_sizes), dtype=torch.int64)
    for place, size in enumerate(batch_sizes):
        first = sum(loop.step(size))
        until = time.perf_counter() + min(aim, 4 * first)
        taken = [sum(loop.step(size))]
        while time.perf_counter() < until:
            taken.append(sum(loop.step(size)))
        counts[place] = max(1, min(MOST_STEPS, int(aim / median(taken))))
    transport.control.broadcast(counts)
    return {size: int(count) for size, count in zip(batch_sizes, counts, strict=True)}


def _agreed(transport: Transport, goes_on: bool) -> bool:
    """Return what worker 0 says."""
    said = torch.tensor([int(goes_on)])
    transport.control.broadcast(said)
    return bool(said.item())


def summarise(workers: Sequence[Measured], threads: int = 1) -> Compute:
    """Make the distributions of what all workers measured.

    A worker's speed is the median over the batch sizes of (mean of the workers' medians) / (own
    median). Multiplied by it, the steps of all workers have one median: what is left is the noise.
    """
    sizes = sorted(workers[0].alone)
    medians = {b: [median([sum(s) for s in w.alone[b]]) for w in workers] for b in sizes}
    raw = [
        median([sum(medians[b]) / len(workers) / medians[b][w] for b in sizes])
        for w in range(len(workers))
    ]
    speeds = tuple(value * len(raw) / sum(raw) for value in raw)
    steps = []
    for size in sizes:
        own = [(sum(s) * speeds[w], s) for w, each in enumerate(workers) for s in each.alone[size]]
        parts = {part: median([step[place] for _, step in own]) for place, part in enumerate(PARTS)}
        cpu = [taken * speeds[w] for w, each in enumerate(workers) for taken in each.cpu_s[size]]
        steps.append(Steps(size, quantiles([s for s, _ in own]), len(own), median(cpu), **parts))
    ratios = [
        median([sum(s) for s in w.together[b]]) / medians[b][place]
        for b in sizes
        for place, w in enumerate(workers)
        if w.together[b]
    ]
    together = median(ratios) if ratios else None
    cpu_s = sum(sum(taken) for w in workers for taken in w.cpu_s.values())
    wall_s = sum(sum(step) for w in workers for taken in w.alone.values() for step in taken)
    core_share = min(1.0, cpu_s / wall_s)
    return Compute(tuple(steps), threads, speeds, together, core_share, workers[0].ready)


def fitting(job: Job, batch_sizes: Sequence[int]) -> tuple[list[int], list[str]]:
    """Return the batch sizes that this data has enough samples for, and a sentence on the rest."""
    train = job.data.train
    if job.data.batch_size is not None:
        own = job.data.batch_size
        return [own], [f"The batches are those of your DataLoader, of {own} samples."]
    if isinstance(train, Stream):
        return sorted(set(batch_sizes)), []
    most = len(train) // job.workers
    fits = sorted({size for size in batch_sizes if size <= most})
    if not fits:
        raise BadRequest(
            f"batch_sizes={','.join(map(str, batch_sizes))}: {job.workers} workers have {most} of"
            f" the {len(train)} training samples each; use --batch-sizes {max(1, most // 4)},{most}"
        )
    left_out = sorted(set(batch_sizes) - set(fits))
    if not left_out:
        return fits, []
    said = ", ".join(map(str, left_out))
    return fits, [f"Batch size {said} was not measured: there are {most} samples per worker."]
