"""What a testbed's link really costs, measured alone: one message between two hosts.

A plan of a testbed is only as true as its links. A message of n bytes after a pause should take

    latency + max(0, n + own - burst) * time per byte

(`transport/virtual.py`). The latency is that of the smallest message, the time per byte that of the
two largest, the burst is the token bucket's; all messages are printed beside that formula. What a
message takes of its own, for protocols, shows where two hosts send to each other without a pause.

The processor time of moving bytes is measured in crowds of several sizes, whose ranks pass messages
round a ring: ranks that share this machine's cores find their caches cold, so a message costs more
among many ranks than between two. It is that of the whole machine, because the kernel's share does
not count for any process.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import psutil
import torch

from paceline.common.links import Links
from paceline.launch.failures import root_cause
from paceline.launch.forks import on_forked_ranks
from paceline.launch.messages import Body
from paceline.planning.fit import median
from paceline.registry import transports
from paceline.testbed.build import lasting
from paceline.testbed.shaping import MTU, burst_bytes
from paceline.transport.base import Message, Rendezvous, Waits
from paceline.transport.virtual import Link

SIZES = (1_000, 10_000, 100_000, 1_000_000, 10_000_000)  # bytes of a message
PAYLOAD = (MTU - 52) / (MTU + 14)  # of an Ethernet frame with TCP's and IP's headers
SECONDS = 1.0  # for all messages of one size, about
MOST_MESSAGES = 15
CROWDS = (2, 8, 16)  # ranks
ROUNDS = ((1_000, 200), (50_000, 20))  # bytes of a message, and how many each rank sends
STEADY_BYTES, STEADY_MESSAGES = 50_000, 24
MOST_OWN_BYTES = 2_000.0  # more than that is no protocol, but a machine that cannot keep up
PAUSE_S = 0.002
PATIENCE_S = 300.0


@dataclass(frozen=True)
class Moving:
    """The processor time of the whole machine for moving a message, with so many ranks at it."""

    ranks: int
    s_per_message: float
    s_per_byte: float


@dataclass(frozen=True)
class LinkFound:
    """A link of a testbed, as it was measured."""

    network: str
    link: Link
    points: tuple[tuple[int, float], ...]  # bytes, and the median of the seconds of one message
    crowds: tuple[Moving, ...]  # by ranks, rising

    def moving(self, ranks: int) -> Moving:
        """Between two crowds that were measured: on the line through them."""
        at = [each.ranks for each in self.crowds]
        per_message = np.interp(ranks, at, [each.s_per_message for each in self.crowds])
        per_byte = np.interp(ranks, at, [each.s_per_byte for each in self.crowds])
        return Moving(ranks, float(per_message), float(per_byte))

    def predicted_s(self, size: int) -> float:
        link = self.link
        over = max(0.0, size + link.message_bytes - link.burst_bytes)
        return link.latency_s + over * link.s_per_byte

    @property
    def worst(self) -> float:
        """The largest miss of the formula, as a share."""
        return max(abs(self.predicted_s(size) / seconds - 1) for size, seconds in self.points)


def measure_link(network: str, most_ranks: int = 2) -> LinkFound:
    """Send messages of every size there and back between two hosts of a testbed.

    Then measure what moving costs in crowds, up to one of `most_ranks` or the largest.
    """
    links = Links.read(network)
    burst = burst_bytes(links.rate) * PAYLOAD if links.rate else 0.0
    pause_s = PAUSE_S + (1.2 * burst * 8 / links.rate if links.rate else 0.0)
    times = _on_hosts(2, links, partial(_there_and_back, links.rate or 1e10, pause_s))
    # Longer than the burst, which hides the latency between two of them.
    steady = max(STEADY_BYTES, 2 * round(burst))
    each_s = _on_hosts(2, links, partial(_without_pause, steady))
    crowds = tuple(_on_hosts(ranks, links, _round_a_ring) for ranks in crowds_for(most_ranks))
    return _found(network, times, burst, crowds, (steady, each_s))


def crowds_for(most_ranks: int) -> list[int]:
    """The crowds between which, or at which, the costs of so many ranks lie."""
    smaller = [ranks for ranks in CROWDS if ranks < most_ranks]
    return list(CROWDS[: len(smaller) + 1])


def _on_hosts(ranks: int, links: Links, body: Body) -> Any:
    """Run the ranks on a testbed, a host for each; return what rank 0 found."""
    with lasting(ranks, links) as bed:
        results, failures = on_forked_ranks(body, ranks, waits=Waits(PATIENCE_S), bed=bed)
    if failures:
        raise root_cause(failures, ranks)
    return results[0]


def _found(
    network: str,
    times: dict[int, list[float]],
    burst: float,
    crowds: tuple[Moving, ...],
    steady: tuple[int, float] = (0, 0.0),
) -> LinkFound:
    points = tuple((size, median(taken)) for size, taken in sorted(times.items()))
    (large, large_s), (largest, largest_s) = points[-2:]
    per_byte = max(0.0, (largest_s - large_s) / (largest - large))
    size, each_s = steady
    own = min(max(0.0, each_s / per_byte - size), MOST_OWN_BYTES) if per_byte and size else 0.0
    return LinkFound(network, Link(points[0][1], per_byte, burst, own), points, crowds)


def _there_and_back(
    rate: float, pause_s: float, rendezvous: Rendezvous, say: Any
) -> dict[int, list[float]]:
    """Seconds of single messages, by size."""
    torch.set_num_threads(1)
    transport = transports.entry("gloo").make.connect(rendezvous)
    other, first = 1 - transport.rank, transport.rank == 0
    found: dict[int, list[float]] = {}
    for size in SIZES:
        own, aside = torch.zeros(size // 4), torch.zeros(size // 4)
        sending, receiving = transport.sending(own, other), transport.receiving(aside, other)
        taken = []
        for _ in range(1 + max(1, min(MOST_MESSAGES, int(SECONDS * rate / 8 / size)))):
            transport.barrier()
            time.sleep(pause_s)
            began = time.perf_counter()
            receiving.start()
            if not first:
                receiving.wait()
                time.sleep(pause_s)  # the answer begins with a full bucket, too
            sending.start()
            if first:
                receiving.wait()
            sending.wait()
            taken.append((time.perf_counter() - began - pause_s) / 2)
        found[size] = taken[1:]  # the first one warms up
    transport.barrier()
    transport.close()
    return found


def _without_pause(size: int, rendezvous: Rendezvous, say: Any) -> float:
    """Seconds of a message between two hosts that send to each other one after the other."""
    torch.set_num_threads(1)
    transport = transports.entry("gloo").make.connect(rendezvous)
    own, aside = torch.zeros(size // 4), torch.zeros(size // 4)
    other = 1 - transport.rank
    sending, receiving = transport.sending(own, other), transport.receiving(aside, other)
    began = 0.0
    for number in range(STEADY_MESSAGES + STEADY_MESSAGES // 4):
        if number == STEADY_MESSAGES // 4:  # those before use up the burst
            began = time.perf_counter()
        receiving.start()
        sending.start()
        receiving.wait()
        sending.wait()
    each_s = (time.perf_counter() - began) / STEADY_MESSAGES
    transport.barrier()
    transport.close()
    return each_s


def _round_a_ring(rendezvous: Rendezvous, say: Any) -> Moving:
    """The processor time of a message, and of its bytes, while all ranks send and receive."""
    torch.set_num_threads(1)
    transport = transports.entry("gloo").make.connect(rendezvous)
    ranks, rank = transport.size, transport.rank
    costs = []
    for size, rounds in ROUNDS:
        own, aside = torch.zeros(size // 4), torch.zeros(size // 4)
        sending = transport.sending(own, (rank + 1) % ranks)
        receiving = transport.receiving(aside, (rank - 1) % ranks)

        def pass_on(times: int, sending: Message = sending, receiving: Message = receiving) -> None:
            for _ in range(times):
                receiving.start()
                sending.start()
                receiving.wait()
                sending.wait()
            transport.barrier()

        pass_on(2)  # to warm up
        busy = _busy_s()
        pass_on(rounds)
        costs.append((_busy_s() - busy) / rounds / ranks)
    transport.close()
    (small, _), (large, _) = ROUNDS
    per_byte = max(0.0, (costs[1] - costs[0]) / (large - small))
    return Moving(ranks, max(0.0, costs[0] - small * per_byte), per_byte)


def _busy_s() -> float:
    """Processor seconds of the whole machine, with those of the kernel for packets."""
    times = psutil.cpu_times()
    return float(times.user + times.system + times.irq + times.softirq)
