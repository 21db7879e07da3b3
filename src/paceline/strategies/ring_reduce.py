"""Ring reduce: all-reduce by passing the whole buffer, unchunked, along the line and round again.

    0 -> 1 -> ... -> P-1 adds up, then the sum goes round once more; by default it is the weights
    that are averaged.

The same average as `allreduce` from the same number of bytes in all, but only one link is busy at a
time: what the chunked ring is better than (Patarasuk & Yuan, 2009). Averaged weights are serial SGD
where there is no momentum, or where the workers' shares of the samples do not change between steps
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
    """The average of all workers in every step, by a ring that passes whole buffers."""

    collective: Annotated[Literal["ring-reduce"], "its own"] = "ring-reduce"
    exchange: Annotated[Literal["weights", "gradients"], "what is averaged"] = "weights"

    def refuses(self, codec: Codec) -> str | None:
        if codec.kind == "gather":
            return (
                f"ring-reduce adds up along the line, which messages of {codec.name} cannot be: use"
                " allreduce"
            )
        return None
