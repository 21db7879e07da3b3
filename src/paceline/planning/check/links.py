"""What a testbed's link really costs, measured alone: one message between two hosts.

A plan of a testbed is only as true as its links. A message of n bytes after a pause should take

    latency + max(0, n - burst) * time per byte

(`transport/virtual.py`). The latency is that of the smallest message, the time per byte that of the
two largest, the burst is the token bucket's; all messages are printed beside that formula. The
processor time of moving bytes is that of the whole machine, because the kernel's share does not
count for any process.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import psutil
import torch

from paceline.common.links import Links
from paceline.launch.failures import root_cause
from paceline.launch.forks import on_forked_ranks
from paceline.planning.fit import median
from paceline.registry import transports
from paceline.testbed.build import lasting
from paceline.testbed.shaping import burst_bytes
from paceline.transport.base import Rendezvous, Waits
from paceline.transport.virtual import Link

SIZES = (1_000, 10_000, 100_000, 1_000_000, 10_000_000)  # bytes of a message
PAYLOAD = 1448 / 1514  # of an Ethernet frame with TCP's and IP's headers
SECONDS = 1.0  # for all messages of one size, about
MOST_MESSAGES, SMALL_MESSAGES = 15, 300
PAUSE_S = 0.002
PATIENCE_S = 300.0


@dataclass(frozen=True)
class LinkFound:
    """A link of a testbed, as it was measured."""

    network: str
    link: Link
    points: tuple[tuple[int, float], ...]  # bytes, and the median of the seconds of one message
    cpu_s_per_message: float  # of the whole machine, both ends
    cpu_s_per_byte: float

    def predicted_s(self, size: int) -> float:
        link = self.link
        return link.latency_s + max(0.0, size - link.burst_bytes) * link.s_per_byte

    @property
    def worst(self) -> float:
        """The largest miss of the formula, as a share."""
        return max(abs(self.predicted_s(size) / seconds - 1) for size, seconds in self.points)


def measure_link(network: str) -> LinkFound:
    """Build a testbed of two hosts, and send messages of every size there and back."""
    links = Links.read(network)
    burst = burst_bytes(links.rate) * PAYLOAD if links.rate else 0.0
    pause_s = PAUSE_S + (1.2 * burst * 8 / links.rate if links.rate else 0.0)
    with lasting(2, links) as bed:
        results, failures = on_forked_ranks(
            partial(_rank, links.rate or 1e10, pause_s), 2, waits=Waits(PATIENCE_S), bed=bed
        )
    if failures:
        raise root_cause(failures, 2)
    times, per_message_s, per_byte_s = results[0]
    return _found(network, times, burst, per_message_s, per_byte_s)


def _found(
    network: str, times: dict[int, list[float]], burst: float, message_s: float, byte_s: float
) -> LinkFound:
    points = tuple((size, median(taken)) for size, taken in sorted(times.items()))
    (large, large_s), (largest, largest_s) = points[-2:]
    per_byte = max(0.0, (largest_s - large_s) / (largest - large))
    return LinkFound(network, Link(points[0][1], per_byte, burst), points, message_s, byte_s)


def _rank(
    rate: float, pause_s: float, rendezvous: Rendezvous, say: Any
) -> tuple[dict[int, list[float]], float, float]:
    torch.set_num_threads(1)
    transport = transports.entry("gloo").make.connect(rendezvous)
    other, first = 1 - transport.rank, transport.rank == 0
    found: dict[int, list[float]] = {}
    cpu_s = 0.0

    def there_and_back(size: int, count: int, pause_s: float) -> tuple[list[float], float]:
        own, aside = torch.zeros(size // 4), torch.zeros(size // 4)
        sending, receiving = transport.sending(own, other), transport.receiving(aside, other)
        taken, busy = [], _busy_s()
        for _ in range(count + 1):  # the first one warms up
            if pause_s:
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
        return taken[1:], (_busy_s() - busy) / (2 * (count + 1))

    for size in SIZES:
        count = max(1, min(MOST_MESSAGES, int(SECONDS * rate / 8 / size)))
        found[size], cpu_s = there_and_back(size, count, pause_s)
    _, per_message_s = there_and_back(SIZES[0], SMALL_MESSAGES, 0.0)
    transport.barrier()
    transport.close()
    return found, per_message_s, max(0.0, cpu_s - per_message_s) / SIZES[-1]


def _busy_s() -> float:
    """Processor seconds of the whole machine, with those of the kernel for packets."""
    times = psutil.cpu_times()
    return float(times.user + times.system + times.irq + times.softirq)
