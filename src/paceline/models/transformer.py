"""A small transformer that classifies images or tokens (Vaswani et al., 2017; Dosovitskiy et al.,
2020).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Annotated

import torch
from torch import Tensor, nn

from paceline.errors import BadRequest
from paceline.registry import models


class Patches(nn.Module):
    """Cuts images into patches; each becomes a vector, with the place of the patch added."""

    def __init__(self, shape: tuple[int, ...], patch: int, width: int) -> None:
        super().__init__()
        depth, high, wide = shape
        self.project = nn.Conv2d(depth, width, patch, stride=patch)
        count = (high // patch) * (wide // patch)
        self.places = nn.Parameter(torch.zeros(1, count, width))
        nn.init.normal_(self.places, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        return self.project(x).flatten(2).transpose(1, 2) + self.places  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Every token looks at all tokens, with several heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.each = heads, width // heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, _ = x.shape
        cut = self.qkv(x).view(rows, tokens, 3, self.heads, self.each).permute(2, 0, 3, 1, 4)
        query, key, value = cut
        mixed = nn.functional.scaled_dot_product_attention(query, key, value)
        return self.out(mixed.transpose(1, 2).reshape(rows, tokens, -1))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention, then two layers, each added to its input."""

    def __init__(self, width: int, heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.norm1(x)))
        return x + self.drop(self.mlp(self.norm2(x)))  # type: ignore[no-any-return]


class MeanOfTokens(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


@models.register("transformer")
def transformer(
    input_shape: tuple[int, ...],
    classes: int,
    width: Annotated[int, "of the vectors"] = 64,
    blocks: Annotated[int, "how many blocks"] = 4,
    heads: Annotated[int, "per block"] = 4,
    patch: Annotated[int, "side of a patch in pixels"] = 7,
    dropout: Annotated[float, "share of activations dropped"] = 0.0,
) -> nn.Module:
    """A small vision transformer: patches of 7x7, 4 blocks of width 64 with 4 heads."""
    if len(input_shape) != 3 or min(input_shape[1:]) < patch:
        raise BadRequest(
            f"transformer needs images of at least {patch} x {patch}; this data gives"
            f" {input_shape or 'no fixed shape'}"
        )
    if width % heads:
        raise BadRequest(f"transformer: width={width} does not divide by heads={heads}")
    return nn.Sequential(
        OrderedDict(
            patches=Patches(input_shape, patch, width),
            blocks=nn.Sequential(*(Block(width, heads, 4 * width, dropout) for _ in range(blocks))),
            norm=nn.LayerNorm(width),
            mean=MeanOfTokens(),
            head=nn.Linear(width, classes),
        )
    )
