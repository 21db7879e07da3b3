"""Random-k: all ranks draw the same k numbers from a shared seed, so no index is sent and any
all-reduce sums them.

    one number from each of k spans of equal length;  the others stay in the residual

At 1% it hardly learns. A number waits for about 100 steps and is then applied at once, a hundred
steps stale, where top-k sends large numbers first. With momentum it diverges or stands still. Use
it without momentum (`--momentum 0`), with larger ratios, or as a baseline.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from paceline.codecs.base import Codec, State, aligned, numbers_at, refuse_nonfinite
from paceline.codecs.packing import random as draws
from paceline.codecs.topk import check_ratio, how_many
from paceline.collectives.base import Collective
from paceline.collectives.moves import Sum
from paceline.registry import codecs
from paceline.types import Layout


@codecs.register("randomk")
@dataclass
class RandomK(Codec):
    """Randomly drawn numbers, the same on all ranks; hardly learns at 1%."""

    ratio: Annotated[float, "the fraction of the numbers that is sent"] = 0.01
    feedback: Annotated[bool, "error feedback: add what is left out to the next message"] = True

    kind = "linear"
    biased = True

    def check(self) -> None:
        check_ratio(self.name, "ratio", self.ratio)
        self._generators = draws.Generators()

    def start(
        self, layout: Layout, random: torch.Generator, shared_random: torch.Generator
    ) -> State:
        return draws.start(shared_random)

    def message_bytes(self, layout: Layout) -> int:
        return aligned(8 + 4 * how_many(self.ratio, layout.numel))

    def encode(self, values: Tensor, layout: Layout, message: Tensor, state: State) -> int:
        seed = draws.next_seed(state)
        header, at = numbers_at(message, 0, 1, torch.int64)
        header.fill_(seed)
        count = how_many(self.ratio, values.numel())
        chosen, _ = numbers_at(message, at, count, torch.float32)
        chosen.copy_(values.index_select(0, self._indices(seed, values.numel(), values.device)))
        refuse_nonfinite(
            values.sum(dtype=torch.promote_types(values.dtype, torch.float32)), self.name
        )
        return message.numel()

    def decode(self, message: Tensor, layout: Layout, values: Tensor) -> None:
        header, at = numbers_at(message, 0, 1, torch.int64)
        chosen, _ = numbers_at(message, at, how_many(self.ratio, values.numel()), torch.float32)
        indices = self._indices(int(header), values.numel(), values.device)
        values.zero_().index_copy_(0, indices, chosen.to(values.dtype))

    def sums(self, layout: Layout, schedule: str, workers: int) -> tuple[Sum, ...]:
        return (Sum(schedule, how_many(self.ratio, layout.numel), 4),)

    def reduce(
        self,
        buffer: Tensor,
        layout: Layout,
        collective: Collective,
        state: State,
        sent: Tensor | None = None,
    ) -> None:
        count = how_many(self.ratio, buffer.numel())
        transport = collective.transport
        chosen = self.scratch("chosen", count, buffer.dtype, buffer.device, transport)
        with self.timer.encoding():
            indices = self._indices(draws.next_seed(state), buffer.numel(), buffer.device)
            torch.index_select(buffer, 0, indices, out=chosen)
            refuse_nonfinite(
                buffer.sum(dtype=torch.promote_types(buffer.dtype, torch.float32)), self.name
            )
            if sent is not None:
                sent.zero_().index_copy_(0, indices, chosen)
        collective.all_reduce(chosen)
        with self.timer.decoding():
            buffer.zero_().index_copy_(0, indices, chosen)

    def _indices(self, seed: int, numel: int, device: torch.device) -> Tensor:
        """One index from each of k spans of (nearly) equal length: sorted, without duplicates."""
        count = how_many(self.ratio, numel)
        edges = torch.arange(count + 1, device=device) * numel // max(1, count)
        chance = torch.rand(
            count,
            generator=self._generators.seeded(seed, device),
            device=device,
            dtype=torch.float64,
        )
        low, width = edges[:-1], edges[1:] - edges[:-1]
        return low + (chance * width).long()
