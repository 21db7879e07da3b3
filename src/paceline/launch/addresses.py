"""Network addresses: loopback for ranks on one host, and one that other hosts can reach."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from ipaddress import ip_address

LOOPBACK = "127.0.0.1"


def is_loopback(address: str) -> bool:
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def keep_to_loopback() -> None:
    """Make PyTorch's own groups (DDP's) listen on loopback, unless the user chose an interface.

    For runs whose ranks are all on this host.
    """
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def address_towards(host: str, port: int) -> str:
    """Return this host's own address on the route to another host. Sends nothing."""
    with suppress(OSError):
        # Sorted: IPv4 comes first.
        found = sorted(socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM))
        for family, kind, _, _, where in found:
            with suppress(OSError), socket.socket(family, kind) as there:
                there.connect(where)
                return str(there.getsockname()[0])
    return host


def reachable(own: str, others: Sequence[str]) -> str:
    """Return an address of this host that ranks on the `others` can reach.

    The host of the store reaches the store by loopback, which is of no use to other hosts. It
    takes its address on the route to one of them instead.
    """
    abroad = [other for other in others if not is_loopback(other)]
    return address_towards(abroad[0], 1) if is_loopback(own) and abroad else own
