"""The batches of one worker, in order: samples by shards, or rounds of the user's own stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from paceline.common.seeding import OwnRandom, derive
from paceline.data.adopt import pair
from paceline.data.base import Samples, Stream
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


class ShardBatches:
    """Batches of indexed samples, as the shards assign them to this worker.

    With `stand_in`, a worker without samples in a step gets two dummy samples with weight 0. Batch
    norm cannot train on one.
    """

    def __init__(
        self,
        samples: Samples,
        shards: Shards,
        worker: int,
        device: torch.device,
        stand_in: bool = False,
    ) -> None:
        self.samples, self.shards, self.worker, self.device, self.stand_in = (
            samples,
            shards,
            worker,
            device,
            stand_in,
        )
        self.cursor, self.step, self.ended = Cursor(), 0, False
        self._given = self.cursor

    @property
    def epochs_done(self) -> int:
        return self.cursor.epoch

    @property
    def steps_per_epoch(self) -> int:
        return self.shards.steps_per_epoch

    def __iter__(self) -> Iterator[Batch]:
        while True:
            cursor = self.cursor
            counts = self.shards.counts(cursor)
            inputs: Any = None
            targets: Any = None
            if counts[self.worker] or self.stand_in:
                indices = (
                    self.shards.take(cursor, self.worker)
                    if counts[self.worker]
                    else self._stand_in()
                )
                inputs, targets = to_device(self.samples.batch(indices), self.device)
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
            )
            self.step += 1
            yield batch

    def _stand_in(self) -> Tensor:
        return torch.arange(min(2, len(self.samples)))

    def give_back(self) -> None:
        self.cursor, self.step = self._given, self.step - 1

    def begin_epoch(self, anew: bool) -> None:
        if self.cursor.position:
            self.cursor = Cursor(self.cursor.epoch + (not anew), 0)

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
                sizes = [rows(b[1]) for b in current]
                weight = sizes[self.worker] if self.worker < len(sizes) else 0
                if weight == 0:
                    inputs, targets = current[0] if self.stand_in else (None, None)
                inputs, targets = to_device((inputs, targets), self.device)
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
            batches = iter(self.loader)
            ahead = next(batches, None)
        skip, current = self.round, []
        while ahead is not None:
            current.append(pair(ahead))
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


def evaluation_slices(samples: int, workers: int, worker: int, size: int) -> Iterator[Tensor]:
    """Yield this worker's part of a test set in batches. No two workers share a sample."""
    start, end = worker * samples // workers, (worker + 1) * samples // workers
    for at in range(start, end, size):
        yield torch.arange(at, min(at + size, end))


def to_device(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value if value.device == device else value.to(device, non_blocking=True)
    if isinstance(value, dict):
        return {k: to_device(v, device) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(to_device(v, device) for v in value)
    return value


def rows(value: Any) -> int:
    """Return the number of samples in a batch: the length of the first tensor of its targets."""
    if isinstance(value, Tensor):
        return int(value.shape[0]) if value.dim() else 1
    if isinstance(value, dict):
        return rows(next(iter(value.values())))
    if isinstance(value, (tuple, list)):
        return rows(value[0]) if value and isinstance(value[0], Tensor) else len(value)
    return 1
