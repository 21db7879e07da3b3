"""A collective bound to a transport: what strategies and codecs call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor

from paceline.transport.base import Op, Transport


class Collective(ABC):
    """Built with the transport whose ranks it combines."""

    name: ClassVar[str]

    def __init__(self, transport: Transport) -> None:
        self.transport = transport

    @abstractmethod
    def all_reduce(self, buffer: Tensor, op: Op = "sum") -> None:
        """In place: every rank ends with the combination of all ranks' buffers, bit-identical on all of them."""
