"""A model that computes nothing: the tensors of another, with gradients that are drawn once.

With the fault `compute`, which lets a step take a given time, a worker sleeps instead of computing.
So many workers run on few cores as if each had a core of its own, and exchange what they would.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch
from torch import Tensor, nn

from paceline.registry import models

SIZE = 1e-3  # the deviation of a gradient's numbers: weights hardly move


class StandIn(nn.Module):
    """Returns zeros for every sample; the backward pass gives every tensor its drawn gradient."""

    def __init__(self, stands_for: nn.Module, classes: int) -> None:
        super().__init__()
        self.stands_for, self.classes = stands_for, classes
        own = torch.Generator().manual_seed(0)
        # No buffers: workers do not exchange them.
        self._drawn = [
            (SIZE * torch.randn(p.shape, generator=own)).to(p.dtype) for p in self.parameters()
        ]

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = _Drawn.apply(self._drawn, len(inputs), self.classes, *self.parameters())
        return found


class _Drawn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, drawn: list[Tensor], rows: int, classes: int, *parameters: Tensor
    ) -> Tensor:
        ctx.drawn = drawn
        return parameters[0].new_zeros(rows, classes)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, None, *ctx.drawn)


@models.register("stand-in")
def stand_in(
    input_shape: tuple[int, ...],
    classes: int,
    of: Annotated[str, "the model whose tensors it has"] = "cnn",
) -> nn.Module:
    """The tensors of another model, and no computing: for runs whose step times are given."""
    return StandIn(models.build(of, input_shape=input_shape, classes=classes), classes)
