"""Batches read through PyTorch's DataLoader: by its worker processes, ahead of their use."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from paceline.common.parents import die_with_parent
from paceline.common.seeding import derive
from paceline.data.base import Samples
from paceline.data.shards import Cursor, Shards


class EndsWithRank:
    """A `worker_init_fn` that ties a loader's process to its rank, then calls the user's own.

    The kernel kills the process when the rank ends, even by SIGKILL (Linux). Elsewhere, and where
    the process is no child of the rank's main thread, PyTorch's watchdog ends it within seconds.
    """

    def __init__(self, own: Callable[[int], None] | None, loader: DataLoader[Any]) -> None:
        context = loader.multiprocessing_context or multiprocessing
        self.own, self.parent = own, os.getpid()
        # The kernel watches the thread that forks, and a fork server is not the rank.
        self.tied = (
            threading.current_thread() is threading.main_thread()
            and context.get_start_method() != "forkserver"
        )

    def __call__(self, worker: int) -> None:
        if self.tied:
            die_with_parent(self.parent)
        if self.own is not None:
            self.own(worker)


def iterate(loader: DataLoader[Any]) -> Iterator[Any]:
    """Return `iter(loader)`, with processes that end with this one."""
    if loader.num_workers == 0:
        return iter(loader)
    own = loader.worker_init_fn
    loader.worker_init_fn = EndsWithRank(own, loader)
    try:
        return iter(loader)
    finally:
        loader.worker_init_fn = own


def like(
    loader: DataLoader[Any],
    dataset: Dataset[Any],
    batches: Iterable[Sequence[Any]],
    random: torch.Generator,
) -> DataLoader[Any]:
    """Return a DataLoader with the settings of `loader`, for other batches.

    Its processes take their base seed from `random`.
    """
    many = loader.num_workers > 0
    return DataLoader(
        dataset,
        batch_sampler=batches,  # type: ignore[arg-type]
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context if many else None,
        generator=random,
        prefetch_factor=loader.prefetch_factor if many else None,
        persistent_workers=loader.persistent_workers,
    )


def read_in_turn(samples: Samples, slices: Iterable[Tensor]) -> Iterator[tuple[Tensor, Any]]:
    """Yield the indices and the batch of each slice; a DataLoader's processes read ahead."""
    loader: DataLoader[Any] | None = getattr(samples, "loader", None)
    if loader is None or not loader.num_workers:
        for indices in slices:
            yield indices, samples.batch(indices)
        return
    dataset: Dataset[Any] = samples.dataset  # type: ignore[attr-defined]
    known = list(slices)
    batches = like(loader, dataset, [s.tolist() for s in known], torch.Generator())
    yield from zip(known, iterate(batches), strict=True)


class Indices:
    """A batch sampler: what one worker reads from a cursor to the end of its epoch.

    With `stand_in`, a worker without samples in a step gets two dummy samples. Batch norm cannot
    train on one.
    """

    def __init__(self, shards: Shards, worker: int, samples: int, stand_in: bool) -> None:
        self.shards, self.worker, self.samples = shards, worker, samples
        self.stand_in, self.start = stand_in, Cursor()

    def __iter__(self) -> Iterator[list[Any]]:
        cursor = self.start
        while cursor.epoch == self.start.epoch:
            if (found := self.at(cursor)) is not None:
                yield found.tolist() if isinstance(found, Tensor) else list(found)
            cursor = self.shards.advance(cursor)

    def at(self, cursor: Cursor) -> Tensor | Sequence[Any] | None:
        """Return the indices of a step; None where the worker has no samples and no dummies."""
        counts = self.shards.counts(cursor)
        if counts[self.worker]:
            return self.shards.take(cursor, self.worker)
        if not self.stand_in:
            return None
        some = self.shards.take(cursor, counts.index(max(counts)))
        if isinstance(some, Tensor):
            return torch.arange(min(2, self.samples))
        return some[:2] if len(some) > 1 else [*some, *some]


class Reader:
    """Reads one worker's batches with the settings of the user's DataLoader.

    Its processes read ahead within an epoch. A read at another place than the next one, or in
    another epoch, starts a new pass.
    """

    def __init__(
        self, dataset: Dataset[Any], loader: DataLoader[Any], indices: Indices, seed: int
    ) -> None:
        self._indices, self._seed, self._random = indices, seed, torch.Generator()
        self._loader = like(loader, dataset, indices, self._random)
        self._pass: Iterator[Any] | None = None
        self._next: Cursor | None = None

    def read(self, cursor: Cursor) -> Any:
        """Return the batch at `cursor`. The worker has samples or dummy samples there."""
        if self._pass is None or cursor != self._next:
            self._pass = None  # ends the processes of the last pass
            self._indices.start = cursor
            # The processes of no two workers and no two passes draw the same numbers.
            self._random.manual_seed(
                derive(self._seed, "processes", self._indices.worker, cursor.epoch, cursor.position)
            )
            self._pass = iterate(self._loader)
        batch = next(self._pass)
        self._next = self._after(cursor)
        if self._next is None:
            self._pass = None
        return batch

    def _after(self, cursor: Cursor) -> Cursor | None:
        """Return the cursor of the worker's next batch in this pass."""
        indices = self._indices
        following = indices.shards.advance(cursor)
        while following.epoch == cursor.epoch:
            if indices.stand_in or indices.shards.counts(following)[indices.worker]:
                return following
            following = indices.shards.advance(following)
        return None

    def close(self) -> None:
        """End the pass and its processes, but for persistent ones."""
        self._pass = self._next = None
