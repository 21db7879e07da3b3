"""Batches that the user's own code makes: a generator, or a function that returns a batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch

from paceline.common.seeding import random_states, set_random_states
from paceline.data.content import to_device
from paceline.errors import BadRequest
from paceline.types import Batch


def makes_batches(data: Any) -> bool:
    """Whether the data is code that makes batches."""
    if isinstance(data, Iterator) or inspect.isgeneratorfunction(data):
        return True
    is_data = any(hasattr(data, name) for name in ("__getitem__", "__iter__", "batch"))
    return callable(data) and not is_data


class SourcePasses:
    """Batches that each worker makes for itself; each counts as much as every other worker's.

    A function makes one endless pass. A generator makes one pass. A generator function is called at
    the beginning of each pass. Nothing is made ahead, so random numbers are drawn as in a plain
    loop; so no pass knows its last batch.
    """

    steps_per_epoch: int | None = None
    ended = False

    def __init__(self, source: Any, workers: int, device: torch.device) -> None:
        self._source, self._workers, self._device = source, workers, device
        self._made: Iterator[Any] | None = source if isinstance(source, Iterator) else None
        self.epoch, self.position, self.step = 0, 0, 0
        self._skip = 0  # batches that were used before a checkpoint

    @property
    def epochs_done(self) -> int:
        return self.epoch

    def __iter__(self) -> Iterator[Batch]:
        while True:
            yield from self.one_pass()

    def one_pass(self) -> Iterator[Batch]:
        for content in self._contents():
            batch = Batch(
                to_device(content, self._device),
                None,
                1.0,
                float(self._workers),
                self.epoch,
                self.step,
            )
            self.position += 1
            self.step += 1
            yield batch
        if not self.position:
            raise BadRequest(
                "the generator of batches has ended: for several passes give pace.prepare the"
                " function that makes it, without calling it"
            )
        self.epoch, self.position = self.epoch + 1, 0

    def _contents(self) -> Iterator[Any]:
        source: Callable[[], Any] = self._source
        if self._made is not None:
            contents = self._made
        elif inspect.isgeneratorfunction(source):
            contents = source()
        else:
            while True:
                yield source()
        before = random_states()
        for _ in range(self._skip):
            next(contents, None)
        if self._skip:
            set_random_states(before)
        self._skip = 0
        # `yield from` would close a generator of the user's at a `break`.
        for content in contents:  # noqa: UP028
            yield content

    def begin_epoch(self, anew: bool) -> None:
        if self.position and inspect.isgeneratorfunction(self._source):
            self.epoch, self.position = self.epoch + (not anew), 0

    def give_back(self) -> None:
        raise BadRequest("a generator of batches cannot take a batch back")

    def state(self) -> dict[str, Any]:
        return {"step": self.step, "epoch": self.epoch, "made": self.position}

    def restore(self, state: dict[str, Any]) -> None:
        if "made" not in state:
            raise BadRequest("the checkpoint was made with other data: load it with the same")
        self.step, self.epoch, self.position = state["step"], state["epoch"], state["made"]
        # An iterator that was given has made the batches of all passes.
        self._skip = self.position
