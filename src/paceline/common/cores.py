"""How many cores a process may use: its affinity mask, and the CPU quotas of its cgroups.

A quota is the limit that `docker run --cpus`, a Kubernetes limit or systemd's CPUQuota sets. Every
group from the process's own up to the root may have one, and the smallest counts. A quota of 1.5
gives one thread: the kernel stops a second thread for half of every period, and the first waits
for it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

SELF = Path("/proc/self")
OCTAL = re.compile(r"\\([0-7]{3})")  # mountinfo writes a space as \040
SLACK = 1e-6  # sums of shares are not exact: 0.999999 cores are one


@dataclass(frozen=True)
class Quota:
    """The CPU quota of one cgroup."""

    cores: float
    version: int  # of cgroups: 1 or 2
    group: str  # its name, as this process sees it: inside a container `/` is the container's own
    key: str  # the same for all processes that share this quota, in any container of the machine

    def __str__(self) -> str:
        return f"cgroup v{self.version} quota {self.cores:.3g} of {self.group}"


@dataclass(frozen=True)
class Usable:
    """The cores that this process may use, and why."""

    cpus: frozenset[int]
    quotas: tuple[Quota, ...] = ()  # from the process's own group up

    @property
    def count(self) -> int:
        """The number of cores, for threads that compute: rounded down, and at least 1."""
        return max(1, int(min([len(self.cpus), *(q.cores for q in self.quotas)]) + SLACK))

    @property
    def source(self) -> str:
        """Where the number comes from: `affinity mask 4, cgroup v2 quota 2 of /kubepods/pod1`."""
        mask = "affinity mask" if hasattr(os, "sched_getaffinity") else "processors"
        smallest = min(self.quotas, key=lambda quota: quota.cores, default="no cgroup quota")
        return f"{mask} {len(self.cpus)}, {smallest}"

    def __str__(self) -> str:
        return f"{self.count} core{'s' if self.count > 1 else ''}: {self.source}"


def as_ranges(cpus: Iterable[int]) -> str:
    """Write a set of processors the way Linux does: `0-3,8`."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], cpu]
        else:
            runs.append([cpu])
    return ",".join("-".join(map(str, run)) for run in runs)


def from_ranges(text: str) -> frozenset[int]:
    """Read what `as_ranges` writes: ValueError if malformed."""
    ends = [[int(end) for end in part.split("-")] for part in text.split(",")]
    return frozenset(cpu for run in ends for cpu in range(run[0], run[-1] + 1))


def cores() -> int:
    """Return how many cores this process may use; a container may have fewer than the machine."""
    return usable().count


def usable(process: Path = SELF) -> Usable:
    """Read what a process may use. `process`: its folder in /proc."""
    if hasattr(os, "sched_getaffinity"):
        cpus = frozenset(os.sched_getaffinity(0))
    else:
        cpus = frozenset(range(os.cpu_count() or 1))
    return Usable(cpus, tuple(_quotas(process)))


def _quotas(process: Path) -> Iterator[Quota]:
    """Yield the quotas of both versions of cgroups; a machine may have mounted both."""
    own = dict(_groups(process / "cgroup"))
    found = set()
    for version, mount, root in _mounts(process / "mountinfo"):
        if version not in own:
            continue
        for folder, group in _upwards(mount, root, own[version]):
            quota = _read(version, folder, group)
            if quota is not None and quota.key not in found:
                found.add(quota.key)
                yield quota


def _groups(path: Path) -> Iterator[tuple[int, PurePosixPath]]:
    """Yield the process's group in each version: `4:cpu,cpuacct:/a` is version 1, `0::/a` 2."""
    for line in _lines(path):
        number, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if number == "0" and not controllers:
            yield 2, PurePosixPath(group)
        elif "cpu" in controllers.split(","):
            yield 1, PurePosixPath(group)


def _mounts(path: Path) -> Iterator[tuple[int, Path, PurePosixPath]]:
    """Yield where groups with a CPU quota are mounted: version, folder, and the group there.

    A line: `32 31 0:29 /docker/a /sys/fs/cgroup/cpu rw shared:1 - cgroup cgroup rw,cpu`.
    """
    for line in _lines(path):
        before, _, after = line.partition(" - ")
        left, right = before.split(" "), after.split(" ")
        if len(left) < 5 or len(right) < 3:
            continue
        root, mount = (OCTAL.sub(lambda found: chr(int(found[1], 8)), left[n]) for n in (3, 4))
        if right[0] == "cgroup2":
            yield 2, Path(mount), PurePosixPath(root)
        elif right[0] == "cgroup" and "cpu" in right[2].split(","):
            yield 1, Path(mount), PurePosixPath(root)


def _upwards(
    mount: Path, root: PurePosixPath, own: PurePosixPath
) -> Iterator[tuple[Path, PurePosixPath]]:
    """Yield the folder and the name of the process's group, and of those above it that are visible.

    A mount that shows groups of other processes only has nothing to say.
    """
    if all(part in ("/", "..") for part in root.parts) and root != PurePosixPath("/"):
        yield mount, root  # made outside this cgroup namespace: one of the groups above
        return
    try:
        below = own.relative_to(root)
    except ValueError:
        return
    if ".." in below.parts:
        return
    for group in (below, *below.parents):
        yield mount / group, root / group


def _read(version: int, folder: Path, group: PurePosixPath) -> Quota | None:
    """Read a group's quota; None where there is none, or nothing that can be read."""
    try:
        if version == 2:
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text()
            period = (folder / "cpu.cfs_period_us").read_text()
        cores = int(quota) / int(period)  # `max` is no number
        number = folder.stat().st_ino
    except (OSError, ValueError, ArithmeticError):
        return None
    return Quota(cores, version, str(group), f"v{version}:{number}") if cores > 0 else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []
