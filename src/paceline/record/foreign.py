"""The share of the machine that processes outside a measurement took while it went on."""

from __future__ import annotations

import os
from dataclasses import dataclass

import psutil


@dataclass(frozen=True)
class Foreign:
    """Shares of all cores' time: CPU of foreign processes, and time that the host took away."""

    used: float
    stolen: float

    @property
    def together(self) -> float:
        return self.used + self.stolen


class ForeignCpu:
    """Measures from its creation on what processes other than this one and its children use.

    A child's CPU time is known when the child has ended, so measure around whole runs. Interrupts
    belong to no process, and are left out: the kernel's work for our own network traffic is among
    them.
    """

    def __init__(self) -> None:
        self._start = _now()

    def shares(self) -> Foreign | None:
        """Return the shares since the beginning; None where the system does not tell."""
        (busy, stolen, total), own = _now()
        (busy_0, stolen_0, total_0), own_0 = self._start
        if total <= total_0:
            return None
        span = total - total_0
        used = max(0.0, (busy - busy_0) - (own - own_0)) / span
        return Foreign(used, (stolen - stolen_0) / span)


def _now() -> tuple[tuple[float, float, float], float]:
    times = psutil.cpu_times()
    guest = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)  # also in user, nice
    busy = times.user + getattr(times, "nice", 0.0) + times.system
    own = os.times()
    return (
        (busy, getattr(times, "steal", 0.0), sum(times) - guest),
        own.user + own.system + own.children_user + own.children_system,
    )
