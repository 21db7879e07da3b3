"""A rank, as it enters itself in the list of a meeting on the board."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Present:
    """What a rank writes about itself when it joins a meeting."""

    ticket: int
    process: str
    agent: str
    restarts: int
    host: str
    address: str | None  # None: all ranks are on one host

    @classmethod
    def read(cls, content: dict[str, Any]) -> Present:
        """Read an entry of the board: TypeError if malformed."""
        own = cls(**content)
        numbers = (own.ticket, own.restarts)
        words = (own.process, own.agent, own.host, own.address or "")
        right = [isinstance(number, int) for number in numbers]
        right += [isinstance(word, str) for word in words]
        if not all(right):
            raise TypeError("not a rank")
        return own
