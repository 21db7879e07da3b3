"""Fully connected networks, and a linear model."""

from __future__ import annotations

from itertools import pairwise
from math import prod
from typing import Annotated, Literal

from torch import nn

from paceline.registry import models

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "gelu": nn.GELU,
}


@models.register("mlp")
def mlp(
    input_shape: tuple[int, ...],
    classes: int,
    hidden: Annotated[tuple[int, ...], "units per hidden layer"] = (256, 128),
    activation: Annotated[Literal["relu", "tanh", "sigmoid", "gelu"], "between layers"] = "relu",
    dropout: Annotated[float, "share of activations dropped"] = 0.0,
) -> nn.Module:
    """Fully connected layers: 235,146 parameters on MNIST."""
    sizes = [prod(input_shape), *hidden]
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), ACTIVATIONS[activation]()]
        if dropout:
            layers.append(nn.Dropout(dropout))
    return nn.Sequential(*layers, nn.Linear(sizes[-1], classes))


@models.register("linear")
def linear(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """One linear layer (softmax regression): 7,850 parameters on MNIST."""
    return nn.Sequential(nn.Flatten(), nn.Linear(prod(input_shape), classes))
