"""Types that several layers share, so that strategies need not import the classes behind them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from torch import Tensor

Role = Literal["worker", "server"]
Phase = Literal["setup", "train", "evaluate", "finish"]
PHASES: tuple[Phase, ...] = ("setup", "train", "evaluate", "finish")


@dataclass(frozen=True)
class Batch:
    """One worker's samples in one step. A worker without samples (`weight` 0) steps, too."""

    inputs: Any
    targets: Any
    weight: float  # this worker's samples in this step
    global_weight: float  # all workers' samples in this step
    epoch: int
    step: int  # counted over the whole run, from 0
    ends_epoch: bool = False
    parts: tuple[Batch, ...] = ()  # of a step that adds up the gradients of several batches
    first: int = 0  # the place of its first sample among all workers' samples in this step

    @property
    def share(self) -> float:
        """This worker's share of the step's samples.

        The mean of the workers' gradients, weighted by these shares, is the serial gradient.
        """
        return self.weight / self.global_weight if self.global_weight else 0.0


@dataclass(frozen=True)
class Slot:
    """One tensor's place in a flat buffer."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    numel: int
    group: int  # the optimizer's parameter group; -1 for buffers

    def view(self, flat: Tensor) -> Tensor:
        return flat.as_strided(self.shape, self.stride, self.offset)

    def span(self, flat: Tensor) -> Tensor:
        """The slot's span of the flat buffer, in memory order."""
        return flat[self.offset : self.offset + self.numel]


@dataclass(frozen=True)
class Layout:
    """The slots of one flat buffer, back to back, without padding."""

    slots: tuple[Slot, ...]

    @property
    def numel(self) -> int:
        return sum(s.numel for s in self.slots)

    def cut(self, low: int, high: int) -> Layout:
        """The layout of the span [low, high): the slots inside it, with offsets from `low`."""
        inside = [s for s in self.slots if s.offset >= low and s.offset + s.numel <= high]
        return Layout(tuple(replace(s, offset=s.offset - low) for s in inside))


class RecorderLike(Protocol):
    """Writes events to the record."""

    def write(self, kind: str, **fields: Any) -> None: ...
