"""Which samples a worker sees at a step: a pure function of (seed, epoch, cursor, batch sizes).

Because it is pure, every worker knows every other worker's part without asking: gradients are weighted by sample
counts and nothing is exchanged for it, a run resumes where it was, and batch sizes or the number of workers may change
in the middle of an epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.errors import BadRequest
from paceline.seeding import generator


@dataclass(frozen=True)
class Cursor:
    """How far a run is: `position` counts samples of this epoch (global shards) or steps of it (static shards)."""

    epoch: int = 0
    position: int = 0


class Shards(Protocol):
    batch_sizes: tuple[int, ...]

    @property
    def steps_per_epoch(self) -> int: ...
    def counts(self, cursor: Cursor) -> tuple[int, ...]:
        """Samples per worker in the step at `cursor`."""
        ...

    def take(self, cursor: Cursor, worker: int) -> Tensor:
        """The samples of one worker in the step at `cursor`."""
        ...

    def advance(self, cursor: Cursor) -> Cursor:
        """The cursor of the next step; at the end of an epoch, the start of the next one."""
        ...

    def state(self, cursor: Cursor) -> dict[str, Any]:
        """What a checkpoint needs to go on from here."""
        ...

    def restore(self, state: dict[str, Any]) -> Cursor:
        """Go on from a checkpoint, also one of another number of workers or other batch sizes."""
        ...


def split(total: int, weights: Sequence[float]) -> tuple[int, ...]:
    """`total` cut in proportion to `weights`; the parts differ from the exact share by less than one."""
    whole = sum(weights)
    if whole <= 0 or min(weights) < 0:
        raise BadRequest(f"weights {list(weights)}: they must be 0 or more, and not all 0")
    ends = [int(total * c // whole) for c in accumulate(weights)]
    ends[-1] = total
    return tuple(b - a for a, b in zip([0, *ends], ends, strict=False))


@dataclass
class GlobalShards:
    """Step t takes the next G of one shuffled epoch, each worker a contiguous slice: P workers follow serial SGD exactly."""

    samples: int
    batch_sizes: tuple[int, ...]
    seed: int = 0
    _order: tuple[int, Tensor] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.samples < 1 or sum(self.batch_sizes) < 1 or min(self.batch_sizes) < 0:
            raise BadRequest(f"{self.samples} samples with batch sizes {self.batch_sizes}: nothing to train on")

    @property
    def global_batch(self) -> int:
        return sum(self.batch_sizes)

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.samples // self.global_batch)

    def order(self, epoch: int) -> Tensor:
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, torch.randperm(self.samples, generator=generator(self.seed, "epoch", epoch)))
        return self._order[1]

    def counts(self, cursor: Cursor) -> tuple[int, ...]:
        here = min(self.global_batch, self.samples - cursor.position)
        return self.batch_sizes if here == self.global_batch else split(here, self.batch_sizes)

    def take(self, cursor: Cursor, worker: int) -> Tensor:
        counts = self.counts(cursor)
        start = cursor.position + sum(counts[:worker])
        return self.order(cursor.epoch)[start : start + counts[worker]]

    def advance(self, cursor: Cursor) -> Cursor:
        position = cursor.position + self.global_batch
        return Cursor(cursor.epoch, position) if position < self.samples else Cursor(cursor.epoch + 1, 0)

    def state(self, cursor: Cursor) -> dict[str, Any]:
        return {"kind": "global", "epoch": cursor.epoch, "position": cursor.position}

    def restore(self, state: dict[str, Any]) -> Cursor:
        _same_kind("global", state)
        return Cursor(state["epoch"], state["position"])


@dataclass
class StaticShards:
    """Each worker keeps one chunk of the data for the whole run and shuffles it anew each epoch.

    All workers make the same number of steps; one that runs out gets empty batches.
    """

    samples: int
    batch_sizes: tuple[int, ...]
    seed: int = 0
    labels: Tensor | None = None  # given: chunks are cut from the samples sorted by label (non-IID)
    arrangement: Tensor | None = None  # given: chunks are cut from the samples in this order
    _seen: tuple[int, Tensor] | None = field(default=None, repr=False, compare=False)
    _orders: tuple[int, list[Tensor]] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.samples < 1 or sum(self.batch_sizes) < 1 or min(self.batch_sizes) < 0:
            raise BadRequest(f"{self.samples} samples with batch sizes {self.batch_sizes}: nothing to train on")
        by_label = self.labels is not None
        where = torch.argsort(self.labels, stable=True) if self.labels is not None else self.arrangement
        where = torch.arange(self.samples) if where is None else where
        if by_label and len(where) != self.samples:
            raise BadRequest(f"{len(where)} labels for {self.samples} samples")
        # floor(N * (b_0 + ... + b_p) / G): with equal batch sizes exactly [p*N//P, (p+1)*N//P)
        self.chunks = where.split(list(split(self.samples, self.batch_sizes)))

    def orders(self, epoch: int) -> list[Tensor]:
        if self._orders is None or self._orders[0] != epoch:
            orders = []
            for worker, whole in enumerate(self.chunks):
                chunk = whole
                if self._seen is not None and self._seen[0] == epoch:
                    chunk = whole[~self._seen[1][whole]]
                shuffle = torch.randperm(len(chunk), generator=generator(self.seed, "epoch", epoch, "worker", worker))
                orders.append(chunk[shuffle])
            self._orders = (epoch, orders)
        return self._orders[1]

    def _steps(self, epoch: int) -> int:
        lengths = [len(o) for o in self.orders(epoch)]
        return max(-(-n // b) if b else 0 for n, b in zip(lengths, self.batch_sizes, strict=True))

    @property
    def steps_per_epoch(self) -> int:
        return max(-(-len(c) // b) if b else 0 for c, b in zip(self.chunks, self.batch_sizes, strict=True))

    def counts(self, cursor: Cursor) -> tuple[int, ...]:
        return tuple(
            max(0, min(b, len(o) - cursor.position * b))
            for o, b in zip(self.orders(cursor.epoch), self.batch_sizes, strict=True)
        )

    def take(self, cursor: Cursor, worker: int) -> Tensor:
        size = self.batch_sizes[worker]
        return self.orders(cursor.epoch)[worker][cursor.position * size : (cursor.position + 1) * size]

    def advance(self, cursor: Cursor) -> Cursor:
        position = cursor.position + 1
        return Cursor(cursor.epoch, position) if position < self._steps(cursor.epoch) else Cursor(cursor.epoch + 1, 0)

    def state(self, cursor: Cursor) -> dict[str, Any]:
        seen = torch.zeros(self.samples, dtype=torch.bool)
        if self._seen is not None and self._seen[0] == cursor.epoch:
            seen |= self._seen[1]
        start = seen.clone()
        for order, size in zip(self.orders(cursor.epoch), self.batch_sizes, strict=True):
            seen[order[: cursor.position * size]] = True
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
        return Cursor(state["epoch"], state["position"] if same else 0)


def _same_kind(kind: str, state: dict[str, Any]) -> None:
    if state["kind"] != kind:
        raise BadRequest(f"the checkpoint was made with shard={state['kind']}; resume it with the same, not {kind}")
