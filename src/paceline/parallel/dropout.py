"""Dropout whose masks do not depend on who computes: a function of (seed, step, row, element).

A model that is split draws its masks on other ranks, in another order and in other shapes than a
model in one piece does. So masks are not drawn but computed: a hash of the place of an element
decides whether it is dropped. All forms use it, so that each of them trains exactly like the model
in one piece (`--parallel layers:stages=1`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paceline.common.seeding import derive


class Place:
    """Where the rows that a model sees now are: the step, and the first row in the global batch."""

    def __init__(self, seed: int) -> None:
        self.seed, self.step, self.first = seed, 0, 0


class PlacedDropout(nn.Module):
    """Drops elements by their place.

    `cut`: the part of a dimension (not the first, which is the samples) that this rank has:
    (dimension, first index, own length, whole length). Where a dimension was flattened into it, the
    numbers grow in proportion.
    """

    def __init__(self, p: float, number: int, place: Place, channels: bool = False) -> None:
        super().__init__()
        self.p, self.number, self.place, self.channels = p, number, place, channels
        self.cut: tuple[int, int, int, int] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return x
        if self.p >= 1.0:
            return x * 0.0
        return x * self.mask(x)

    def mask(self, x: Tensor) -> Tensor:
        """0 for dropped elements, else 1 / (1 - p)."""
        with torch.no_grad():
            dropped = self._dropped(x)
            return torch.where(dropped, 0.0, 1.0 / (1.0 - self.p)).to(x.dtype)

    def _dropped(self, x: Tensor) -> Tensor:
        whole = list(x.shape)
        offsets = [0] * x.dim()
        offsets[0] = self.place.first
        if self.cut is not None:
            dim, start, own, length = self.cut
            times = x.shape[dim] // own if own else 1
            whole[dim], offsets[dim] = length * times, start * times
        if self.channels:  # dropout of whole channels: rows and channels only
            whole, offsets, shape = whole[:2], offsets[:2], [*x.shape[:2], *[1] * (x.dim() - 2)]
        else:
            shape = list(x.shape)
        key = derive(self.place.seed, "dropout", self.number, self.place.step)
        index = torch.zeros(1, dtype=torch.int64, device=x.device)
        for dim, (offset, length) in enumerate(zip(offsets, whole, strict=True)):
            along = torch.arange(shape[dim], device=x.device) + offset
            view = [1] * len(shape)
            view[dim] = -1
            index = index * length + along.view(view) if dim else along.view(view)
        bits = _mixed(index ^ key)
        return (bits >> 40) & 0xFFFFFF < int(self.p * (1 << 24))

    def extra_repr(self) -> str:
        return f"p={self.p}"


def _mixed(x: Tensor) -> Tensor:
    """A hash of 64 bits (splitmix64), element by element."""
    x = x + _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shift to the right, as if the numbers had no sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number


KINDS: dict[type[nn.Module], bool] = {
    nn.Dropout: False,
    nn.Dropout1d: True,
    nn.Dropout2d: True,
    nn.Dropout3d: True,
}


def with_placed_dropout(model: nn.Module, seed: int) -> tuple[nn.Module, Place]:
    """Put placed dropout in place of PyTorch's, in the order of the whole model; return both."""
    place, number = Place(seed), 0

    def replaced(module: nn.Module) -> nn.Module | None:
        nonlocal number
        channels = KINDS.get(type(module))
        if channels is None:
            return None
        number += 1
        made = PlacedDropout(getattr(module, "p", 0.0), number, place, channels)
        made.training = module.training
        return made

    if (made := replaced(model)) is not None:
        return made, place
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if (made := replaced(child)) is not None:
                setattr(module, name, made)
    return model, place


def other_randomness(model: nn.Module) -> list[str]:
    """The modules whose random numbers depend on who computes: their results will differ."""
    found = []
    for name, module in model.named_modules():
        drops = isinstance(module, (nn.modules.rnn.RNNBase, nn.MultiheadAttention, nn.Transformer))
        draws = isinstance(module, (nn.AlphaDropout, nn.FeatureAlphaDropout, nn.RReLU))
        if draws or (drops and bool(getattr(module, "dropout", False))):
            found.append(f"{name or 'the model'} ({type(module).__name__})")
    return found
