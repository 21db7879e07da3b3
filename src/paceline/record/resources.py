"""CPU, memory and disk that a worker uses, as the operating system counts them."""

from __future__ import annotations

import os
import resource
import threading
import time
from dataclasses import dataclass
from typing import Any

import psutil

TICK_S = 1 / os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 0.01


@dataclass(frozen=True)
class Task:
    """A worker as the system knows it: a process, or a thread where workers are threads."""

    thread: int | None = None

    @classmethod
    def own(cls, alone_in_process: bool) -> Task:
        return cls(None if alone_in_process else threading.get_native_id())

    @property
    def folder(self) -> str:
        return "/proc/self" if self.thread is None else f"/proc/self/task/{self.thread}"


@dataclass(frozen=True)
class Usage:
    wall_s: float
    cpu_user_s: float
    cpu_system_s: float
    rss_bytes: int
    disk_read_bytes: int | None
    disk_write_bytes: int | None

    @classmethod
    def now(cls, task: Task) -> Usage:
        user, system = _cpu(task)
        read, written = _disk(task)
        return cls(
            time.perf_counter(), user, system, psutil.Process().memory_info().rss, read, written
        )

    def since(self, start: Usage) -> dict[str, Any]:
        """Return what was used since `start`, under run.json's names."""
        wall = max(1e-9, self.wall_s - start.wall_s)
        user, system = self.cpu_user_s - start.cpu_user_s, self.cpu_system_s - start.cpu_system_s

        def difference(now: int | None, then: int | None) -> int | None:
            return None if now is None or then is None else now - then

        return {
            "measured_s": wall,
            "cpu_percent": 100 * (user + system) / wall,
            "cpu_user_s": user,
            "cpu_system_s": system,
            "rss_peak_bytes": rss_peak_bytes(),
            "disk_read_bytes": difference(self.disk_read_bytes, start.disk_read_bytes),
            "disk_write_bytes": difference(self.disk_write_bytes, start.disk_write_bytes),
        }


def _cpu(task: Task) -> tuple[float, float]:
    if task.thread is None:
        times = psutil.Process().cpu_times()
        return times.user, times.system
    try:
        with open(f"{task.folder}/stat") as stat:
            fields = stat.read().rpartition(")")[2].split()
        return int(fields[11]) * TICK_S, int(fields[12]) * TICK_S
    except OSError:  # no /proc, or the thread is gone
        times = psutil.Process().cpu_times()
        return times.user, times.system


def _disk(task: Task) -> tuple[int | None, int | None]:
    """Return the bytes read from and written to storage; None where the system cannot tell."""
    try:
        with open(f"{task.folder}/io") as counters:
            values = dict(line.split(": ") for line in counters.read().splitlines())
        return int(values["read_bytes"]), int(values["write_bytes"])
    except (OSError, KeyError, ValueError):
        return None, None


def pss_bytes() -> int | None:
    """Return the resident memory; a page that n processes share counts 1/n.

    This walks the page tables, which is slow with much memory.
    """
    try:
        with open("/proc/self/smaps_rollup") as rollup:
            return next(
                (int(line.split()[1]) * 1024 for line in rollup if line.startswith("Pss:")), None
            )
    except OSError:
        return None


def rss_peak_bytes() -> int:
    """Return the peak of the resident memory, with pages that are shared with other workers."""
    try:
        with open("/proc/self/status") as status:
            for line in status:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def reset_rss_peak() -> None:
    """Reset the peak of the resident memory, because a forked worker inherits its parent's."""
    try:
        with open("/proc/self/clear_refs", "w") as clear:
            clear.write("5")
    except OSError:
        pass
