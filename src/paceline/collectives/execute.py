"""The one executor: runs any schedule on any transport, in place, without allocating memory per
call.

All messages of a round are under way together. What is to be added arrives in scratch memory, and
where it is long in segments, so that one is added while the next arrives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.collectives.schedule import Schedule
from paceline.transport.base import REDUCE, Message, Op, Transport, check_tensor, wording

SEGMENT_BYTES = (
    4 << 20
)  # measured by benchmarks/segments.py: smaller ones cost more than the overlap gains
BOUND = (
    16  # buffers whose slices are kept: a training run has a few, and the same ones in every step
)

Range = tuple[int, int, int]  # (peer, from, to), in elements


@dataclass(frozen=True)
class Step:
    """What one rank does in one round: buffer ranges to send, to receive in place, and to receive
    aside.

    What is received aside is added to the rank's own when it is there, or, where the place is still
    being sent (a swap), put there when that is done.
    """

    sends: tuple[Range, ...]
    places: tuple[Range, ...]
    adds: tuple[Range, ...]
    swaps: tuple[Range, ...]

    @property
    def aside(self) -> int:
        return sum(high - low for _, low, high in (*self.adds, *self.swaps))


def plan(schedule: Schedule, rank: int, length: int, segment: int = 0) -> list[Step]:
    """A schedule as seen by one rank, in elements, in segments (0: uncut). Empty messages are not
    sent, by anybody.
    """
    steps = []
    for transfers in schedule.rounds:
        sends: list[Range] = []
        places: list[Range] = []
        adds: list[Range] = []
        swaps: list[Range] = []
        own = {(t.target, t.start, t.stop) for t in transfers if t.source == rank}
        for t in transfers:
            low, high = schedule.bounds(t.start, length)[0], schedule.bounds(t.stop - 1, length)[1]
            into = schedule.bounds(t.lands, length)[0]
            cut = segment if segment and t.adds else high - low
            for start in range(low, high, cut or 1):
                stop = min(start + cut, high)
                if t.source == rank:
                    sends.append((t.target, start, stop))
                if t.target == rank:
                    swapped = (t.source, t.lands, t.lands + t.stop - t.start) in own
                    kind = adds if t.adds else swaps if swapped else places
                    kind.append((t.source, start - low + into, stop - low + into))
        if sends or places or adds or swaps:
            steps.append(Step(tuple(sends), tuple(places), tuple(adds), tuple(swaps)))
    return steps


class BoundStep:
    """A step on a certain buffer: its messages, made once, and what is done when they have
    arrived.
    """

    def __init__(self, step: Step, flat: Tensor, scratch: Tensor, transport: Transport) -> None:
        asides = iter(
            scratch[: step.aside].split([high - low for _, low, high in (*step.adds, *step.swaps)])
        )

        def aside(ranges: tuple[Range, ...]) -> list[tuple[Message, Tensor, Tensor]]:
            arriving = [(peer, flat[low:high], next(asides)) for peer, low, high in ranges]
            return [(transport.receiving(place, peer), own, place) for peer, own, place in arriving]

        self.adds, self.swaps = aside(step.adds), aside(step.swaps)
        placing = [transport.receiving(flat[low:high], peer) for peer, low, high in step.places]
        leaving = [transport.sending(flat[low:high], peer) for peer, low, high in step.sends]
        self.messages = [*(m for m, _, _ in (*self.adds, *self.swaps)), *placing, *leaving]
        self.others = [*placing, *leaving]


class Executor:
    """A schedule bound to a transport. Plans and scratch memory are made at the first call of a
    size and kept.
    """

    def __init__(
        self, schedule: Schedule, transport: Transport, segment_bytes: int = SEGMENT_BYTES
    ) -> None:
        self.schedule, self.transport, self._segment_bytes = schedule, transport, segment_bytes
        self._plans: dict[tuple[Any, ...], tuple[list[Step], Tensor]] = {}
        self._bound: dict[tuple[Any, ...], list[BoundStep]] = {}

    def run(self, buffer: Tensor, op: Op = "sum") -> None:
        transport, reduce = self.transport, REDUCE[op]
        for step in self._steps(buffer, op):
            with transport.together():
                for message in step.messages:
                    message.start()
            for message, own, aside in step.adds:
                message.wait()
                reduce(own, aside, out=own)
            for message in step.others:
                message.wait()
            for message, own, aside in step.swaps:
                message.wait()
                own.copy_(aside)

    def _steps(self, buffer: Tensor, op: Op) -> list[BoundStep]:
        """The plan with its ranges cut out of this very buffer; kept, for a step comes back with
        the same buffers.
        """
        shape = (buffer.numel(), buffer.dtype, buffer.device, buffer.is_contiguous(), op)
        place = (buffer.data_ptr() if buffer.device.type != "meta" else 0, *shape)
        bound = self._bound.get(place)
        if bound is None:
            if shape not in self._plans:
                self._plans[shape] = self._plan(buffer, op)
            steps, scratch = self._plans[shape]
            while len(self._bound) >= BOUND:
                self._bound.pop(next(iter(self._bound)))
            bound = self._bound[place] = [
                BoundStep(step, buffer.detach().view(-1), scratch, self.transport) for step in steps
            ]
        return bound

    def _plan(self, buffer: Tensor, op: Op) -> tuple[list[Step], Tensor]:
        """The first call with such a buffer: all ranks bring the same, and it is one that can be
        moved.
        """
        if self.transport.size > 1:
            self.transport.agree(wording(f"{self.schedule.name} {op}", buffer))
        check_tensor(buffer, self.transport)
        segment = self._segment_bytes // buffer.element_size()
        steps = plan(self.schedule, self.transport.rank, buffer.numel(), segment)
        aside = max((step.aside for step in steps), default=0)
        return steps, torch.empty(aside, dtype=buffer.dtype, device=buffer.device)
