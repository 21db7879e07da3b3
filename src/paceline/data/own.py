"""The batches of your own training loop: they behave like a DataLoader.

A worker without samples in a step gets dummy samples with weight 0. Afterwards the model's buffers
and the random state are restored, as if the worker had not computed anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from paceline.common.seeding import random_states, set_random_states
from paceline.data.batches import OwnPasses
from paceline.types import Batch


class Before:
    """A copy of a model's buffers and of the random state, to restore after dummy samples."""

    def __init__(self, model: nn.Module) -> None:
        self._random = random_states()
        homes = [
            (module._buffers, name, b)
            for module in model.modules()
            for name, b in module._buffers.items()
        ]
        self._buffers = [
            (home, name, buffer, buffer.clone())
            for home, name, buffer in homes
            if buffer is not None
        ]

    def restore(self) -> None:
        set_random_states(self._random)
        for home, name, buffer, content in self._buffers:
            home[name] = buffer.copy_(content)


class OwnBatches:
    """This worker's batches; one pass is one epoch. All workers make the same number of steps.

    After a `break`, the next pass is the next epoch. With several workers a pass without a step,
    such as `next(iter(batches))` on one of them, does not count: the next pass repeats its epoch.
    """

    def __init__(self, inner: OwnPasses, model: nn.Module) -> None:
        self._inner, self._model = inner, model
        self._given: Batch | None = None  # the last batch, if it has not been used yet
        self._before: Before | None = None  # set if the last batch is of dummy samples
        self._used = False

    def __len__(self) -> int:
        if self._inner.steps_per_epoch is None:
            raise TypeError("a stream has no length")
        return self._inner.steps_per_epoch

    def __iter__(self) -> Iterator[Any]:
        self._inner.begin_epoch(anew=not self._used)
        self._used = False
        for batch in self._inner.one_pass():
            self._given = batch
            self._before = None if batch.weight else Before(self._model)
            yield batch.inputs  # the whole batch, as the data gives it
            self.forget_stand_in()

    def take(self) -> Batch | None:
        """Return the batch of which your loop has just computed the loss, and mark it as used."""
        batch, self._given = self._given, None
        self._used = self._used or batch is not None
        return batch

    def forget_stand_in(self) -> None:
        if self._before is not None:
            self._before.restore()
            self._before = None
