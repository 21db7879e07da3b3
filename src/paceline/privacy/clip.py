"""Sums of gradients in which no sample counts for more than the clip norm C.

    sum_i c_i G_i        c_i = min(1, C / |G_i|)

With flat clipping |G_i| is the length over all layers. With `per_layer` each of the L layers has a
bound of C / sqrt(L) of its own. `Bookkeeping` (bookkeeping.py) computes the sum in one backward
pass; `Loop`, the reference, takes one sample at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from paceline.errors import NotFinite
from paceline.objectives.losses import Loss
from paceline.privacy.anything import gradients_alone, take_row
from paceline.privacy.convolution import Convolution
from paceline.privacy.layers import SIMPLE, Rule, uses_its_own_forward

RULES: dict[type[nn.Module], Rule] = {**SIMPLE, nn.Conv1d: Convolution, nn.Conv2d: Convolution}

Places = Sequence[tuple[nn.Parameter, Tensor]]


class Clipper(Protocol):
    """Fills every place with the sum of the clipped gradients.

    A call returns the mean loss and the length of each sample's gradient, before clipping.
    """

    bound: float
    notices: list[str]

    def __call__(self, inputs: Any, targets: Any, samples: int) -> tuple[float, Tensor]: ...


@dataclass(frozen=True)
class Layer:
    """A module whose parameters are clipped together.

    Without a rule it stands for all its submodules too.
    """

    name: str
    module: nn.Module
    rule: Rule | None


def find_layers(model: nn.Module, trained: Sequence[nn.Parameter]) -> list[Layer]:
    """Divide a model into layers.

    A layer is a module that has parameters of its own. Where modules share parameters, the whole
    model is one layer.
    """
    wanted, owners = {id(p) for p in trained}, dict[int, int]()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    if any(owners.get(id(p), 0) > 1 for p in trained):
        return [Layer("", model, None)]
    # By identity: a module may have several names.
    found = {id(layer.module): layer for layer in _walk("", model, wanted)}
    return list(found.values())


def _walk(name: str, module: nn.Module, wanted: set[int]) -> Iterator[Layer]:
    own = {n for n, p in module.named_parameters(recurse=False) if id(p) in wanted}
    if own:
        kind = next((k for k in RULES if uses_its_own_forward(module, k)), None)
        plain = kind is not None and own <= {"weight", "bias"} and not list(module.children())
        yield Layer(name, module, RULES[kind] if kind and plain else None)
        return
    for child, inner in module.named_children():
        yield from _walk(f"{name}.{child}" if name else child, inner, wanted)


class Loop:
    """Clips one sample at a time: the reference."""

    def __init__(
        self, model: nn.Module, loss: Loss, places: Places, bound: float, per_layer: bool
    ) -> None:
        self.model, self.loss, self.bound, self.notices = model, loss, bound, list[str]()
        self._parameters, self.sums = [p for p, _ in places], [g for _, g in places]
        self._layer = [0] * len(places)  # each parameter's layer
        if per_layer:
            layers = find_layers(model, self._parameters)
            number = {id(p): i for i, layer in enumerate(layers) for p in layer.module.parameters()}
            self._layer = [number[id(p)] for p in self._parameters]

    def __call__(self, inputs: Any, targets: Any, samples: int) -> tuple[float, Tensor]:
        total, lengths, layers = 0.0, [], max(self._layer) + 1
        for place in self.sums:
            place.zero_()
        for row in range(samples):
            loss = self.loss(self.model(take_row(inputs, row)), take_row(targets, row))
            total += loss.item()
            own = gradients_alone(loss, list[Tensor](self._parameters))
            squares = torch.zeros(layers, dtype=own[0].dtype)
            for gradient, layer in zip(own, self._layer, strict=True):
                squares[layer] += gradient.square().sum().cpu()
            factors = clip_factors(squares.sqrt(), self.bound / math.sqrt(layers)).tolist()
            for place, gradient, layer in zip(self.sums, own, self._layer, strict=True):
                place.add_(gradient, alpha=factors[layer])
            lengths.append(squares.sum().sqrt())
        whole = torch.stack(lengths)
        refuse_not_finite(whole)
        return total / samples, whole


def clip_factors(lengths: Tensor, bound: float) -> Tensor:
    """Return min(1, bound / length)."""
    return lengths.clamp(min=bound).reciprocal_().mul_(bound)


def refuse_not_finite(lengths: Tensor) -> None:
    if not math.isfinite(float(lengths.sum())):
        raise NotFinite(
            "a sample's gradient is not finite: try a smaller lr, or look for nan and inf in the"
            " data"
        )
