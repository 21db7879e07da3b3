"""Measure what every registered codec's work costs, on real gradients of the model, on one thread.

The codecs take turns, so that slow changes of the machine hit all alike. The first round warms up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.codecs.base import Codec
from paceline.codecs.feedback import build_codec
from paceline.collectives.base import choose
from paceline.common.seeding import generator
from paceline.errors import PacelineError
from paceline.planning.fit import Line, fit_line, median
from paceline.planning.profile import CodecCost
from paceline.registry import codecs
from paceline.transport.alone import Alone
from paceline.types import Layout

LEAST_ROUNDS = 3  # at least, also where they take longer than planned
PARTS_OF_HOPS = (16, 4, 1)  # a hop codec encodes these parts of the gradients

Seconds = tuple[float, float]  # of encoding and of decoding
Progress = Callable[[float], None]


@dataclass
class Contender:
    """A codec at work: what one call takes, by the bytes of the numbers that it encodes."""

    codec: Codec
    message_bytes: int
    calls: dict[int, Callable[[], Seconds]]
    taken: dict[int, list[Seconds]] = field(default_factory=dict)

    def turn(self, kept: bool) -> None:
        for size, call in self.calls.items():
            seconds = call()
            if kept:
                self.taken.setdefault(size, []).append(seconds)

    def cost(self) -> CodecCost:
        encode, decode = (
            self._line(
                [(size, median([t[way] for t in all_])) for size, all_ in self.taken.items()]
            )
            for way in (0, 1)
        )
        name, kind = self.codec.name, self.codec.kind
        return CodecCost(name, kind, self.message_bytes, encode, decode)

    def _line(self, points: list[tuple[float, float]]) -> Line:
        """A time below the clock's resolution counts as the least that the clock shows."""
        return fit_line([(size, max(seconds, 1e-9)) for size, seconds in points])


def measure_codecs(
    values: Tensor, layout: Layout, seconds: float, progress: Progress = lambda share: None
) -> tuple[tuple[CodecCost, ...], list[str]]:
    """Return the cost of each codec that can encode these gradients, and why others cannot."""
    contenders, missing = [], []
    for name in codecs.names():
        try:
            codec = build_codec(name)
            if codec.kind == "none":
                continue
            codec.fits(layout)
            contender = _contender(codec, values.clone(), layout)
            contender.turn(kept=False)
            contenders.append(contender)
        except PacelineError as error:
            missing.append(f"Codec {name} was not measured: {error}.")
    began, number = time.perf_counter(), 0
    while contenders and (number < LEAST_ROUNDS or time.perf_counter() - began < seconds):
        for contender in contenders:
            contender.turn(kept=True)
        number += 1
        progress(min(1.0, (time.perf_counter() - began) / max(seconds, 1e-9)))
    return tuple(contender.cost() for contender in contenders), missing


def _contender(codec: Codec, values: Tensor, layout: Layout) -> Contender:
    state = codec.start(layout, generator(0, "own"), generator(0, "shared"))
    message = torch.zeros(codec.message_bytes(layout), dtype=torch.uint8)
    size, out = values.nbytes, torch.zeros_like(values)
    if codec.wire is not None:
        calls = _hops(codec, values, out)
        return Contender(codec, codec.message_bytes(layout), calls)
    used = codec.encode(values, layout, message, state)
    if codec.kind == "linear":
        collective = choose("native", Alone())

        def exchange() -> Seconds:
            out.copy_(values)
            codec.timer.taken()
            codec.reduce(out, layout, collective, state)
            return codec.timer.taken()

        return Contender(codec, used, {size: exchange})

    def once() -> Seconds:
        began = time.perf_counter()
        length = codec.encode(values, layout, message, state)
        encoded = time.perf_counter()
        codec.add(message[:length], layout, out)
        return encoded - began, time.perf_counter() - encoded

    return Contender(codec, used, {size: once})


def _hops(codec: Codec, values: Tensor, out: Tensor) -> dict[int, Callable[[], Seconds]]:
    """Encode and decode chunks of several sizes, as the hops of an all-reduce do."""
    wire = codec.wire
    assert wire is not None

    def chunk_of(numel: int) -> Callable[[], Seconds]:
        message = torch.zeros(wire.length(numel), dtype=torch.uint8)
        chunk, into = values[:numel], out[:numel]

        def once() -> Seconds:
            began = time.perf_counter()
            wire.pack(chunk, message)
            packed = time.perf_counter()
            wire.unpack(message, into)
            return packed - began, time.perf_counter() - packed

        return once

    lengths: Sequence[int] = sorted({max(1, values.numel() // part) for part in PARTS_OF_HOPS})
    return {numel * values.element_size(): chunk_of(numel) for numel in lengths}
