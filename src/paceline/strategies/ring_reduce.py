"""Ring reduce: an all-reduce that sends the whole buffer, unchunked, twice around the ring.

    the buffers are summed along 0 -> 1 -> ... -> P-1, then the sum is sent around;
    by default the workers' weights are averaged

It computes the same average as `allreduce` with the same number of bytes, but only one link is busy
at a time, so it is slower than the chunked ring (Patarasuk & Yuan, 2009). Averaging weights is
serial SGD without momentum, or if the workers' shares of the samples do not change between steps
(see `allreduce`); `exchange=gradients` always is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from paceline.codecs.base import Codec
from paceline.registry import strategies
from paceline.strategies.allreduce import AllReduce


@strategies.register("ring-reduce")
@dataclass
class RingReduce(AllReduce):
    """Averages all workers in every step, by a ring that sends whole buffers."""

    collective: Annotated[Literal["ring-reduce"], "the unchunked ring"] = "ring-reduce"
    exchange: Annotated[Literal["weights", "gradients"], "what is averaged"] = "weights"

    def refuses(self, codec: Codec) -> str | None:
        if codec.kind == "gather":
            return (
                f"ring-reduce adds messages along the ring, and messages of {codec.name} cannot be"
                " added: use allreduce"
            )
        return None
