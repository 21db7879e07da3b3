"""How many bytes this process has moved over TCP, as the kernel counted them for each of its
sockets.

No system call gives network bytes per process; `TCP_INFO` gives them per socket, exactly and for
the price of a look.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct

SENT, RECEIVED = (
    200,
    128,
)  # offsets of tcpi_bytes_sent and tcpi_bytes_received in Linux' struct tcp_info
LENGTH = 216


class Sockets:
    """The sum over all TCP sockets that this process has, and those that it had when it was last
    asked.
    """

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, int]] = {}  # by inode
        self._told = True  # False on a kernel that does not count bytes

    def bytes(self) -> tuple[int, int] | None:
        """(sent, received) since the sockets were opened; None where the system does not tell."""
        if not hasattr(socket, "TCP_INFO"):
            return None
        try:
            open_files = os.listdir("/proc/self/fd")
        except OSError:
            return None
        for name in open_files:
            with contextlib.suppress(
                OSError, struct.error
            ):  # closed meanwhile, or not a TCP socket
                inode = os.readlink(f"/proc/self/fd/{name}")
                if inode.startswith("socket:"):
                    counted = _of_socket(int(name))
                    self._told = self._told and counted is not None
                    self._seen[inode] = counted or (0, 0)
        if not self._told:
            return None
        return sum(s for s, _ in self._seen.values()), sum(r for _, r in self._seen.values())


def _of_socket(number: int) -> tuple[int, int] | None:
    with socket.socket(fileno=os.dup(number)) as own:
        if own.family not in (socket.AF_INET, socket.AF_INET6) or own.type != socket.SOCK_STREAM:
            raise OSError("not TCP")
        info = own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, LENGTH)
    if len(info) < SENT + 8:
        return None
    return struct.unpack_from("=Q", info, SENT)[0], struct.unpack_from("=Q", info, RECEIVED)[0]


class Interface:
    """What went through one interface of the host that this process is on: where a worker has a
    host of its own.
    """

    def __init__(self, name: str = "eth0") -> None:
        self.name = name

    def bytes(self) -> tuple[int, int] | None:
        try:
            with open("/proc/net/dev") as counters:
                for line in counters:
                    name, _, numbers = line.partition(":")
                    if name.strip() == self.name:
                        found = numbers.split()
                        return int(found[8]), int(found[0])
        except (OSError, ValueError, IndexError):
            pass
        return None
