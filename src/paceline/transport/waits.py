"""Who waits for whom, on the store that all ranks of a run reach.

A rank that waits for more than `POST_S` posts that, and takes it back when the wait is over. The
slow ranks are those that others wait for and that have not posted a wait. That holds for every
pattern of messages: in a ring a rank waits for its neighbour, which waits for the slow rank.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Posted:
    """What a rank has posted about its wait."""

    peers: tuple[int, ...]  # the ranks that it waits for; empty: all others
    idle: bool = False  # it delays no other rank (a server without requests)
    step: int | None = None  # the step in which it waits, if it knows

    @classmethod
    def read(cls, said: Any) -> Posted:
        """Read an entry of the store. A stranger may have written it: ValueError if malformed."""
        if not isinstance(said, dict):
            raise ValueError("not a wait")
        peers, step = said.get("peers", []), said.get("step")
        right = isinstance(peers, list) and all(type(peer) is int for peer in peers)
        if not right or not (step is None or type(step) is int):
            raise ValueError("not a wait")
        return cls(tuple(peers), bool(said.get("idle")), step)

    def plain(self) -> str:
        return json.dumps({"peers": self.peers, "idle": self.idle, "step": self.step})


class Posts:
    """The entries of all ranks on the store."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.store, self.rank, self.size = store, rank, size

    def post(self, posted: Posted) -> None:
        self.store.set(f"waits/{self.rank}", posted.plain())

    def take_back(self, tells: bool) -> None:
        """The wait of this rank is over. `tells`: it has written notices for all."""
        self.store.set(f"waits/{self.rank}", "")
        if tells:
            self.store.set("teller", "")

    def read(self) -> dict[int, Posted]:
        """What the ranks have posted that wait now."""
        found = {}
        for rank in range(self.size):
            key = f"waits/{rank}"
            with suppress(ValueError):
                if self.store.check([key]) and (said := self.store.get(key)):
                    found[rank] = Posted.read(json.loads(said))
        return found

    def may_tell(self, posted: Mapping[int, Posted]) -> bool:
        """Whether this rank writes the notices: the first that notices, as long as it waits."""
        own, teller = str(self.rank), self._swap("", str(self.rank))
        if teller.isdigit() and int(teller) not in posted:  # it has ended as the teller
            teller = self._swap(teller, own)
        return teller == own

    def _swap(self, expected: str, wanted: str) -> str:
        said: bytes = self.store.compare_set("teller", expected, wanted)
        return said.decode(errors="replace")

    def gone(self) -> dict[int, str]:
        """The ranks whose end the store has noticed, each with the reason."""
        ask: Callable[[], Mapping[int, str]] | None = getattr(self.store, "gone", None)
        return dict(ask()) if ask is not None else {}

    def leave_because_of(self, lost: int | None) -> None:
        """This rank ends because that one was lost."""
        self.store.set(f"causes/{self.rank}", "" if lost is None else str(lost))

    def first_cause(self, lost: int | None) -> int | None:
        """The rank because of which, in the end, a lost one has left: itself, if it says nothing.

        None: the ranks say so of each other, as those do between which a connection was cut.
        """
        seen = {self.rank}
        while lost is not None and lost not in seen:
            seen.add(lost)
            key = f"causes/{lost}"
            said = self.store.get(key) if self.store.check([key]) else b""
            if not said.isdigit():
                return lost
            lost = int(said)
        return None

    def set_verdict(self, verdict: str) -> None:
        self.store.set("verdict", verdict)

    def verdict(self) -> str | None:
        """Why another rank has ended the run's waits, as JSON; None: no rank has."""
        if not self.store.check(["verdict"]):
            return None
        said: bytes = self.store.get("verdict")
        return said.decode(errors="replace")


def slow_ranks(posted: Mapping[int, Posted], start: int, size: int) -> list[int]:
    """The ranks that `start` waits for in the end: those on the way that wait for no other rank.

    Empty: the ranks wait for each other.
    """
    slow: set[int] = set()
    seen, todo = {start}, [start]
    while todo:
        rank = todo.pop()
        for peer in posted[rank].peers or range(size):
            if peer not in posted:
                slow.add(peer)
            elif peer not in seen and not posted[peer].idle:
                seen.add(peer)
                todo.append(peer)
    return sorted(slow)


def who_waits(posted: Mapping[int, Posted], slow: Sequence[int], size: int) -> list[int]:
    """The ranks that wait for these slow ranks in the end."""
    return [
        rank
        for rank, own in sorted(posted.items())
        if not own.idle and rank not in slow and set(slow) & set(slow_ranks(posted, rank, size))
    ]


def told(
    waiting: Sequence[str], waited_s: float, slow: Sequence[str], what: str, doing: Sequence[str]
) -> str:
    """A sentence: who has waited how long for whom, for what, and what those do."""
    have = "has" if len(waiting) == 1 else "have"
    whom = listed(slow) if slow else "each other"
    does = f": {', '.join(doing)}" if doing else ""
    return f"{listed(waiting)} {have} waited {duration(waited_s)} for {whom} ({what}){does}"


def listed(names: Sequence[str]) -> str:
    """`worker 0`, `workers 0, 1 and 2`, `workers 0 and 2 and the server (rank 3)`."""
    workers = [name.removeprefix("worker ") for name in names if name.startswith("worker ")]
    others = [name for name in names if not name.startswith("worker ")]
    if len(workers) > 1:
        others.insert(0, f"workers {', '.join(workers[:-1])} and {workers[-1]}")
    elif workers:
        others.insert(0, f"worker {workers[0]}")
    return others[0] if len(others) == 1 else f"{', '.join(others[:-1])} and {others[-1]}"


def duration(seconds: float) -> str:
    """`0.4 s`, `30 s`, `12 min`, `3.5 h`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 300:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
