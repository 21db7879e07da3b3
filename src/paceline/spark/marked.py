"""Processes with a mark in their environment, which what they start inherits: found by it, looked
at, and ended by it.

A number (pid) may belong to another process by the time it is used again; a mark that was drawn at
random does not.
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
    """Those that run; not those that have ended and only wait to be noticed."""
    return [p for pid in psutil.pids() if (p := at(pid, mark)) is not None]


def at(pid: int, mark: str) -> psutil.Process | None:
    """The process with that number, if it runs and has the mark."""
    try:
        process = psutil.Process(pid)
        there = process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.Error, OSError):  # gone meanwhile, or another person's
        return None
    return process if there else None


def command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def end(mark: str, wait_s: float) -> bool:
    """SIGTERM, after a while SIGKILL, to all of them until there is none; whether there was any."""
    until, found = time.monotonic() + wait_s, False
    asked: set[psutil.Process] = set()
    while left := find(mark):  # looked up each time: one that ends may have started another
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
                f"the processes {', '.join(str(p.pid) for p in left)} cannot be ended, not even"
                " with SIGKILL"
            )
        time.sleep(POLL_S)
    return found


def ports(process: psutil.Process) -> list[tuple[str, int]]:
    """Address and number of every port that it listens on."""
    try:
        connections = process.net_connections("inet")
    except psutil.Error:
        return []
    return [
        (str(c.laddr.ip), int(c.laddr.port)) for c in connections if c.status == psutil.CONN_LISTEN
    ]


def is_loopback(address: str) -> bool:
    parsed = ipaddress.ip_address(address)
    mapped = (
        parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    )  # Java says ::ffff:127.0.0.1
    return (mapped or parsed).is_loopback
