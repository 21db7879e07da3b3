"""How long ranks wait for each other."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Waits:
    """How long a rank waits for others, in seconds."""

    deadline_s: float = 30.0  # after so long a notice says which rank is slow
    give_up_s: float | None = None  # a wait ends after so long; None: never, or half an hour
    lost_s: float = 60.0  # a host that has not answered for so long is lost


WAITS = Waits()
