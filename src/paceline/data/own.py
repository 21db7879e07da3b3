"""The batches of a person's own loop: passes that behave as a DataLoader's, and stand-ins that
leave no trace.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from paceline.common.seeding import random_states, set_random_states
from paceline.data.batches import OwnPasses
from paceline.types import Batch


class Before:
    """A model's buffers and the random state at one moment, to go back to: a stand-in for an empty
    slice leaves no trace.
    """

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

    A pass that is left by `break` is over: the next one is the next epoch. A pass whose batches
    were only looked at (`next(iter(batches))`, and no step) does not count.
    """

    def __init__(self, inner: OwnPasses, model: nn.Module) -> None:
        self._inner, self._model = inner, model
        self._given: Batch | None = None  # the batch that was given last and not yet used
        self._before: Before | None = None  # where that one is a stand-in
        self._used = False

    def __len__(self) -> int:
        if self._inner.steps_per_epoch is None:
            raise TypeError("a stream has no length")
        return self._inner.steps_per_epoch

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        self._inner.begin_epoch(anew=not self._used)
        self._used = False
        for batch in self._inner:
            self._given = batch
            self._before = None if batch.weight else Before(self._model)
            yield batch.inputs, batch.targets
            self.forget_stand_in()
            if batch.ends_epoch:
                return

    def take(self) -> Batch | None:
        """The batch that a loss has just been computed from."""
        batch, self._given = self._given, None
        self._used = self._used or batch is not None
        return batch

    def forget_stand_in(self) -> None:
        if self._before is not None:
            self._before.restore()
            self._before = None
