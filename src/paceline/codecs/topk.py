"""Top-k: only the largest numbers are sent, the others stay in the residual (Lin et al., "Deep
Gradient Compression", 2018).

    the k = ratio * n largest magnitudes of  x + e
    warm-up: the ratio falls geometrically from 0.25 to `ratio`

Every worker applies momentum before the codec, so that the residual grows as plain momentum would.
Values are sent as float32 and indices in 16 bits: 1/66 of the bytes at 1%.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from paceline.codecs.base import GatherCodec, State, refuse_nonfinite
from paceline.codecs.packing import sparse
from paceline.errors import BadRequest
from paceline.registry import codecs
from paceline.types import Layout

WARMUP_FROM = 0.25


class SparseCodec(GatherCodec):
    """A codec whose messages are values with their indices."""

    def decode(self, message: Tensor, layout: Layout, values: Tensor) -> None:
        indices, chosen = sparse.read(message, values.numel())
        values.zero_().index_copy_(0, indices, chosen.to(values.dtype))

    def add(self, message: Tensor, layout: Layout, total: Tensor) -> None:
        indices, chosen = sparse.read(message, total.numel())
        total.index_add_(0, indices, chosen.to(total.dtype))


@codecs.register("topk")
@dataclass
class TopK(SparseCodec):
    """The largest numbers of the vector; the rest is sent later."""

    ratio: Annotated[float, "the fraction of the numbers that is sent"] = 0.01
    warmup: Annotated[int, "steps over which the ratio falls from 0.25 to it"] = 0
    feedback: Annotated[bool, "error feedback: add what is left out to the next message"] = True

    biased = True

    def check(self) -> None:
        check_ratio(self.name, "ratio", self.ratio)
        if self.warmup < 0:
            raise BadRequest(f"topk: warmup={self.warmup}: it must be 0 or more steps")
        self.varies = self.warmup > 0

    def start(
        self, layout: Layout, random: torch.Generator, shared_random: torch.Generator
    ) -> State:
        return {"step": 0}

    def count(self, numel: int, step: int) -> int:
        ratio, begin = self.ratio, max(self.ratio, WARMUP_FROM)
        if step < self.warmup:
            ratio = begin * (self.ratio / begin) ** (step / self.warmup)
        return how_many(ratio, numel)

    def message_bytes(self, layout: Layout) -> int:
        return sparse.message_bytes(layout.numel, self.count(layout.numel, 0))

    def encode(self, values: Tensor, layout: Layout, message: Tensor, state: State) -> int:
        aside = self.scratch("magnitudes", values.numel(), values.dtype, values.device)
        refuse_nonfinite(
            values.sum(dtype=torch.promote_types(values.dtype, torch.float32)), self.name
        )
        indices = sparse.largest(values, self.count(values.numel(), state["step"]), aside)
        state["step"] += 1
        return sparse.write(values, indices, message)


def how_many(ratio: float, numel: int) -> int:
    """`ratio` of `numel` numbers, at least one."""
    return min(numel, max(1, round(ratio * numel)))


def check_ratio(name: str, option: str, value: float) -> None:
    if not 0.0 < value <= 1.0:
        raise BadRequest(
            f"{name}: {option}={value:g}: the fraction that is sent must be above 0 and at most 1"
        )
