"""The batches of one worker, in order: samples by shards, or rounds of the user's own stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from paceline.common.seeding import OwnRandom, derive
from paceline.data.adopt import DatasetSamples
from paceline.data.ahead import Indices, Reader, iterate
from paceline.data.base import Samples, Stream
from paceline.data.content import Split, rows, split, to_device
from paceline.data.shards import Cursor, Shards
from paceline.errors import BadRequest
from paceline.types import Batch


class Batches(Protocol):
    """An endless sequence of batches, epoch after epoch.

    `step` counts the batches so far. `ended` says whether the last one ended its epoch.
    """

    step: int
    ended: bool

    @property
    def epochs_done(self) -> int: ...
    @property
    def steps_per_epoch(self) -> int | None: ...
    def __iter__(self) -> Iterator[Batch]: ...
    def give_back(self) -> None:
        """Take back the last batch, which was not used: the state that is saved now includes it."""
        ...

    def state(self) -> dict[str, Any]: ...
    def restore(self, state: dict[str, Any]) -> None: ...


class OwnPasses(Batches, Protocol):
    """Batches of your own loop, which may leave an epoch before its end."""

    def begin_epoch(self, anew: bool) -> None:
        """Make the next batch the first of an epoch.

        If this epoch has begun, `anew` restarts it; otherwise the next epoch begins.
        """
        ...

    def one_pass(self) -> Iterator[Batch]:
        """Yield the batches up to the end of this epoch."""
        ...


class ShardBatches:
    """Batches of indexed samples, as the shards assign them to this worker.

    With `stand_in`, a worker without samples in a step gets dummy samples with weight 0. With
    `seed`, samples that came in a DataLoader are read with its settings: by its processes, ahead of
    their use. They draw random numbers by this seed. `split` makes (inputs, targets) of a batch.
    """

    def __init__(
        self,
        samples: Samples,
        shards: Shards,
        worker: int,
        device: torch.device,
        stand_in: bool = False,
        seed: int | None = None,
        split: Split = split,
    ) -> None:
        self.samples, self.shards, self.worker, self.device = samples, shards, worker, device
        self.split, self.cursor, self.step, self.ended = split, Cursor(), 0, False
        self._given = self.cursor
        self._indices = Indices(shards, worker, len(samples), stand_in)
        self._reader: Reader | None = None
        if seed is not None and isinstance(samples, DatasetSamples):
            loader = samples.loader
            if loader is not None and (loader.num_workers or loader.pin_memory):
                self._reader = Reader(samples.dataset, loader, self._indices, seed)

    @property
    def epochs_done(self) -> int:
        return self.cursor.epoch

    @property
    def steps_per_epoch(self) -> int | None:
        return self.shards.steps_per_epoch

    def __iter__(self) -> Iterator[Batch]:
        try:
            while True:
                yield self._next()
        finally:
            if self._reader is not None:
                self._reader.close()

    def _next(self) -> Batch:
        cursor = self.cursor
        counts = self.shards.counts(cursor)
        inputs, targets = self._content(cursor)
        self.cursor, self._given = self.shards.advance(cursor), cursor
        self.ended = self.cursor.epoch != cursor.epoch
        batch = Batch(
            inputs,
            targets,
            counts[self.worker],
            sum(counts),
            cursor.epoch,
            self.step,
            self.ended,
            first=sum(counts[: self.worker]),
        )
        self.step += 1
        return batch

    def _content(self, cursor: Cursor) -> tuple[Any, Any]:
        indices = self._indices.at(cursor)
        if indices is None:
            return None, None
        if self._reader is not None:
            read = self._reader.read(cursor)
        else:
            read = self.samples.batch(indices)
        inputs, targets = self.split(read)
        return to_device(inputs, self.device), to_device(targets, self.device)

    def give_back(self) -> None:
        self.cursor, self.step = self._given, self.step - 1

    def begin_epoch(self, anew: bool) -> None:
        if self.cursor.position:
            self.cursor = Cursor(self.cursor.epoch + (not anew), 0)

    def one_pass(self) -> Iterator[Batch]:
        return _to_epochs_end(self)

    def state(self) -> dict[str, Any]:
        return {"step": self.step, "shards": self.shards.state(self.cursor)}

    def restore(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self.cursor = self.shards.restore(state["shards"])


class StreamBatches:
    """Batches of a stream: in round r, worker p of P keeps batch r*P + p.

    All workers read the whole stream in the same order.
    """

    def __init__(
        self,
        stream: Stream,
        batch_size: int,
        workers: int,
        worker: int,
        seed: int,
        device: torch.device,
        stand_in: bool = False,
        split: Split = split,
    ) -> None:
        source: Any = stream.batches
        self.loader = (
            source if isinstance(source, DataLoader) else DataLoader(source, batch_size=batch_size)
        )
        self.workers, self.worker, self.seed, self.device, self.stand_in = (
            workers,
            worker,
            seed,
            device,
            stand_in,
        )
        self.split = split
        self.epoch, self.round, self.step, self.ended = 0, 0, 0, False
        self._given = (0, 0)

    @property
    def epochs_done(self) -> int:
        return self.epoch

    @property
    def steps_per_epoch(self) -> int | None:
        try:
            return -(-len(self.loader) // self.workers)
        except TypeError:
            return None

    def __iter__(self) -> Iterator[Batch]:
        while True:
            rounds = self._rounds()
            current = next(rounds, None)
            if current is None:
                raise BadRequest(f"the training stream gave no batch in epoch {self.epoch + 1}")
            while current is not None:
                following = next(rounds, None)
                inputs, targets = (
                    current[self.worker] if self.worker < len(current) else (None, None)
                )
                sizes = [rows(b[0] if b[1] is None else b[1]) for b in current]
                weight = sizes[self.worker] if self.worker < len(sizes) else 0
                if weight == 0:
                    inputs, targets = current[0] if self.stand_in else (None, None)
                inputs, targets = to_device(inputs, self.device), to_device(targets, self.device)
                self.ended = following is None
                batch = Batch(
                    inputs, targets, weight, sum(sizes), self.epoch, self.step, self.ended
                )
                self._given = (self.epoch, self.round)
                self.step += 1
                self.round += 1
                if self.ended:
                    self.epoch, self.round = self.epoch + 1, 0
                yield batch
                current = following

    def _rounds(self) -> Iterator[list[tuple[Any, Any]]]:
        # All ranks draw the same random numbers for the stream.
        own = OwnRandom(derive(self.seed, "stream", self.epoch))
        with own():
            batches = iterate(self.loader)
            ahead = next(batches, None)
        skip, current = self.round, []
        while ahead is not None:
            current.append(self.split(ahead))
            with own():
                ahead = next(batches, None)
            if len(current) == self.workers or ahead is None:
                if skip:
                    skip -= 1
                else:
                    yield current
                current = []

    def give_back(self) -> None:
        (self.epoch, self.round), self.step = self._given, self.step - 1

    def begin_epoch(self, anew: bool) -> None:
        if self.round:
            self.epoch, self.round = self.epoch + (not anew), 0

    def one_pass(self) -> Iterator[Batch]:
        return _to_epochs_end(self)

    def state(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "epoch": self.epoch,
            "round": self.round,
            "workers": self.workers,
        }

    def restore(self, state: dict[str, Any]) -> None:
        if "round" not in state:
            raise BadRequest("the checkpoint was not made from a stream")
        if state["round"] and state["workers"] != self.workers:
            raise BadRequest(
                "the number of workers of a stream can only change between epochs, and this"
                f" checkpoint is from the middle of one: use {state['workers']} workers"
            )
        self.step, self.epoch, self.round = state["step"], state["epoch"], state["round"]


def _to_epochs_end(batches: Batches) -> Iterator[Batch]:
    for batch in batches:
        yield batch
        if batch.ends_epoch:
            return


def evaluation_slices(samples: int, workers: int, worker: int, size: int) -> Iterator[Tensor]:
    """Yield this worker's part of a test set in batches. No two workers share a sample."""
    start, end = worker * samples // workers, (worker + 1) * samples // workers
    for at in range(start, end, size):
        yield torch.arange(at, min(at + size, end))
