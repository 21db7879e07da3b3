"""A codec combines a buffer over all ranks while sending something smaller than the buffer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from paceline.collectives.base import Collective
from paceline.types import Layout


class Codec(ABC):
    name: ClassVar[str]
    lossless: ClassVar[bool]

    def start(self, layout: Layout, random: torch.Generator, shared_random: torch.Generator) -> dict[str, Any]:
        """What the codec remembers from step to step for one buffer; saved in checkpoints.

        `random` is this rank's own, `shared_random` draws the same on all ranks.
        """
        return {}

    @abstractmethod
    def reduce(self, buffer: Tensor, layout: Layout, collective: Collective, state: dict[str, Any]) -> None:
        """In place: the sum over all ranks, as far as the codec keeps it; bit-identical on all ranks."""
