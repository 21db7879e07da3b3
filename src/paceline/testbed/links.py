"""How fast the hosts' links are, and how that is told to the kernel (`tc`)."""

from __future__ import annotations

import secrets
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from paceline.errors import BadRequest
from paceline.registry import parse_pairs
from paceline.units import RATES, TIMES, parse_unit

QUEUE_S = 0.2  # of traffic that a link holds back before it drops any
SMALLEST_QUEUE, SMALLEST_BURST = 256 << 10, 16 << 10  # bytes
BURST_S = 0.004  # a kernel looks that often, at least


@dataclass(frozen=True)
class Links:
    """`100mbit`, `100mbit,latency=1ms`, `rate=10mbit`, `unlimited`."""

    rate: float | None = None  # bits per second, in each direction; None: as fast as the machine
    latency_s: float = 0.0  # from host to host

    @classmethod
    def read(cls, text: str) -> Links:
        first, _, rest = text.partition(",")
        if "=" not in first:
            first = f"rate={first}"
        pairs = parse_pairs(",".join(p for p in (first, rest) if p), f"network={text}")
        if unknown := set(pairs) - {"rate", "latency"}:
            raise BadRequest(f"network={text}: it has a rate and a latency, no {', '.join(sorted(unknown))}")
        rate = str(pairs.get("rate", "unlimited"))
        bits = None if rate == "unlimited" else parse_unit(rate, RATES, "network: rate")
        if bits is not None and not 1e5 <= bits <= 1e12:
            raise BadRequest(f"network={text}: a rate between 100kbit and 1000gbit, or unlimited")
        latency_s = parse_unit(str(pairs.get("latency", "0")), TIMES, "network: latency")
        if latency_s > 10:
            raise BadRequest(f"network={text}: a latency of at most 10s")
        return cls(bits, latency_s)

    def __str__(self) -> str:
        rate = "unlimited" if self.rate is None else words(self.rate)
        return rate + (f",latency={self.latency_s * 1e3:g}ms" if self.latency_s else "")

    def shaping(self, device: str) -> list[list[str]]:
        """The commands that slow one end of a link down: what leaves through `device`."""
        commands = []
        if self.latency_s:  # half of it at each of the two ends that a packet leaves through
            delay = f"{self.latency_s / 2 * 1e6:.0f}us"
            commands.append(["tc", "qdisc", "add", "dev", device, "root", "handle", "1:", "netem", "delay", delay])
        if self.rate is not None:
            place = ["parent", "1:"] if self.latency_s else ["root"]
            burst = max(SMALLEST_BURST, int(self.rate * BURST_S / 8))
            queue = max(SMALLEST_QUEUE, int(self.rate * QUEUE_S / 8))
            told = ["rate", f"{self.rate:.0f}bit", "burst", str(burst), "limit", str(queue)]
            commands.append(["tc", "qdisc", "add", "dev", device, *place, "tbf", *told])
        return commands


def words(rate: float) -> str:
    """100mbit"""
    for name, unit in (("gbit", 1e9), ("mbit", 1e6), ("kbit", 1e3)):
        if rate >= unit:
            return f"{rate / unit:g}{name}"
    return f"{rate:g}bit"


def can_delay() -> bool:
    """Whether the kernel can shape latency (netem): tried on a device of a namespace's own."""
    with _probe() as name:
        if name is None:
            return False
        tried = ["ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"]
        return subprocess.run(tried, check=False, capture_output=True).returncode == 0


def can_make() -> bool:
    """Whether a namespace can be made at all."""
    with _probe() as name:
        return name is not None


@contextmanager
def _probe() -> Iterator[str | None]:
    """A namespace for a trial, deleted afterwards; None where it cannot be made: then nothing is deleted either."""
    name = f"pl-probe-{secrets.token_hex(8)}"
    try:
        made = subprocess.run(["ip", "netns", "add", name], check=False, capture_output=True).returncode == 0
    except OSError:
        made = False
    try:
        yield name if made else None
    finally:
        if made:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
