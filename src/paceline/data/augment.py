"""Crop, flip and normalise images: from the bytes of a shard or a folder to a model's input."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

PADDING = 8  # images without a margin are padded by an eighth of their size on each side


class Augment:
    """Cut a random crop from each image and flip half of them, or cut the centre.

    `random` is for training. Each image of a batch gets a crop of its own.
    """

    def __init__(self, size: int, random: bool, scale: Callable[[Tensor], Tensor]) -> None:
        self.size, self.random, self.scale = size, random, scale

    def __call__(self, images: Tensor) -> Tensor:
        room = images.shape[-1] - self.size
        if not self.random:
            at = room // 2
            return self.scale(images[..., at : at + self.size, at : at + self.size])
        if room == 0:
            images = F.pad(images, [max(1, self.size // PADDING)] * 4)
            room = images.shape[-1] - self.size
        count, channels = images.shape[:2]
        tops, lefts = torch.randint(0, room + 1, (2, count, 1))
        steps = torch.arange(self.size)
        mirrored = torch.rand(count, 1) < 0.5
        columns = lefts + torch.where(mirrored, self.size - 1 - steps, steps)
        rows = (tops + steps)[:, None, :, None].expand(count, channels, self.size, images.shape[-1])
        cut = images.gather(2, rows)
        return self.scale(
            cut.gather(3, columns[:, None, None, :].expand(count, channels, self.size, self.size))
        )
