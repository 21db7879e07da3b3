"""What a loop of the user's own asks of all workers: means, tensors, one worker's output."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from paceline.common.seeding import OwnRandom, derive
from paceline.data.batches import evaluation_slices
from paceline.data.content import to_device
from paceline.data.passes import DEFAULT_BATCH
from paceline.errors import BadRequest
from paceline.run.loop.pairs import Pairs
from paceline.strategies.base import Context, Strategy
from paceline.transport.together import assemble

MOST_DIMENSIONS = 16
DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip


class Talk:
    """One worker among others. All workers make these calls together, but for `print`."""

    ctx: Context
    strategy: Strategy
    seed: int
    local_rank: int  # among the ranks on this host
    _pairs: Pairs
    _device: torch.device | None = None  # that of the first model that was prepared

    @property
    def steps(self) -> int:
        """The steps so far; with several optimizers, of the one that made most."""
        return max((pair.steps for pair in self._pairs), default=0)

    @property
    def epoch(self) -> int:
        """The number of whole passes over the batches so far; `load` restores it."""
        return next((p.batches.epoch for p in self._pairs if p.batches is not None), 0)

    @property
    def rank(self) -> int:
        return self.ctx.worker_index

    @property
    def workers(self) -> int:
        return self.ctx.workers

    @property
    def leads(self) -> bool:
        """Whether this is the worker that prints and saves."""
        return self.ctx.worker_index == 0

    @property
    def device(self) -> torch.device:
        """The device of the model that was prepared.

        Before that, a GPU of this worker's own where CUDA is available, otherwise the CPU.
        """
        if self._device is not None:
            return self._device
        if not torch.cuda.is_available():
            return torch.device("cpu")
        return torch.device("cuda", self.local_rank % torch.cuda.device_count())

    def print(self, *values: object, **options: Any) -> None:
        """Print on worker 0 only."""
        if self.leads:
            print(*values, **{"flush": True, **options})

    def any(self, flag: bool) -> bool:
        """Return whether `flag` is true on any worker: to stop early, all together."""
        votes = torch.tensor([float(flag)])
        self._assemble()
        self.ctx.peers.uncounted().control.all_reduce(votes, "max")
        return bool(votes)

    def mean(self, value: float | Tensor, weight: float = 1.0) -> Any:
        """Return the mean over the workers of a number or of a tensor.

        `weight`: how much this worker's counts, such as its rows. With weight 0 it does not count.
        """
        if not 0 <= weight < float("inf"):
            raise BadRequest(f"pace.mean(weight={weight}): it must be a number of 0 or more")
        own, weight = _wide(value), float(weight > 0) if self.workers == 1 else weight
        own = own * weight if weight else torch.zeros_like(own)
        table = torch.cat([own.reshape(-1), torch.tensor([float(weight)], dtype=own.dtype)])
        self._add_up(table)
        mean = (table[:-1] / table[-1]).reshape(own.shape)
        if not isinstance(value, Tensor):
            return float(mean)
        exact = value.is_floating_point() or value.is_complex()
        return mean.to(value.device, value.dtype if exact else torch.get_default_dtype())

    def sum(self, value: float | Tensor) -> Any:
        """Return the sum over the workers of a number or of a tensor, such as right answers.

        The sum of integers is one, too.
        """
        if isinstance(value, Tensor):
            floating = value.is_floating_point() or value.is_complex()
            own = _wide(value) if floating else value.detach().to("cpu", torch.int64, copy=True)
            dtype = value.dtype if floating else torch.int64
            return self._add_up(own.reshape(-1)).reshape(own.shape).to(value.device, dtype)
        kind = torch.int64 if isinstance(value, int) else torch.float64
        return self._add_up(torch.tensor([value], dtype=kind)).item()

    def _add_up(self, own: Tensor) -> Tensor:
        """Add up a tensor over the workers, in place."""
        self._assemble()
        self.ctx.peers.uncounted().control.all_reduce(own)
        return own

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return all workers' tensors in the order of their ranks. Their shapes may differ."""
        if not isinstance(tensor, Tensor) or tensor.dtype not in DTYPES:
            kind = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise BadRequest(f"pace.gather takes a tensor of numbers, not {kind}")
        if tensor.dim() > MOST_DIMENSIONS:
            raise BadRequest(f"pace.gather takes tensors of {MOST_DIMENSIONS} dimensions or fewer")
        self._assemble()
        line, own = self.ctx.peers.uncounted().control, tensor.detach().to("cpu").contiguous()
        shapes = torch.zeros(line.size, 2 + MOST_DIMENSIONS, dtype=torch.int64)
        shapes[line.rank, : 2 + own.dim()] = torch.tensor(
            [DTYPES.index(own.dtype), own.dim(), *own.shape]
        )
        line.all_reduce(shapes)
        gathered: list[Tensor] = []
        for rank, (dtype, dimensions, *shape) in enumerate(shapes.tolist()):
            theirs = torch.empty(shape[:dimensions], dtype=DTYPES[dtype])
            if rank == line.rank:
                theirs.copy_(own)
            if theirs.numel():
                line.broadcast(theirs.reshape(-1).view(torch.uint8), rank)
            gathered.append(theirs.to(tensor.device))
        return gathered

    def evaluation(self, data: Any, batch_size: int = DEFAULT_BATCH) -> Iterator[Any]:
        """Yield this worker's batches of data for an evaluation: each sample is on one worker.

        `data` is a DataLoader, a Dataset, or a tuple of tensors. Workers may have different numbers
        of batches: add up in the loop, and call `pace.mean(total / rows, weight=rows)` after it.
        """
        for batch in self._share(data, batch_size):
            yield to_device(batch, self.device)

    def _share(self, data: Any, batch_size: int) -> Iterable[Any]:
        rank, workers = self.rank, self.workers
        if isinstance(data, DataLoader):
            if isinstance(data.dataset, IterableDataset) or data.batch_sampler is None:
                return itertools.islice(data, rank, None, workers)
            with OwnRandom(derive(self.seed, "evaluation"))():  # all workers draw the same order
                mine = list(itertools.islice(data.batch_sampler, rank, None, workers))
            return DataLoader(
                data.dataset,
                batch_sampler=mine,
                num_workers=data.num_workers,
                collate_fn=data.collate_fn,
                pin_memory=data.pin_memory,
                worker_init_fn=data.worker_init_fn,
            )
        if isinstance(data, (tuple, list)) and data and all(isinstance(t, Tensor) for t in data):
            slices = evaluation_slices(len(data[0]), workers, rank, batch_size)
            return (tuple(t[rows] for t in data) for rows in slices)
        if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
            slices = evaluation_slices(len(data), workers, rank, batch_size)
            return DataLoader(data, batch_sampler=[rows.tolist() for rows in slices])
        raise BadRequest(
            "pace.evaluation takes a DataLoader, a Dataset or a tuple of tensors, not a"
            f" {type(data).__name__}"
        )

    def _assemble(self) -> None:
        """Wait, without a deadline, for the workers of an asynchronous strategy."""
        if self.workers > 1 and not self.strategy.traits.in_step:
            assemble(self.ctx.transport, range(self.workers))


def _wide(value: float | Tensor) -> Tensor:
    """A copy on the CPU in double precision."""
    if not isinstance(value, Tensor):
        return torch.tensor(float(value), dtype=torch.float64)
    wide = torch.complex128 if value.is_complex() else torch.float64
    return value.detach().to("cpu", wide, copy=True)


def say(text: str) -> None:
    """Write a notice to standard error."""
    print(f"paceline: {text}", file=sys.stderr, flush=True)
