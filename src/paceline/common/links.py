"""The speed of the links between hosts, as users write it: `100mbit,latency=1ms`."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.common.units import RATES, TIMES, parse_unit
from paceline.common.values import parse_pairs
from paceline.errors import BadRequest


@dataclass(frozen=True)
class Links:
    """Rate and latency of the links between hosts."""

    rate: float | None = None  # bits per second, in each direction; None: not limited
    latency_s: float = 0.0  # from host to host

    @classmethod
    def read(cls, text: str) -> Links:
        """Read `100mbit`, `100mbit,latency=1ms`, `rate=10mbit` or `unlimited`."""
        first, _, rest = text.partition(",")
        if "=" not in first:
            first = f"rate={first}"
        pairs = parse_pairs(",".join(p for p in (first, rest) if p), f"network={text}")
        if unknown := set(pairs) - {"rate", "latency"}:
            raise BadRequest(
                f"network={text}: links have rate and latency, not {', '.join(sorted(unknown))}"
            )
        rate = str(pairs.get("rate", "unlimited"))
        bits = None if rate == "unlimited" else parse_unit(rate, RATES, "network: rate")
        if bits is not None and not 1e5 <= bits <= 1e12:
            raise BadRequest(f"network={text}: the rate must be 100kbit to 1000gbit, or unlimited")
        latency_s = parse_unit(str(pairs.get("latency", "0")), TIMES, "network: latency")
        if latency_s > 10:
            raise BadRequest(f"network={text}: the latency must be at most 10s")
        return cls(bits, latency_s)

    def __str__(self) -> str:
        rate = "unlimited" if self.rate is None else words(self.rate)
        return rate + (f",latency={self.latency_s * 1e3:g}ms" if self.latency_s else "")


def words(rate: float) -> str:
    """Return a rate as users write it: 100mbit."""
    for name, unit in (("gbit", 1e9), ("mbit", 1e6), ("kbit", 1e3)):
        if rate >= unit:
            return f"{rate / unit:g}{name}"
    return f"{rate:g}bit"
