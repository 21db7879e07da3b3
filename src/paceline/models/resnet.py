"""ResNet-50 (He et al., 2015; the v1.5 form with the stride in the 3x3 convolution).

Module names are torchvision's, so that its state dicts load as they are.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import cast

from torch import Tensor, nn

from paceline.errors import BadRequest
from paceline.registry import models


class Bottleneck(nn.Module):
    """1x1 down, 3x3, 1x1 up to four times the width, added to the input."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU()
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)))
        return cast(Tensor, self.relu(self.bn3(self.conv3(x)) + shortcut))


class ResNet(nn.Sequential):
    def __init__(self, depth: int, classes: int, blocks: tuple[int, ...]) -> None:
        made: OrderedDict[str, nn.Module] = OrderedDict(
            conv1=nn.Conv2d(depth, 64, 7, 2, padding=3, bias=False),
            bn1=nn.BatchNorm2d(64),
            relu=nn.ReLU(),
            maxpool=nn.MaxPool2d(3, 2, padding=1),
        )
        inputs = 64
        for number, count in enumerate(blocks):
            width = 64 * 2**number
            layer = []
            for i in range(count):
                layer.append(Bottleneck(inputs, width, 2 if i == 0 and number > 0 else 1))
                inputs = 4 * width
            made[f"layer{number + 1}"] = nn.Sequential(*layer)
        made["avgpool"] = nn.AdaptiveAvgPool2d(1)
        made["flatten"] = nn.Flatten()
        made["fc"] = nn.Linear(inputs, classes)
        super().__init__(made)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


@models.register("resnet50")
def resnet50(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """ResNet-50: 25,557,032 parameters with ImageNet's 1,000 classes; loads torchvision's
    weights.
    """
    if len(input_shape) != 3 or min(input_shape[1:]) < 32:
        raise BadRequest(
            f"resnet50 needs images of at least 32 x 32; this data gives {input_shape}"
        )
    return ResNet(input_shape[0], classes, (3, 4, 6, 3))
