"""Small convolutional networks."""

from __future__ import annotations

from typing import Annotated

from torch import nn

from paceline.errors import BadRequest
from paceline.registry import models


def _build(
    input_shape: tuple[int, ...],
    classes: int,
    channels: tuple[int, int],
    hidden: int,
    dropout: float,
) -> nn.Module:
    if len(input_shape) != 3:
        raise BadRequest(
            "cnn needs images (channels x height x width); this data gives"
            f" {input_shape or 'no fixed shape'}"
        )
    depth, *sides = input_shape
    for kernel, pools in ((5, 1), (5, 2)):
        sides = [(s - kernel + 1) // 2**pools for s in sides]
    if min(sides) < 1:
        raise BadRequest(
            f"cnn needs images of at least 20 x 20; this data gives {input_shape[1]} x"
            f" {input_shape[2]}"
        )
    first, second = channels
    return nn.Sequential(
        nn.Conv2d(depth, first, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(first, second, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(second * sides[0] * sides[1], hidden),
        nn.ReLU(),
        nn.Linear(hidden, classes),
    )


@models.register("cnn")
def cnn(
    input_shape: tuple[int, ...],
    classes: int,
    dropout: Annotated[float, "share of activations dropped"] = 0.25,
) -> nn.Module:
    """Two convolutions (16, 32 channels of 5x5) and two layers (64): 22,154 parameters on MNIST."""
    return _build(input_shape, classes, (16, 32), 64, dropout)


@models.register("cnn-tanh")
def cnn_tanh(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """For private training: conv 16@8x8/2, conv 32@4x4/2, FC 32; tanh bounds gradients (Papernot,
    2021).
    """
    if len(input_shape) != 3:
        raise BadRequest(
            "cnn-tanh needs images (channels x height x width); this data gives"
            f" {input_shape or 'no fixed shape'}"
        )
    depth, *sides = input_shape
    sides = [((s - 2) // 2 + 1 - 1 - 4) // 2 + 1 - 1 for s in sides]
    if min(sides) < 1:
        raise BadRequest(
            f"cnn-tanh needs images of at least 14 x 14; this data gives {input_shape[1]} x"
            f" {input_shape[2]}"
        )
    return nn.Sequential(
        nn.Conv2d(depth, 16, 8, stride=2, padding=3),
        nn.Tanh(),
        nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, stride=2),
        nn.Tanh(),
        nn.MaxPool2d(2, 1),
        nn.Flatten(),
        nn.Linear(32 * sides[0] * sides[1], 32),
        nn.Tanh(),
        nn.Linear(32, classes),
    )


@models.register("cnn-wide")
def cnn_wide(
    input_shape: tuple[int, ...],
    classes: int,
    dropout: Annotated[float, "share of activations dropped"] = 0.25,
) -> nn.Module:
    """The cnn with 128 and 256 channels and 512 units: 1,352,714 parameters on MNIST."""
    return _build(input_shape, classes, (128, 256), 512, dropout)
