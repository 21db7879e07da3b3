"""Waiting, on the board, for ranks that a launcher has started: a notice says for which.

A wait ends when one of the ranks has ended (`PeerLost`) or after `give_up_s` (`PeerSlow`). Before a
rank has joined the run, nothing tells that it lives, so that wait has a limit of its own.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from paceline.errors import PeerLost, PeerSlow
from paceline.transport.base import Waits
from paceline.transport.board.client import Board

ASK_S = 1.0  # between two questions to the board which ranks have ended
UNMET_S = 1800.0  # for a rank that has not joined the run yet


class Awaiting:
    """One wait. A loop that polls the board calls `look` again and again."""

    def __init__(
        self,
        board: Board,
        me: int,
        waits: Waits,
        whom: Callable[[], list[int]],
        what: str,
        unmet: bool = False,
    ) -> None:
        self._board, self._me, self._whom, self._what = board, me, whom, what
        self._began = self._asked = time.monotonic()
        self._due_s = waits.deadline_s
        unlimited = UNMET_S if unmet else float("inf")
        self._limit_s = unlimited if waits.give_up_s is None else waits.give_up_s

    def look(self) -> None:
        now = time.monotonic()
        waited_s = now - self._began
        if now - self._asked > ASK_S:
            self._asked = now
            for rank, reason in self._board.gone().items():
                if rank != self._me:
                    raise PeerLost(rank, reason)
        if waited_s > self._limit_s:
            slow = self._whom()
            error = PeerSlow(next(iter(slow), None), self._limit_s, self._what)
            error.ranks = tuple(slow)
            raise error
        if waited_s > self._due_s:
            self._due_s *= 2
            self._tell(waited_s)

    def _tell(self, waited_s: float) -> None:
        """Rank 0 writes the notice, or the next rank where rank 0 is the slow one."""
        slow = self._whom()
        if not slow or self._me != next(rank for rank in range(len(slow) + 1) if rank not in slow):
            return
        names = ", ".join(f"rank {rank}" for rank in slow)
        print(
            f"paceline: rank {self._me} has waited {waited_s:.{waited_s < 10:d}f} s for {names}"
            f" ({self._what}); the run waits on",
            file=sys.stderr,
            flush=True,
        )
