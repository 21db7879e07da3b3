"""Measure what moving bytes between two processes takes, by each transport of this machine.

Rank 0 sends a message to rank 1, which sends it back: half of that time is latency + bytes times
the time per byte. Then rank 0 sends messages one after the other, and each rank counts the CPU time
of its own process. Messages are prepared once and started often, as the executor of schedules does.
Only single messages are measured: how many a collective sends, its schedule knows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from paceline.planning.fit import Line, fit_line, median
from paceline.planning.profile import LinkCost
from paceline.registry import transports
from paceline.transport.base import Rendezvous, Transport

SIZES = (1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 22)  # bytes of a message
STREAM_BYTES = 1 << 22  # a stream of messages moves about this much
MOST_MESSAGES = 64  # of a stream, and of the exchanges of one size in a round
LEAST_ROUNDS = 2  # at least, also where they take longer than planned

Hear = Callable[[str, dict[str, Any]], None]


@dataclass
class Times:
    """What one rank measured with one transport, by size."""

    one_way_s: dict[int, list[float]] = field(default_factory=dict)
    added_s: dict[int, list[float]] = field(default_factory=dict)
    cpu_s: dict[int, list[float]] = field(default_factory=dict)  # of one message of a stream

    def note(self, kind: str, size: int, seconds: float) -> None:
        getattr(self, kind).setdefault(size, []).append(seconds)


def able() -> list[str]:
    """List the transports that move the CPU's memory between processes of this machine."""
    kinds: list[Any] = [entry.make for entry in transports]
    return [
        kind.name
        for kind in kinds
        if kind.traits.runs_as == "processes" and "cpu" in kind.traits.devices and kind.available()
    ]


def measure_links(
    names: Sequence[str], seconds: float, rendezvous: Rendezvous, say: Hear
) -> dict[str, Times]:
    """Do one of two ranks' part; return its times by transport. The transports take turns."""
    torch.set_num_threads(1)
    connected = {name: transports.entry(name).make.connect(rendezvous) for name in names}
    pairs = {name: Pair(transport) for name, transport in connected.items()}
    meeting = next(iter(connected.values()))
    found = {name: Times() for name in names}
    began, number = time.perf_counter(), -1  # the first round warms up
    while _agreed(meeting, number < LEAST_ROUNDS or time.perf_counter() - began < seconds):
        for size in SIZES:
            for name, pair in pairs.items():
                pair.measure(size, found[name] if number >= 0 else Times())
        number += 1
        if rendezvous.rank == 0:
            share = (time.perf_counter() - began) / max(seconds, 1e-9)
            say("progress", {"part": "links", "share": min(1.0, share)})
    for transport in connected.values():
        transport.barrier()
    for transport in connected.values():
        transport.close()
    return found


def _agreed(transport: Transport, goes_on: bool) -> bool:
    said = torch.tensor([int(goes_on)])
    transport.control.broadcast(said)
    return bool(said.item())


class Pair:
    """Two ranks with a transport, and buffers of every size."""

    def __init__(self, transport: Transport) -> None:
        self.transport, self.first = transport, transport.rank == 0
        cpu = torch.device("cpu")

        def memory(size: int) -> Tensor:
            return transport.allocate(size // 4, torch.float32, cpu)

        self.own = {size: memory(size) for size in SIZES}
        self.aside = {size: memory(size) for size in SIZES}
        other = 1 - transport.rank
        self.sending = {size: transport.sending(t, other) for size, t in self.own.items()}
        self.receiving = {size: transport.receiving(t, other) for size, t in self.aside.items()}

    def measure(self, size: int, times: Times) -> None:
        count = max(1, min(MOST_MESSAGES, STREAM_BYTES // size))
        self.transport.barrier()
        for _ in range(count):
            times.note("one_way_s", size, self._there_and_back(size) / 2)
        self.transport.barrier()
        times.note("cpu_s", size, self._stream(size, count) / count)
        for _ in range(count):
            began = time.perf_counter()
            torch.add(self.own[size], self.aside[size], out=self.own[size])
            times.note("added_s", size, time.perf_counter() - began)
        self.own[size].zero_()

    def _there_and_back(self, size: int) -> float:
        sending, receiving = self.sending[size], self.receiving[size]
        began = time.perf_counter()
        receiving.start()
        if not self.first:
            receiving.wait()
        sending.start()
        if self.first:
            receiving.wait()
        sending.wait()
        return time.perf_counter() - began

    def _stream(self, size: int, count: int) -> float:
        """Move messages from rank 0 to rank 1; return this process's CPU seconds."""
        message = self.sending[size] if self.first else self.receiving[size]
        began = time.process_time()
        for _ in range(count):
            message.start()
            message.wait()
        return time.process_time() - began


def link_cost(transport: str, ranks: Sequence[Times]) -> LinkCost:
    """Fit the lines of a link to what its sender and its receiver measured."""
    sender, receiver = ranks
    points = [(size, median(taken)) for size, taken in sorted(sender.one_way_s.items())]
    line = fit_line(points)
    added = _fitted(sender.added_s)
    sent, received = _fitted(sender.cpu_s), _fitted(receiver.cpu_s)
    return LinkCost(
        transport,
        latency_s=line.fixed,
        s_per_byte=line.slope,
        s_per_byte_added=added.slope,
        cpu_s_per_message_sent=sent.fixed,
        cpu_s_per_byte_sent=sent.slope,
        cpu_s_per_message_received=received.fixed,
        cpu_s_per_byte_received=received.slope,
        points=tuple(points),
    )


def _fitted(taken: dict[int, list[float]]) -> Line:
    return fit_line([(size, max(1e-9, median(all_))) for size, all_ in sorted(taken.items())])
