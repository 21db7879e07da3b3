"""What a process used, as the system saw it."""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass
from typing import Any

import psutil


@dataclass(frozen=True)
class Usage:
    wall_s: float
    cpu_user_s: float
    cpu_system_s: float
    disk_read_bytes: int | None
    disk_write_bytes: int | None

    @classmethod
    def now(cls) -> Usage:
        process = psutil.Process()
        times = process.cpu_times()
        try:
            disk = process.io_counters()
            read, written = int(disk.read_bytes), int(disk.write_bytes)
        except (psutil.AccessDenied, AttributeError, OSError):  # not every system tells
            return cls(time.perf_counter(), times.user, times.system, None, None)
        return cls(time.perf_counter(), times.user, times.system, read, written)

    def since(self, start: Usage) -> dict[str, Any]:
        """In run.json's own names."""
        wall = max(1e-9, self.wall_s - start.wall_s)
        user, system = self.cpu_user_s - start.cpu_user_s, self.cpu_system_s - start.cpu_system_s

        def difference(now: int | None, then: int | None) -> int | None:
            return None if now is None or then is None else now - then

        return {
            "cpu_percent": 100 * (user + system) / wall,
            "cpu_user_s": user,
            "cpu_system_s": system,
            "rss_peak_bytes": rss_peak_bytes(),
            "disk_read_bytes": difference(self.disk_read_bytes, start.disk_read_bytes),
            "disk_write_bytes": difference(self.disk_write_bytes, start.disk_write_bytes),
        }


def rss_peak_bytes() -> int:
    """The most memory that was resident, pages shared with other workers included."""
    try:
        with open("/proc/self/status") as status:
            for line in status:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def reset_rss_peak() -> None:
    """A forked worker inherits its parent's peak; start counting anew."""
    try:
        with open("/proc/self/clear_refs", "w") as clear:
            clear.write("5")
    except OSError:
        pass
