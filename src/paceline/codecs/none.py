"""No compression: the buffer itself travels."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from paceline.codecs.base import Codec
from paceline.collectives.base import Collective
from paceline.registry import codecs
from paceline.types import Layout


@codecs.register("none")
class NoCodec(Codec):
    """The numbers as they are."""

    lossless = True

    def reduce(self, buffer: Tensor, layout: Layout, collective: Collective, state: dict[str, Any]) -> None:
        collective.all_reduce(buffer)
