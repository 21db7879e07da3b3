"""How the ranks of a run share the cores of their machines.

Each rank says what it may use (common/cores.py) and on which machine it is. Containers of one
machine have names and networks of their own, but one kernel, whose boot id is the machine's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from paceline.common.cores import SLACK, usable


@dataclass(frozen=True)
class Room:
    """What one rank may use of its machine."""

    machine: str
    cpus: frozenset[int]
    quotas: Mapping[str, float]  # cores, by the key of the quota


@dataclass(frozen=True)
class Sharing:
    """What all ranks of a run may use, in the order of the ranks."""

    rooms: tuple[Room, ...]
    rank: int = 0  # this process's
    each: int | None = None  # the threads of every worker; None: as many as its share

    @classmethod
    def here(cls, ranks: int, each: int | None = None) -> Sharing:
        """All ranks are on this machine, and may use what this process may."""
        own = usable()
        room = Room("", own.cpus, {quota.key: quota.cores for quota in own.quotas})
        return cls((room,) * ranks, each=each)

    def with_threads(self, each: int) -> Sharing:
        return replace(self, each=each)

    @cached_property
    def _users(self) -> Counter[tuple[str, int | str]]:
        """How many ranks share a core, or a quota, of a machine."""
        users: Counter[tuple[str, int | str]] = Counter()
        for room in self.rooms:
            users.update((room.machine, cpu) for cpu in room.cpus)
            users.update((room.machine, quota) for quota in room.quotas)
        return users

    def share(self, rank: int) -> float:
        """Return a rank's part of its machine's cores: each core is divided by its users."""
        room = self.rooms[rank]
        of_cpus = sum(1 / self._users[room.machine, cpu] for cpu in room.cpus)
        of_quotas = [cores / self._users[room.machine, q] for q, cores in room.quotas.items()]
        return min([of_cpus, *of_quotas])

    def threads(self, rank: int) -> int:
        """Return how many threads a rank computes with, where the user has not said."""
        return max(1, int(self.share(rank) + SLACK))

    @property
    def cores(self) -> int:
        """The cores of all machines that the ranks may use."""
        return max(1, int(sum(self.share(rank) for rank in range(len(self.rooms))) + SLACK))

    @property
    def machines(self) -> int:
        return len({room.machine for room in self.rooms})

    def fits(self, workers: int, more: int = 0) -> bool:
        """Return whether every thread has a core: those of the workers, `more` threads for each of
        them, and one of each server (the ranks after the workers).
        """
        threads = [
            (self.threads(rank) if self.each is None else self.each) + more if rank < workers else 1
            for rank in range(len(self.rooms))
        ]
        limits: dict[tuple[str, str], float] = {}
        needed: Counter[tuple[str, str]] = Counter()
        together: dict[str, set[int]] = {}
        for room, own in zip(self.rooms, threads, strict=True):
            if own > len(room.cpus):
                return False
            together.setdefault(room.machine, set()).update(room.cpus)
            # The only thread of a rank is never one too many.
            limits |= {(room.machine, q): max(1.0, cores) for q, cores in room.quotas.items()}
            needed.update({(room.machine, name): own for name in ("", *room.quotas)})
        limits |= {(machine, ""): len(cpus) for machine, cpus in together.items()}
        return all(count <= limits[where] + SLACK for where, count in needed.items())
