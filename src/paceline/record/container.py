"""Resources that the whole container or machine uses, from its cgroup and network interfaces.

The figures are those of `docker stats`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import psutil

ROOT = Path("/sys/fs/cgroup")


def usage() -> dict[str, Any]:
    """Return the counters since start (CPU, disk, interfaces) and the memory in use now."""
    group = _version_2() or _version_1() or _system()
    interfaces = {
        name: {"sent_bytes": counted.bytes_sent, "received_bytes": counted.bytes_recv}
        for name, counted in psutil.net_io_counters(pernic=True).items()
        if counted.bytes_sent or counted.bytes_recv
    }
    return {**group, "interfaces": interfaces}


def difference(
    start: dict[str, Any], end: dict[str, Any], seconds: float, memory_peak_bytes: int | None
) -> dict[str, Any]:
    """Return what was used between two calls of `usage`."""

    def grown(key: str) -> Any:
        return None if start.get(key) is None or end.get(key) is None else end[key] - start[key]

    cpu_s, before = grown("cpu_s"), start.get("interfaces", {})
    none = {"sent_bytes": 0, "received_bytes": 0}
    return {
        "source": end["source"],
        "cpu_percent": None if cpu_s is None or seconds <= 0 else 100 * cpu_s / seconds,
        "memory_peak_bytes": memory_peak_bytes,
        "disk_read_bytes": grown("disk_read_bytes"),
        "disk_write_bytes": grown("disk_write_bytes"),
        "interfaces": {
            name: {key: value - before.get(name, none)[key] for key, value in counted.items()}
            for name, counted in end["interfaces"].items()
        },
    }


def _version_2() -> dict[str, Any] | None:
    folder = _own_group(ROOT, "")
    if folder is None or not (folder / "memory.current").is_file():
        return None
    stat, memory = table_in(folder / "cpu.stat"), table_in(folder / "memory.stat")
    used = number_in(folder / "memory.current")
    moved = of_devices((folder / "io.stat"), "rbytes=", "wbytes=")
    return {
        "source": "cgroup v2",
        "cpu_s": stat["usage_usec"] / 1e6 if "usage_usec" in stat else None,
        "memory_bytes": None if used is None else used - memory.get("inactive_file", 0),
        "disk_read_bytes": moved[0],
        "disk_write_bytes": moved[1],
    }


def _version_1() -> dict[str, Any] | None:
    memory, cpu, disk = (_own_group(ROOT / name, name) for name in ("memory", "cpuacct", "blkio"))
    if memory is None or cpu is None:
        return None
    used, nanoseconds = (
        number_in(memory / "memory.usage_in_bytes"),
        number_in(cpu / "cpuacct.usage"),
    )
    moved = (
        of_devices(disk / "blkio.throttle.io_service_bytes", "Read ", "Write ")
        if disk
        else (None, None)
    )
    return {
        "source": "cgroup v1",
        "cpu_s": None if nanoseconds is None else nanoseconds / 1e9,
        "memory_bytes": (
            None
            if used is None
            else used - table_in(memory / "memory.stat").get("total_inactive_file", 0)
        ),
        "disk_read_bytes": moved[0],
        "disk_write_bytes": moved[1],
    }


def _system() -> dict[str, Any]:
    times, disk = psutil.cpu_times(), psutil.disk_io_counters()
    return {
        "source": "system",
        "cpu_s": times.user + times.system,
        "memory_bytes": psutil.virtual_memory().used,
        "disk_read_bytes": disk.read_bytes if disk else None,
        "disk_write_bytes": disk.write_bytes if disk else None,
    }


def _own_group(mount: Path, controller: str) -> Path | None:
    """Return the folder of this process's group; in a container that is the mount itself."""
    if not mount.is_dir():
        return None
    try:
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, names, path = line.split(":", 2)
            if controller in names.split(",") and (mount / path.lstrip("/")).is_dir():
                return mount / path.lstrip("/")
    except (OSError, ValueError):
        pass
    return mount


def number_in(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def table_in(path: Path) -> dict[str, int]:
    try:
        pairs = (line.split() for line in path.read_text().splitlines())
        return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}
    except OSError:
        return {}


def of_devices(path: Path, read: str, write: str) -> tuple[int | None, int | None]:
    """Return the bytes read and written, summed over all devices.

    A line has `MAJOR:MINOR` and then `rbytes=1 wbytes=2` (version 2) or `Read 1` (version 1).
    """
    if not os.path.exists(path):
        return None, None
    totals = {read: 0, write: 0}
    try:
        for line in path.read_text().splitlines():
            for key in totals:
                _, found, rest = line.partition(key)
                if found and rest.split()[0].isdigit():
                    totals[key] += int(rest.split()[0])
    except (OSError, IndexError):
        return None, None
    return totals[read], totals[write]
