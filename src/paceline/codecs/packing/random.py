"""A codec's random numbers, drawn from a seed and a counter, which a checkpoint saves."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.codecs.base import State
from paceline.common.seeding import derive


def start(random: torch.Generator) -> State:
    return {"seed": int(torch.randint(0, 2**62, (), generator=random)), "draws": 0}


def next_seed(state: State) -> int:
    """Count one more message and return its seed."""
    state["draws"] += 1
    return derive(state["seed"], state["draws"])


class Generators:
    """One generator per device, seeded anew for every message."""

    def __init__(self) -> None:
        self._generators: dict[torch.device, torch.Generator] = {}

    def seeded(self, seed: int, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device)
        return self._generators[device].manual_seed(seed)


def noise(generator: torch.Generator, draws: Tensor, out: Tensor) -> None:
    """out <- uniform in [0, 1), in steps of 2**-16.

    Each int64 of `draws` is filled with 64 random bits, which make four numbers.
    """
    bits = draws[: -(-out.numel() // 4)].random_(-(2**63), None, generator=generator)
    out.copy_(bits.view(torch.int16)[: out.numel()].view_as(out))
    out.mul_(2.0**-16).add_(0.5)
