"""What the container of a rank uses, as the rank reads it in its own cgroup and network namespace.

CPU, memory, network and block I/O are the counters that `docker stats` and `podman stats` print.
Outside a container, and in one that shares the cgroup of its machine, there is nothing to read.
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from paceline.record.container import number_in, of_devices, table_in

# of Podman, of Docker, of a pod
MARKS = tuple(map(Path, ("/run/.containerenv", "/.dockerenv", "/var/run/secrets/kubernetes.io")))
FIRST_NAMESPACE = "cgroup:[4026531835]"  # the machine's own: the number is fixed in Linux
COUNTED = (
    "cpu_s",
    "net_received_bytes",
    "net_sent_bytes",
    "block_read_bytes",
    "block_write_bytes",
)


@dataclass(frozen=True)
class Reading:
    """The counters of a container since its start, and its memory, at one moment."""

    at_s: float  # since 1970
    source: str  # cgroup v1, cgroup v2
    cpu_s: float | None
    memory_bytes: int | None  # `docker stats`: without the part of the page cache that is inactive
    memory_with_cache_bytes: int | None  # `podman stats`
    net_received_bytes: int
    net_sent_bytes: int
    block_read_bytes: int | None
    block_write_bytes: int | None


@dataclass(frozen=True)
class Groups:
    """Where the container's own cgroups are mounted, by controller; version 2 has one for all."""

    version: int
    folders: dict[str, Path]

    @classmethod
    def find(cls, process: Path = Path("/proc/self"), marked: bool | None = None) -> Groups | None:
        """Return the groups of this container; None outside, or where they are the machine's."""
        if marked is None:
            marked = any(mark.exists() for mark in MARKS)
        if not marked:
            return None
        try:
            own = os.readlink(process / "ns" / "cgroup") != FIRST_NAMESPACE
            mounts = (process / "mountinfo").read_text(errors="replace").splitlines()
        except OSError:
            return None
        version_1: dict[str, Path] = {}
        version_2: dict[str, Path] = {}
        for line in mounts:
            before, _, after = line.partition(" - ")
            left, right = before.split(" "), after.split(" ")
            if len(left) < 5 or len(right) < 3 or not (own or left[3] != "/"):
                continue
            if right[0] == "cgroup2" and (Path(left[4]) / "memory.current").is_file():
                version_2[""] = Path(left[4])
            elif right[0] == "cgroup":
                for controller in right[2].split(","):
                    version_1.setdefault(controller, Path(left[4]))
        if version_2:
            return cls(2, version_2)
        return cls(1, version_1) if {"cpuacct", "memory"} <= version_1.keys() else None

    def read(self) -> Reading:
        """Read all counters now."""
        used = self._version_2() if self.version == 2 else self._version_1()
        received, sent = network_bytes()
        return Reading(
            time.time(),
            f"cgroup v{self.version}",
            net_received_bytes=received,
            net_sent_bytes=sent,
            **used,
        )

    def _version_2(self) -> dict[str, Any]:
        folder = self.folders[""]
        usec = table_in(folder / "cpu.stat").get("usage_usec")
        used = number_in(folder / "memory.current")
        read, written = of_devices(folder / "io.stat", "rbytes=", "wbytes=")
        return {
            "cpu_s": None if usec is None else usec / 1e6,
            **_memory(used, table_in(folder / "memory.stat").get("inactive_file", 0)),
            "block_read_bytes": read,
            "block_write_bytes": written,
        }

    def _version_1(self) -> dict[str, Any]:
        cpu, memory = self.folders["cpuacct"], self.folders["memory"]
        nanoseconds = number_in(cpu / "cpuacct.usage")
        used = number_in(memory / "memory.usage_in_bytes")
        read = written = None
        if (block := self.folders.get("blkio")) is not None:
            every = block / "blkio.throttle.io_service_bytes_recursive"
            read, written = of_devices(every, "Read ", "Write ")
        return {
            "cpu_s": None if nanoseconds is None else nanoseconds / 1e9,
            **_memory(used, table_in(memory / "memory.stat").get("total_inactive_file", 0)),
            "block_read_bytes": read,
            "block_write_bytes": written,
        }


def _memory(used: int | None, inactive: int) -> dict[str, int | None]:
    without = None if used is None else max(0, used - inactive)
    return {"memory_bytes": without, "memory_with_cache_bytes": used}


def network_bytes() -> tuple[int, int]:
    """Return the bytes received and sent by all interfaces of this namespace but loopback."""
    counted = [
        counter
        for name, counter in psutil.net_io_counters(pernic=True).items()
        if not re.fullmatch(r"lo\d*", name)
    ]
    return sum(c.bytes_recv for c in counted), sum(c.bytes_sent for c in counted)


class Contained:
    """What a rank's container uses while the rank trains: two readings, and their difference."""

    def __init__(self) -> None:
        self.groups = Groups.find()
        self.first: Reading | None = None
        self.last: Reading | None = None
        self.memory_peak_bytes = 0
        self.training = False

    def begin(self) -> None:
        """Training begins, or goes on after a pause: the first reading stays."""
        self.training = True
        if self.groups is not None and self.first is None:
            self.first = self._read(self.groups)

    def pause(self) -> None:
        """Training ends, for now: the last reading counts."""
        if self.groups is not None and self.training:
            self.last = self._read(self.groups)
        self.training = False

    def sample(self) -> None:
        """Look at the memory, for its peak."""
        if self.groups is not None and self.first is not None:
            self._read(self.groups)

    def _read(self, groups: Groups) -> Reading:
        now = groups.read()
        self.memory_peak_bytes = max(self.memory_peak_bytes, now.memory_bytes or 0)
        return now

    def described(self) -> dict[str, Any] | None:
        """Return what was used between the two readings, under run.json's names."""
        if self.first is None or self.last is None:
            return None
        before, after = asdict(self.first), asdict(self.last)

        def grown(key: str) -> Any:
            known = before[key] is not None and after[key] is not None
            return after[key] - before[key] if known else None

        return {
            "source": self.last.source,
            "from_s": self.first.at_s,
            "until_s": self.last.at_s,
            **{key: grown(key) for key in COUNTED},
            "memory_bytes": self.last.memory_bytes,
            "memory_with_cache_bytes": self.last.memory_with_cache_bytes,
            "memory_peak_bytes": self.memory_peak_bytes or None,
        }
