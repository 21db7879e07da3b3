"""Which samples a worker sees at a step: a pure function of (seed, epoch, cursor, batch sizes).

Because it is pure, every worker knows the samples of all workers without communication. So
gradients are weighted by sample counts, a run resumes where it was, and batch sizes or the number
of workers may change in the middle of an epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.common.seeding import generator
from paceline.errors import BadRequest


@dataclass(frozen=True)
class Cursor:
    """The place of a step in the data.

    `position` counts the samples of this epoch (global shards), its steps (static shards) or its
    batches (the order of a DataLoader).
    """

    epoch: int = 0
    position: int = 0


class Shards(Protocol):
    batch_sizes: tuple[int, ...]

    @property
    def steps_per_epoch(self) -> int | None:
        """The steps of an epoch; None where that is not known before its end."""
        ...

    def counts(self, cursor: Cursor) -> tuple[int, ...]:
        """Return the number of samples of each worker in the step at `cursor`."""
        ...

    def take(self, cursor: Cursor, worker: int) -> Tensor | Sequence[Any]:
        """Return the indices of one worker's samples in the step at `cursor`."""
        ...

    def advance(self, cursor: Cursor) -> Cursor:
        """Return the cursor of the next step; after the last step of an epoch, of the next one."""
        ...

    def state(self, cursor: Cursor) -> dict[str, Any]:
        """Return what a checkpoint needs to continue from `cursor`."""
        ...

    def restore(self, state: dict[str, Any]) -> Cursor:
        """Continue from a checkpoint; its number of workers and batch sizes may differ."""
        ...


def split(total: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Split `total` in proportion to `weights`; each part is within one of its exact share."""
    whole = sum(weights)
    if whole <= 0 or min(weights) < 0:
        raise BadRequest(f"weights {list(weights)}: they must be 0 or more, and not all 0")
    ends = [int(total * c // whole) for c in accumulate(weights)]
    ends[-1] = total
    return tuple(b - a for a, b in zip([0, *ends], ends, strict=False))


@dataclass(frozen=True)
class Cuts:
    """How rows are cut into batches of a given size."""

    drop_last: bool = False  # leave out a last batch that is not full
    no_lone_row: bool = False  # avoid batches of one row, on which batch norm cannot train

    def steps(self, rows: int, size: int) -> int:
        """Return the number of batches of `size` that `rows` rows make."""
        if not size or self.drop_last:
            return rows // size if size else 0
        return -(-rows // size) - int(size == 2 and self._lone(rows, size))

    def bounds(self, rows: int, size: int, position: int) -> tuple[int, int]:
        """Return the first row of a batch, and the first row after it.

        If the last batch had one row only, it takes another one from the batch before it.
        """
        start, stop = min(rows, position * size), min(rows, (position + 1) * size)
        if self._lone(rows, size):
            last = self.steps(rows, size) - 1
            if position > last:  # another worker has more steps
                return rows, rows
            if position == last:
                return (rows - 2 if size > 2 else start), rows
            if position == last - 1 and size > 2:
                return start, rows - 2
        return start, stop

    def _lone(self, rows: int, size: int) -> bool:
        return self.no_lone_row and not self.drop_last and 1 < size < rows and rows % size == 1

    def split(self, rows: int, weights: Sequence[float]) -> tuple[int, ...]:
        """Split the rows of one step over the workers."""
        if not self.no_lone_row or rows < 2:
            return split(rows, weights)
        counts = [2 * pairs for pairs in split(rows // 2, weights)]
        counts[counts.index(max(counts))] += rows % 2
        return tuple(counts)


@dataclass
class GlobalShards:
    """Step t takes the next G samples of one shuffled epoch; each worker gets a slice of them.

    So P workers make the same steps as serial SGD with batch size G.
    """

    samples: int
    batch_sizes: tuple[int, ...]
    seed: int = 0
    cuts: Cuts = Cuts()
    _order: tuple[int, Tensor] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.samples < 1 or sum(self.batch_sizes) < 1 or min(self.batch_sizes) < 0:
            raise BadRequest(
                f"{self.samples} samples with batch sizes {self.batch_sizes}: nothing to train on"
            )
        if not self.steps_per_epoch:
            raise _no_full_batch(self.samples, self.batch_sizes)

    @property
    def global_batch(self) -> int:
        return sum(self.batch_sizes)

    @property
    def steps_per_epoch(self) -> int:
        if self.cuts.drop_last:
            return self.samples // self.global_batch
        return -(-self.samples // self.global_batch)

    def order(self, epoch: int) -> Tensor:
        if self._order is None or self._order[0] != epoch:
            self._order = (
                epoch,
                torch.randperm(self.samples, generator=generator(self.seed, "epoch", epoch)),
            )
        return self._order[1]

    def counts(self, cursor: Cursor) -> tuple[int, ...]:
        here = min(self.global_batch, self.samples - cursor.position)
        return (
            self.batch_sizes
            if here == self.global_batch
            else self.cuts.split(here, self.batch_sizes)
        )

    def take(self, cursor: Cursor, worker: int) -> Tensor:
        counts = self.counts(cursor)
        start = cursor.position + sum(counts[:worker])
        return self.order(cursor.epoch)[start : start + counts[worker]]

    def advance(self, cursor: Cursor) -> Cursor:
        return self._within(cursor.epoch, cursor.position + self.global_batch)

    def _within(self, epoch: int, position: int) -> Cursor:
        """Return the cursor at this position, or of the next epoch if this one has no step left."""
        least = self.global_batch if self.cuts.drop_last else 1
        return Cursor(epoch, position) if position + least <= self.samples else Cursor(epoch + 1, 0)

    def state(self, cursor: Cursor) -> dict[str, Any]:
        return {"kind": "global", "epoch": cursor.epoch, "position": cursor.position}

    def restore(self, state: dict[str, Any]) -> Cursor:
        _same_kind("global", state)
        return self._within(state["epoch"], state["position"])


@dataclass
class StaticShards:
    """Each worker keeps one part of the data for the whole run and shuffles it in each epoch.

    All workers make the same number of steps. A worker without samples left gets empty batches.
    """

    samples: int
    batch_sizes: tuple[int, ...]
    seed: int = 0
    labels: Tensor | None = None  # if given, samples are sorted by label before the cut (non-IID)
    arrangement: Tensor | None = None  # if given, samples are in this order before the cut
    cuts: Cuts = Cuts()
    _seen: tuple[int, Tensor] | None = field(default=None, repr=False, compare=False)
    _orders: tuple[int, list[Tensor]] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.samples < 1 or sum(self.batch_sizes) < 1 or min(self.batch_sizes) < 0:
            raise BadRequest(
                f"{self.samples} samples with batch sizes {self.batch_sizes}: nothing to train on"
            )
        by_label = self.labels is not None
        where = (
            torch.argsort(self.labels, stable=True) if self.labels is not None else self.arrangement
        )
        where = torch.arange(self.samples) if where is None else where
        if by_label and len(where) != self.samples:
            raise BadRequest(f"{len(where)} labels for {self.samples} samples")
        # floor(N * (b_0 + ... + b_p) / G): with equal batch sizes exactly [p*N//P, (p+1)*N//P)
        self.chunks = where.split(list(split(self.samples, self.batch_sizes)))
        if not self.steps_per_epoch:
            raise _no_full_batch(self.samples, self.batch_sizes)

    def orders(self, epoch: int) -> list[Tensor]:
        if self._orders is None or self._orders[0] != epoch:
            orders = []
            for worker, whole in enumerate(self.chunks):
                chunk = whole
                if self._seen is not None and self._seen[0] == epoch:
                    chunk = whole[~self._seen[1][whole]]
                shuffle = torch.randperm(
                    len(chunk), generator=generator(self.seed, "epoch", epoch, "worker", worker)
                )
                orders.append(chunk[shuffle])
            self._orders = (epoch, orders)
        return self._orders[1]

    def _steps(self, epoch: int) -> int:
        return common_steps(self.cuts, [len(o) for o in self.orders(epoch)], self.batch_sizes)

    @property
    def steps_per_epoch(self) -> int:
        return common_steps(self.cuts, [len(c) for c in self.chunks], self.batch_sizes)

    def counts(self, cursor: Cursor) -> tuple[int, ...]:
        bounds = [self._bounds(cursor, worker) for worker in range(len(self.batch_sizes))]
        return tuple(stop - start for start, stop in bounds)

    def _bounds(self, cursor: Cursor, worker: int) -> tuple[int, int]:
        return self.cuts.bounds(
            len(self.orders(cursor.epoch)[worker]), self.batch_sizes[worker], cursor.position
        )

    def take(self, cursor: Cursor, worker: int) -> Tensor:
        return self.orders(cursor.epoch)[worker][slice(*self._bounds(cursor, worker))]

    def advance(self, cursor: Cursor) -> Cursor:
        position = cursor.position + 1
        return (
            Cursor(cursor.epoch, position)
            if position < self._steps(cursor.epoch)
            else Cursor(cursor.epoch + 1, 0)
        )

    def state(self, cursor: Cursor) -> dict[str, Any]:
        seen = torch.zeros(self.samples, dtype=torch.bool)
        if self._seen is not None and self._seen[0] == cursor.epoch:
            seen |= self._seen[1]
        start = seen.clone()
        for worker, order in enumerate(self.orders(cursor.epoch)):
            seen[order[: self._bounds(cursor, worker)[0]]] = True
        return {
            "kind": "static",
            "epoch": cursor.epoch,
            "position": cursor.position,
            "batch_sizes": list(self.batch_sizes),
            "seen": seen,
            "seen_at_start": start,
        }

    def restore(self, state: dict[str, Any]) -> Cursor:
        _same_kind("static", state)
        self._orders = None
        same = tuple(state["batch_sizes"]) == self.batch_sizes
        seen = state["seen_at_start"] if same else state["seen"]
        self._seen = (state["epoch"], seen) if bool(seen.any()) else None
        if not self._steps(state["epoch"]):  # the rest of the epoch makes no full batch
            return Cursor(state["epoch"] + 1, 0)
        return Cursor(state["epoch"], state["position"] if same else 0)


def common_steps(cuts: Cuts, rows: Sequence[int], sizes: Sequence[int]) -> int:
    """Return the steps of an epoch, the same number for all workers.

    An epoch ends when the last worker has no samples left. With `drop_last` it ends when the first
    worker cannot fill a batch.
    """
    each = [cuts.steps(n, size) for n, size in zip(rows, sizes, strict=True) if size]
    return min(each) if cuts.drop_last else max(each)


def _no_full_batch(samples: int, sizes: Sequence[int]) -> BadRequest:
    told = ",".join(map(str, sizes))
    return BadRequest(
        f"drop_last: {samples} samples make no full batch for workers with batch_size={told}; use"
        " smaller batches"
    )


def _same_kind(kind: str, state: dict[str, Any]) -> None:
    if state["kind"] != kind:
        raise BadRequest(
            f"the checkpoint was made with shard={state['kind']}: resume it with that, not with"
            f" shard={kind}"
        )
