"""A slow network between the ranks: every rank's link has a bandwidth and a latency."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from paceline.common.units import RATES, TIMES, parse_unit
from paceline.faults.base import Fault
from paceline.registry import faults
from paceline.transport.base import Again, Message, Op, Transport, Work
from paceline.transport.wrapper import Wrapper


@faults.register("link")
@dataclass
class Link(Fault):
    """All links have this bandwidth (per direction) and latency."""

    bandwidth: Annotated[str, "100mbit, 1gbit, ...; 0 is unlimited"] = "0"
    latency: Annotated[str, "1ms, 50us, ..."] = "0"

    def __post_init__(self) -> None:
        rate = parse_unit(self.bandwidth, RATES, "fault link: bandwidth")
        self.seconds_per_byte = 8 / rate if rate else 0.0
        self.latency_s = parse_unit(self.latency, TIMES, "fault link: latency")

    def wrap(self, transport: Transport) -> Transport:
        return SlowLink(transport, self.seconds_per_byte, self.latency_s)


class SlowLink(Wrapper):
    """Delays each send by the link's time. A native all-reduce takes as long as a ring would."""

    name = "slow-link"

    def __init__(self, inner: Transport, seconds_per_byte: float, latency_s: float) -> None:
        super().__init__(inner)
        self.seconds_per_byte, self.latency_s = seconds_per_byte, latency_s

    def around(self, other: Transport) -> Transport:
        return SlowLink(other, self.seconds_per_byte, self.latency_s)

    def _pass(self, size: int, messages: int = 1) -> None:
        self.inner.charge(messages * self.latency_s + size * self.seconds_per_byte)

    def isend(self, tensor: Tensor, to: int, tag: int = 0) -> Work:
        self._pass(tensor.nbytes)
        return self.inner.isend(tensor, to, tag)

    def sending(self, tensor: Tensor, to: int) -> Message:
        return Again(lambda: self.isend(tensor, to))

    def all_reduce(self, tensor: Tensor, op: Op = "sum") -> None:
        sent, _, messages = self.inner.all_reduce_bytes(tensor.numel(), tensor.element_size())
        self._pass(sent, messages)
        self.inner.all_reduce(tensor, op)

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        if self.rank == root and self.size > 1:
            self._pass(tensor.nbytes)
        self.inner.broadcast(tensor, root)
