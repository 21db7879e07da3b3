"""Steps of several batches, whose gradients are added up before one update."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from paceline.data.batches import Batches
from paceline.types import Batch


class Accumulated:
    """Every step takes `count` batches. The last step of an epoch may have fewer."""

    def __init__(self, inner: Batches, count: int) -> None:
        self.inner, self.count = inner, count
        self.step, self.ended = 0, False
        self._before: dict[str, Any] = {}  # the place in the data before the last step

    @property
    def epochs_done(self) -> int:
        return self.inner.epochs_done

    @property
    def steps_per_epoch(self) -> int | None:
        batches = self.inner.steps_per_epoch
        return None if batches is None else -(-batches // self.count)

    def __iter__(self) -> Iterator[Batch]:
        parts: list[Batch] = []
        before = self.inner.state()
        for batch in self.inner:
            parts.append(batch)
            if len(parts) < self.count and not batch.ends_epoch:
                continue
            self._before, self.ended = before, batch.ends_epoch
            self.step += 1
            yield together(parts, self.step - 1)
            parts, before = [], self.inner.state()

    def give_back(self) -> None:
        self.inner.restore(self._before)
        self.step -= 1

    def state(self) -> dict[str, Any]:
        return {"step": self.step, "accumulated": self.inner.state()}

    def restore(self, state: dict[str, Any]) -> None:
        self.inner.restore(state.get("accumulated", state))
        self.step = state["step"]


def together(parts: Sequence[Batch], step: int) -> Batch:
    """Return several batches as one."""
    before = [0, *accumulate(int(part.global_weight) for part in parts)]
    return Batch(
        None,
        None,
        sum(part.weight for part in parts),
        sum(part.global_weight for part in parts),
        parts[-1].epoch,
        step,
        parts[-1].ends_epoch,
        tuple(
            replace(part, step=step, first=part.first + ahead)
            for part, ahead in zip(parts, before, strict=False)
        ),
    )


def without_accumulation(state: dict[str, Any]) -> dict[str, Any]:
    """Return the saved place in the data for a run that does not accumulate."""
    inner = state.get("accumulated")
    return state if inner is None else {**inner, "step": state["step"]}
