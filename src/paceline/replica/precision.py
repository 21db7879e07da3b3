"""Mixed precision: forward passes in bfloat16 or float16, weights and updates as they are.

Small gradients vanish in float16. So the loss is multiplied by a large factor, and the gradients
are divided by it before they are used (Micikevicius et al., "Mixed Precision Training", 2018). If
they overflow, the step is skipped and the factor is halved; after many good steps it is doubled.
The numbers are those of torch.amp.GradScaler, so that a run follows a plain loop bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from paceline.errors import NotFinite

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
FIRST_SCALE, GROW_AFTER = 65536.0, 2000
SMALLEST_SCALE = 2.0**-24  # forty skipped steps in a row: the loss scale is not the cause


class Precision:
    """What forward passes compute in, and the loss scale that float16 needs."""

    def __init__(self, name: str = "fp32", device: torch.device | None = None) -> None:
        dtype, kind = DTYPES.get(name), device.type if device is not None else "cpu"
        self._autocast: AbstractContextManager[Any] = (
            nullcontext() if dtype is None else torch.autocast(kind, dtype)
        )
        self.scale = LossScale() if name == "fp16" else None

    def computing(self) -> AbstractContextManager[Any]:
        """Autocast, for a forward pass and its loss."""
        return self._autocast


class LossScale:
    """The factor on the loss."""

    def __init__(self) -> None:
        self.factor, self._good = FIRST_SCALE, 0

    def unscale(self, gradients: Sequence[Tensor]) -> bool:
        """Divide the gradients by the factor. Returns whether all of them are finite."""
        largest = [torch.linalg.vector_norm(g, math.inf) for g in gradients if g.numel()]
        for gradient in gradients:
            gradient.mul_(1.0 / self.factor)
        return all(math.isfinite(float(norm)) for norm in largest)

    def update(self, finite: bool) -> None:
        """Adapt the factor after a step; all workers have agreed whether it was finite."""
        if not finite:
            self.factor, self._good = self.factor * 0.5, 0
            if self.factor < SMALLEST_SCALE:
                raise NotFinite(
                    "the gradients are not finite at any loss scale: try precision=bf16 or a"
                    " smaller lr, or look for bad numbers in the data"
                )
            return
        self._good += 1
        if self._good == GROW_AFTER:
            self.factor, self._good = self.factor * 2.0, 0

    def state(self) -> list[float]:
        return [self.factor, float(self._good)]

    def restore(self, state: Sequence[float]) -> None:
        self.factor, self._good = float(state[0]), int(state[1])
