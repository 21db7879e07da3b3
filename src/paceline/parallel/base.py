"""The interface of forms: how one model is split over the workers of a group.

A form makes of the whole model one rank's part (`Form.split`). The part keeps the whole model's
names, so that checkpoints are always those of the whole model: saved by any form, resumed by any
other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from paceline.parallel.pieces import Piece, gathered, owned
from paceline.transport.base import Transport
from paceline.types import Batch


class Passes(Protocol):
    """What a part needs of its rank: the loss, and a plain forward and backward pass."""

    model: nn.Module

    def plain_backward(self, part: Batch, scale: float) -> float: ...
    def computing(self) -> AbstractContextManager[Any]:
        """The context of forward passes: their precision."""
        ...

    def loss(self, outputs: Any, targets: Any) -> Tensor: ...


@dataclass(frozen=True)
class Given:
    """What a form may look at when it splits a model."""

    group: Transport  # the ranks that hold one copy of the model together
    inputs: Any  # some samples, as the model gets them
    seed: int
    everyone: Transport  # the workers of all copies, which are split alike


class Part:
    """One rank's part of a model. This class: the whole model, on a group of one rank."""

    def __init__(self, model: nn.Module, group: Transport | None = None) -> None:
        self.model, self.group = model, group

    @property
    def rank(self) -> int:
        return self.group.rank if self.group is not None else 0

    @property
    def size(self) -> int:
        return self.group.size if self.group is not None else 1

    # --- training

    def begin(self, step: int, first: int) -> None:
        """A step begins; `first`: the place of this worker's first row in the global batch."""
        return

    def backward(self, passes: Passes, batch: Batch, scale: float) -> float:
        """Add the gradient of `scale` times the mean loss of some rows; return the mean loss."""
        return passes.plain_backward(batch, scale)

    def complete(self) -> int:
        """All samples of a step have had their backward pass: exchange gradients of this copy.

        Returns the bytes that this rank has sent.
        """
        return 0

    def norm(self) -> float | None:
        """The norm of the whole model's gradient; None: all of it is here."""
        return None

    # --- the whole model

    def pieces(self) -> Mapping[str, Piece]:
        """Which pieces of the whole model's tensors this part holds."""
        return {name: Piece() for name in self.model.state_dict()}

    def gives(self, name: str) -> bool:
        """Whether this rank gives a tensor to the whole model; of equal ones, one rank does."""
        return True

    def gather(self, state: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        """The whole model's tensors, on the group's rank 0; None on the others.

        All ranks of the group call it. Names may have more after a slash ("fc.weight/exp_avg").
        """
        if self.group is None or self.size == 1:
            return dict(state)
        pieces = self.pieces()
        own = {
            name: pieces[base]
            for name in state
            if (base := name.partition("/")[0]) in pieces and self.gives(base)
        }
        return gathered(self.group, own, state)

    def own(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Of the whole model's tensors, the pieces that this part holds."""
        return owned(self.pieces(), state)

    # --- for the record

    def described(self) -> dict[str, Any]:
        """What this rank holds, for the record."""
        return {}

    def summary(self) -> dict[str, Any]:
        """What this rank has seen in the whole run, for the record."""
        return {}


class Form(ABC):
    """One way of splitting a model; a subclass's dataclass fields are its options."""

    name: ClassVar[str]
    slices: ClassVar[bool] = False  # whether a rank's part has slices of the weights, not all

    @abstractmethod
    def check(self, model: nn.Module, parts: int) -> None:
        """Raise BadRequest where the model cannot be split so; it may be on the meta device."""

    @abstractmethod
    def split(self, model: nn.Module, given: Given) -> Part:
        """Make this rank's part. All ranks of the group call it with equal models."""

    def needs(self, model: nn.Module, given: Given) -> Callable[[str], bool] | None:
        """Which modules of a model this rank's part is made of, by their names; None: of all.

        All ranks of all copies call it, before `split`, with the same form. The model is on the
        meta device.
        """
        return None

    def parts(self) -> int | None:
        """How many ranks hold the model together; None: as many as there are."""
        return None


def device_of(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))
