"""Random-k: some numbers, drawn by all ranks from the same seed, so that no index travels and any
all-reduce adds them up.

    one number out of each of k stretches of equal length;  the rest is remembered

Honestly: at 1% it hardly learns. A number waits about 100 steps and is then applied at once, a
hundred steps stale, where top-k sends what matters first. With momentum that diverges or stands
still; use it without (`--momentum 0`), with larger ratios, or as the baseline that it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from paceline.codecs.base import Codec, State, aligned, part, refuse_nonfinite
from paceline.codecs.packing import random as draws
from paceline.codecs.topk import check_ratio, how_many
from paceline.collectives.base import Collective
from paceline.registry import codecs
from paceline.types import Layout


@codecs.register("randomk")
@dataclass
class RandomK(Codec):
    """Numbers drawn at random, the same on all ranks; hardly learns at 1%."""

    ratio: Annotated[float, "the part that travels"] = 0.01
    feedback: Annotated[bool, "remember what is left out"] = True

    kind = "linear"
    biased = True

    def check(self) -> None:
        check_ratio(self.name, self.ratio)
        self._dice = draws.Dice()

    def start(
        self, layout: Layout, random: torch.Generator, shared_random: torch.Generator
    ) -> State:
        return draws.start(shared_random)

    def message_bytes(self, layout: Layout) -> int:
        return aligned(8 + 4 * how_many(self.ratio, layout.numel))

    def encode(self, values: Tensor, layout: Layout, message: Tensor, state: State) -> int:
        seed = draws.next_seed(state)
        header, at = part(message, 0, 1, torch.int64)
        header.fill_(seed)
        count = how_many(self.ratio, values.numel())
        chosen, _ = part(message, at, count, torch.float32)
        chosen.copy_(values.index_select(0, self._indices(seed, values.numel(), values.device)))
        refuse_nonfinite(
            values.sum(dtype=torch.promote_types(values.dtype, torch.float32)), self.name
        )
        return message.numel()

    def decode(self, message: Tensor, layout: Layout, values: Tensor) -> None:
        header, at = part(message, 0, 1, torch.int64)
        chosen, _ = part(message, at, how_many(self.ratio, values.numel()), torch.float32)
        indices = self._indices(int(header), values.numel(), values.device)
        values.zero_().index_copy_(0, indices, chosen.to(values.dtype))

    def reduce(
        self,
        buffer: Tensor,
        layout: Layout,
        collective: Collective,
        state: State,
        sent: Tensor | None = None,
    ) -> None:
        count = how_many(self.ratio, buffer.numel())
        chosen = self.scratch("chosen", count, buffer.dtype, buffer.device)
        with self.clock.encoding():
            indices = self._indices(draws.next_seed(state), buffer.numel(), buffer.device)
            torch.index_select(buffer, 0, indices, out=chosen)
            refuse_nonfinite(
                buffer.sum(dtype=torch.promote_types(buffer.dtype, torch.float32)), self.name
            )
            if sent is not None:
                sent.zero_().index_copy_(0, indices, chosen)
        collective.all_reduce(chosen)
        with self.clock.decoding():
            buffer.zero_().index_copy_(0, indices, chosen)

    def _indices(self, seed: int, numel: int, device: torch.device) -> Tensor:
        """One of each of k stretches of (nearly) equal length: sorted, and none twice."""
        count = how_many(self.ratio, numel)
        edges = torch.arange(count + 1, device=device) * numel // max(1, count)
        chance = torch.rand(
            count, generator=self._dice.seeded(seed, device), device=device, dtype=torch.float64
        )
        low, width = edges[:-1], edges[1:] - edges[:-1]
        return low + (chance * width).long()
