"""Limit the rate of links and delay them, with the kernel's `tc`."""

from __future__ import annotations

import secrets
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from paceline.common.links import Links

# A link queues this much before it drops packets: more than the ranks of a testbed send at once.
# Where several ranks send to one, a short queue drops the ends of their messages, and TCP sends
# these again after 0.2 s, by chance, many steps' time.
QUEUE_BYTES = 32 << 20
SMALLEST_BURST = 16 << 10  # bytes
# Bytes of a packet: jumbo frames, as networks of clusters have them. With 1,500, acknowledgements
# took 4% of a link that is busy in both directions, and the packets of links of 1 Gbit/s took more
# than two cores.
MTU = 9000
# The kernel's timer for a queue is precise to less than this. A longer burst makes short messages
# look free: 4 ms at 1 Gbit/s are 500 kB, more than the gradients of a small model.
BURST_S = 0.0005


def shaping(links: Links, device: str) -> list[list[str]]:
    """Return the commands that shape one direction of a link: what leaves through `device`."""
    commands = []
    if links.latency_s:  # half of it at each of the two ends that a packet leaves through
        delay = f"{links.latency_s / 2 * 1e6:.0f}us"
        commands.append(
            ["tc", "qdisc", "add", "dev", device, "root", "handle", "1:", "netem", "delay", delay]
        )
    if links.rate is not None:
        place = ["parent", "1:"] if links.latency_s else ["root"]
        burst = burst_bytes(links.rate)
        told = ["rate", f"{links.rate:.0f}bit", "burst", str(burst), "limit", str(QUEUE_BYTES)]
        commands.append(["tc", "qdisc", "add", "dev", device, *place, "tbf", *told])
    return commands


def burst_bytes(rate: float) -> int:
    """What a shaped link of so many bits per second lets pass at once after a pause."""
    return max(SMALLEST_BURST, int(rate * BURST_S / 8))


def can_delay() -> bool:
    """Whether the kernel can shape latency (netem); tries it in a namespace of its own."""
    with _probe() as name:
        if name is None:
            return False
        tried = [
            "ip",
            "netns",
            "exec",
            name,
            "tc",
            "qdisc",
            "add",
            "dev",
            "lo",
            "root",
            "netem",
            "delay",
            "1ms",
        ]
        return subprocess.run(tried, check=False, capture_output=True).returncode == 0


def can_make() -> bool:
    """Whether this process can make a network namespace."""
    with _probe() as name:
        return name is not None


@contextmanager
def _probe() -> Iterator[str | None]:
    """Make a namespace for a trial and delete it afterwards; None where it cannot be made."""
    name = f"pl-probe-{secrets.token_hex(8)}"
    try:
        made = (
            subprocess.run(
                ["ip", "netns", "add", name], check=False, capture_output=True
            ).returncode
            == 0
        )
    except OSError:
        made = False
    try:
        yield name if made else None
    finally:
        if made:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
