"""What a rank that a launcher has started tells the others when they meet."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from paceline.common.cores import as_ranges, from_ranges, usable
from paceline.common.sharing import Room
from paceline.launch.seat import Seat
from paceline.record.machine import boot_id

THIS_PROCESS = uuid4().hex


@dataclass(frozen=True)
class Present:
    """What a rank writes about itself when it joins a meeting."""

    ticket: int
    process: str
    agent: str
    restarts: int
    host: str
    address: str | None  # None: all ranks are on one host
    machine: str  # which containers of one machine share; the name of a host is each one's own
    cpus: str  # that this rank may use: `0-3,8`
    quotas: dict[str, float]  # cores, by the key of the quota (common/cores.py)

    @classmethod
    def read(cls, content: dict[str, Any]) -> Present:
        """Read an entry of the board: TypeError if malformed."""
        own = cls(**content)
        numbers = (own.ticket, own.restarts)
        words = (own.process, own.agent, own.host, own.address or "", own.machine, own.cpus)
        right = [isinstance(number, int) for number in numbers]
        right += [isinstance(word, str) for word in words]
        right += [isinstance(cores, float) for cores in dict(own.quotas).values()]
        if not all(right) or not from_ranges(own.cpus):
            raise TypeError("not a rank")
        return own

    @classmethod
    def of(cls, ticket: int, seat: Seat, address: str | None) -> Present:
        """Describe this process."""
        host, own = socket.gethostname(), usable()
        machine = boot_id() or host
        quotas = {quota.key: quota.cores for quota in own.quotas}
        return cls(
            ticket, THIS_PROCESS, seat.agent, seat.restarts, host, address, machine,
            as_ranges(own.cpus), quotas,
        )  # fmt: skip

    @property
    def room(self) -> Room:
        return Room(self.machine, from_ranges(self.cpus), self.quotas)
