"""Find and end processes by a random mark in their environment, which their children inherit.

The system may give a pid to another process once its owner has ended. A random mark is unique.
"""

from __future__ import annotations

import contextlib
import ipaddress
import time

import psutil

from paceline.errors import RunFailed

MARK = "PACELINE_CLUSTER"
POLL_S = 0.05


def find(mark: str) -> list[psutil.Process]:
    """Return the running processes with the mark; zombies are left out."""
    return [p for pid in psutil.pids() if (p := at(pid, mark)) is not None]


def at(pid: int, mark: str) -> psutil.Process | None:
    """Return the process with that pid, if it runs and has the mark."""
    try:
        process = psutil.Process(pid)
        there = process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.Error, OSError):  # ended meanwhile, or owned by another user
        return None
    return process if there else None


def command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def end(mark: str, wait_s: float) -> bool:
    """End all processes with the mark: SIGTERM first, SIGKILL after `wait_s`.

    Return whether there was any.
    """
    until, found = time.monotonic() + wait_s, False
    asked: set[psutil.Process] = set()
    while left := find(mark):  # again each time: a process may start another while it ends
        found, late = True, time.monotonic() > until
        for process in left:
            with contextlib.suppress(psutil.Error):
                if late:
                    process.kill()
                elif process not in asked:
                    asked.add(process)
                    process.terminate()
        if time.monotonic() > until + wait_s:
            raise RunFailed(
                f"the processes {', '.join(str(p.pid) for p in left)} still run after SIGKILL"
            )
        time.sleep(POLL_S)
    return found


def ports(process: psutil.Process) -> list[tuple[str, int]]:
    """Return (address, port) for every port on which the process listens."""
    try:
        connections = process.net_connections("inet")
    except psutil.Error:
        return []
    return [
        (str(c.laddr.ip), int(c.laddr.port)) for c in connections if c.status == psutil.CONN_LISTEN
    ]


def is_loopback(address: str) -> bool:
    parsed = ipaddress.ip_address(address)
    # Java listens on ::ffff:127.0.0.1
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return (mapped or parsed).is_loopback
