"""The batches of your own training loop: they behave like a DataLoader.

A worker without samples in a step gets dummy samples with weight 0. Afterwards the models' buffers
and the random state are restored, as if the worker had not computed anything.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from torch import nn

from paceline.common.seeding import random_states, set_random_states
from paceline.data.batches import OwnPasses, ShardBatches
from paceline.data.passes import LoaderPasses
from paceline.errors import BadRequest
from paceline.types import Batch

Models = Callable[[], list[nn.Module]]  # the models as they are then: the loop may prepare more


class Before:
    """A copy of the models' buffers and of the random state, to restore after dummy samples."""

    def __init__(self, models: list[nn.Module]) -> None:
        self._random = random_states()
        homes = [
            (module._buffers, name, b)
            for model in models
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
            # A later backward pass may go through the same graph: autograd must not see a change.
            buffer.data.copy_(content)
            home[name] = buffer


class Watcher(Protocol):
    """Follows the passes over batches."""

    def begin_pass(self) -> None: ...
    def begin_batch(self, batch: Batch) -> None: ...
    def end_batch(self, batch: Batch) -> None: ...


class Sampler:
    """Takes the `set_epoch` of a script that was written for a DistributedSampler.

    Passes count epochs by themselves; a sampler of the user's own that has it is told, too.
    """

    def __init__(self, own: Any) -> None:
        self._own = own

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self._own, "set_epoch"):
            self._own.set_epoch(epoch)


class OwnBatches:
    """This worker's batches; one pass is one epoch. All workers make the same number of steps.

    After a `break`, the next pass is the next epoch. With several workers a pass without a step,
    such as `next(iter(batches))` on one of them, does not count: the next pass repeats its epoch.
    """

    def __init__(
        self,
        inner: OwnPasses,
        models: Models,
        watcher: Watcher,
        source: Any = None,
        batch_size: int | None = None,
    ) -> None:
        self._inner, self._models, self._watcher = inner, models, watcher
        self.dataset: Any = getattr(source, "dataset", source)
        self.batch_size = batch_size  # of this worker; None: the data decides
        self.sampler = Sampler(getattr(source, "sampler", None))
        self.begun = False  # the loop has asked for a batch
        self._given: Batch | None = None  # the batch that the loop works on
        self._before: Before | None = None  # set if that batch is of dummy samples
        self._used = self._current_used = False  # steps were made in this pass, with this batch
        self._pass: object = None  # the pass that began last
        self._left = False  # the loop has left that pass by a `break`
        self._place: dict[str, Any] | None = None  # where the next pass goes on, after a restore

    def __len__(self) -> int:
        if self._inner.steps_per_epoch is None:
            raise TypeError("a stream has no length")
        return self._inner.steps_per_epoch

    def __iter__(self) -> Iterator[Any]:
        self.begun = True
        self._end()
        self._watcher.begin_pass()
        if self._place is not None and not self._used:
            self._inner.restore(self._place)
        else:
            self._place = None
            self._inner.begin_epoch(anew=not self._used)
        self._used = self._left = False
        this = self._pass = object()
        try:
            for batch in self._inner.one_pass():
                self._given, self._current_used = batch, False
                self._before = None if batch.weight else Before(self._models())
                self._watcher.begin_batch(batch)
                yield batch.inputs  # the whole batch, as the data gives it
                if self._given is batch:  # otherwise another pass has begun
                    self._end()
        except GeneratorExit:  # a `break`
            self._left = self._pass is this
            raise

    def _end(self) -> None:
        if self._given is not None:
            self._watcher.end_batch(self._given)
            self.forget_stand_in()
            self._given = self._before = None

    @property
    def epoch(self) -> int:
        """The number of whole passes so far."""
        return self._inner.epochs_done

    def state(self) -> dict[str, Any]:
        """The place in the data, for a checkpoint. A batch that was not used comes again."""
        inner = self._inner
        if self._left:
            inner = copy.copy(inner)
            inner.begin_epoch(anew=not self._used)
        elif self._given is not None and not self._current_used:
            inner = copy.copy(inner)
            try:
                inner.give_back()
            except BadRequest:
                raise BadRequest(
                    "pace.save was called before a step was made with the present batch, which"
                    " would be lost: call it after the step"
                ) from None
        return inner.state()

    state_dict = state

    def restore(self, place: dict[str, Any]) -> None:
        """Go on at this place: the next pass is the rest of its epoch."""
        self._given = self._before = None
        place = _for_other_workers(place, self._inner)
        try:
            self._inner.restore(place)
        except (KeyError, TypeError):
            raise BadRequest(
                "the checkpoint's place in the data was saved with data of another kind: load it"
                " with the same data"
            ) from None
        self._place, self._used, self._left = place, False, False

    load_state_dict = restore

    @property
    def current(self) -> Batch | None:
        """The batch that the loop works on; None between two passes."""
        return self._given

    def use(self) -> None:
        """Note that a step was made with the current batch."""
        if self._given is not None:
            self._used = self._current_used = True

    def forget_stand_in(self) -> None:
        if self._before is not None:
            self._before.restore()


def _for_other_workers(place: dict[str, Any], inner: OwnPasses) -> dict[str, Any]:
    """Translate a place in a DataLoader's order between one worker and several.

    One worker iterates the loader itself; several have batches in the loader's order. Both count
    the loader's batches, and both know the random states with which the epoch began.
    """
    if isinstance(inner, LoaderPasses) and place.get("shards", {}).get("kind") == "loader":
        order = place["shards"]
        began = {"default": order["default"], "generators": order["generators"]}
        return {
            "step": place["step"],
            "epoch": order["epoch"],
            "position": order["position"],
            "began": began if order["default"] is not None else None,
            "generators": order["generators"],
        }
    if isinstance(inner, ShardBatches) and "began" in place:
        between = {"default": None, "generators": place["generators"]}
        shards = {
            "kind": "loader",
            "epoch": place["epoch"],
            "position": place["position"],
            "batch_size": getattr(inner.shards, "size", None),
            **(place["began"] or between),
        }
        return {"step": place["step"], "shards": shards}
    return place
