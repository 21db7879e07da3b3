"""Weights that both sides of an exchange know, so that only differences from them are sent.

What one message leaves out (through a codec) is part of the next difference, so that no error
feedback is needed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Reference:
    """A copy of some weights, the same on both sides."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self.weights = [w.clone() for w in weights]

    def difference(self, own: Sequence[Tensor], out: Sequence[Tensor]) -> None:
        """out <- own - reference"""
        for weights, reference, moved in zip(own, self.weights, out, strict=True):
            torch.sub(weights, reference, out=moved)

    def advance(self, by: Sequence[Tensor], alpha: float = 1.0) -> None:
        """reference <- reference + alpha * by"""
        for reference, moved in zip(self.weights, by, strict=True):
            reference.add_(moved, alpha=alpha)

    def rebase(self, weights: Sequence[Tensor]) -> None:
        """reference <- weights, which both sides have."""
        for reference, new in zip(self.weights, weights, strict=True):
            reference.copy_(new)

    def give(self, own: Sequence[Tensor]) -> None:
        """own <- reference"""
        for weights, reference in zip(own, self.weights, strict=True):
            weights.copy_(reference)
