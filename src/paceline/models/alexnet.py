"""AlexNet (Krizhevsky et al., 2012), adapted to images of 32x32 as is common."""

from __future__ import annotations

from typing import Annotated

from torch import nn

from paceline.errors import BadRequest
from paceline.registry import models


@models.register("alexnet")
def alexnet(
    input_shape: tuple[int, ...], classes: int, dropout: Annotated[float, "in the classifier"] = 0.5
) -> nn.Module:
    """Five convolutional and three fully connected layers for images of 28x28 and up."""
    if len(input_shape) != 3 or min(input_shape[1:]) < 16:
        raise BadRequest(f"alexnet needs images of at least 16 x 16; this data gives {input_shape}")
    return nn.Sequential(
        nn.Conv2d(input_shape[0], 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 192, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(192, 384, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(384, 256, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(256, 256, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(256 * 2 * 2, 1024),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(1024, 512),
        nn.ReLU(),
        nn.Linear(512, classes),
    )
