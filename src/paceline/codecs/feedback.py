"""Error feedback: what a message leaves out (the residual) is added to the next message (Seide et
al., 2014; Karimireddy et al., 2019).

    v <- x + e ;   send C(v) ;   e <- v - decoded C(v)

So sent + residual = original for every codec, and everything is sent in the end. Error feedback
covers a rank's own first encoding. It does not cover rounding at later hops of a hop codec.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from paceline.codecs.base import Codec, Kind, State
from paceline.collectives.base import Collective
from paceline.collectives.moves import Sum
from paceline.collectives.wire import Wire
from paceline.registry import Spec, codecs
from paceline.types import Layout


class Feedback(Codec):
    """Adds error feedback to any codec."""

    kind: Kind  # type: ignore[misc]
    biased: bool  # type: ignore[misc]

    def __init__(self, inner: Codec) -> None:
        super().__init__()
        self.inner = inner
        self.name, self.kind = inner.name, inner.kind  # type: ignore[misc]
        self.biased, self.varies = inner.biased, inner.varies
        self.feedback, self.timer = True, inner.timer

    @property
    def plain(self) -> Codec:
        return self.inner

    @property
    def wire(self) -> Wire | None:
        return self.inner.wire

    def __deepcopy__(self, memo: dict[int, object]) -> Feedback:
        return Feedback(copy.deepcopy(self.inner, memo))

    def start(
        self, layout: Layout, random: torch.Generator, shared_random: torch.Generator
    ) -> State:
        return {"inner": self.inner.start(layout, random, shared_random), "error": None}

    def fits(self, layout: Layout) -> None:
        self.inner.fits(layout)

    def message_bytes(self, layout: Layout) -> int:
        return self.inner.message_bytes(layout)

    def encode(self, values: Tensor, layout: Layout, message: Tensor, state: State) -> int:
        error, sent = (
            self._error(values, state),
            self.scratch("sent", values.numel(), values.dtype, values.device),
        )
        error.add_(values)
        used = self.inner.encode(error, layout, message, state["inner"])
        self.inner.decode(message[:used], layout, sent)
        error.sub_(sent)
        return used

    def decode(self, message: Tensor, layout: Layout, values: Tensor) -> None:
        self.inner.decode(message, layout, values)

    def add(self, message: Tensor, layout: Layout, total: Tensor) -> None:
        self.inner.add(message, layout, total)

    def sums(self, layout: Layout, schedule: str, workers: int) -> tuple[Sum, ...]:
        return self.inner.sums(layout, schedule, workers)

    def reduce(
        self,
        buffer: Tensor,
        layout: Layout,
        collective: Collective,
        state: State,
        sent: Tensor | None = None,
    ) -> None:
        own = (
            sent
            if sent is not None
            else self.scratch("sent", buffer.numel(), buffer.dtype, buffer.device)
        )
        with self.timer.encoding():
            error = self._error(buffer, state)
            error.add_(buffer)
            buffer.copy_(error)
        self.inner.reduce(buffer, layout, collective, state["inner"], own)
        with self.timer.encoding():
            error.sub_(own)

    def _error(self, values: Tensor, state: State) -> Tensor:
        if state["error"] is None:
            state["error"] = torch.zeros_like(values)
        error: Tensor = state["error"]
        return error


def build_codec(choice: Spec | str) -> Codec:
    """Build a codec by name, with error feedback if its option `feedback` is set."""
    codec: Codec = codecs.build(choice)
    return Feedback(codec) if codec.feedback else codec
