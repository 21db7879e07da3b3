"""The one executor: runs any schedule on any transport, in place, without allocating per call."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.collectives.schedule import Schedule
from paceline.errors import BadRequest
from paceline.transport.base import REDUCE, Op, Transport


@dataclass(frozen=True)
class Step:
    """What one rank does in one round: buffer ranges to send, to receive in place, and to receive and add."""

    sends: tuple[tuple[int, int, int], ...]  # (peer, from, to)
    places: tuple[tuple[int, int, int], ...]
    adds: tuple[tuple[int, int, int], ...]


def plan(schedule: Schedule, rank: int, length: int) -> list[Step]:
    """A schedule as seen by one rank, in elements. Empty messages are not sent, by anybody."""
    steps = []
    for transfers in schedule.rounds:
        sends: list[tuple[int, int, int]] = []
        places: list[tuple[int, int, int]] = []
        adds: list[tuple[int, int, int]] = []
        for t in transfers:
            low, high = t.start * length // schedule.chunks, t.stop * length // schedule.chunks
            if low == high:
                continue
            if t.source == rank:
                sends.append((t.target, low, high))
            if t.target == rank:
                (adds if t.adds else places).append((t.source, low, high))
        if sends or places or adds:
            steps.append(Step(tuple(sends), tuple(places), tuple(adds)))
    return steps


class Executor:
    """A schedule bound to a transport. Plans and scratch memory are made at the first call of a size and kept."""

    def __init__(self, schedule: Schedule, transport: Transport) -> None:
        self.schedule, self.transport = schedule, transport
        self._plans: dict[int, list[Step]] = {}
        self._scratch: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def run(self, buffer: Tensor, op: Op = "sum") -> None:
        if not buffer.is_contiguous():
            raise BadRequest("a collective works on a contiguous buffer")
        flat, transport, reduce = buffer.view(-1), self.transport, REDUCE[op]
        length = flat.numel()
        steps = self._plans.get(length)
        if steps is None:
            steps = self._plans[length] = plan(self.schedule, transport.rank, length)
        scratch = self._memory(steps, flat)
        for step in steps:
            used, arriving = 0, []
            for peer, low, high in step.adds:
                place = scratch[used : used + high - low]
                used += high - low
                arriving.append((transport.irecv(place, peer), flat[low:high], place))
            placing = [transport.irecv(flat[low:high], peer) for peer, low, high in step.places]
            leaving = [transport.isend(flat[low:high], peer) for peer, low, high in step.sends]
            for work, own, other in arriving:
                work.wait()
                reduce(own, other, out=own)
            for work in (*placing, *leaving):
                work.wait()

    def _memory(self, steps: list[Step], flat: Tensor) -> Tensor:
        needed = max((sum(high - low for _, low, high in s.adds) for s in steps), default=0)
        key = (flat.dtype, flat.device)
        have = self._scratch.get(key)
        if have is None or have.numel() < needed:
            have = self._scratch[key] = torch.empty(needed, dtype=flat.dtype, device=flat.device)
        return have
