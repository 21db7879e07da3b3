"""The common part of gloo and NCCL: a process group of torch.distributed.

The transport holds the group itself, so torch.distributed's global state is not touched.
"""

from __future__ import annotations

import queue
import threading
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, ClassVar, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import PacelineError, PeerLost, PeerSlow, TransportError
from paceline.transport.base import (
    Op,
    Rendezvous,
    Transport,
    Work,
    check_ranks,
    check_tensor,
    wording,
)
from paceline.transport.c10d.sockets import Sockets
from paceline.transport.c10d.store import LONG, connect_store, first_line, patience_for
from paceline.transport.patience import Patience
from paceline.transport.together import agree

CLOSE_S = 2.0  # the longest wait for threads to leave the library
CONNECT_LOOK_S = 0.02  # how often a rank that connects looks whether another one has ended
Kind = TypeVar("Kind", bound="ProcessGroupTransport")
MARGIN_S = 30.0  # between the end of a wait by `patience` and by the library's own timeout
REDUCE: dict[str, Any] = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


class ProcessGroupTransport(Transport):
    """A subclass defines how its process group is made and how its errors are recognised."""

    failure_words: ClassVar[tuple[str, ...]]  # a RuntimeError with one of them: connection broken

    def __init__(
        self,
        store: Any,
        host: str,
        rank: int,
        size: int,
        deadline_s: float,
        generation: int,
        name: str,
        patience: Patience | None = None,
        members: tuple[int, ...] = (),
        ended: Callable[[], frozenset[int]] | None = None,
    ) -> None:
        super().__init__(rank, size, deadline_s, generation, patience)
        self.store, self._host, self._label = store, host, name
        self._members = members or tuple(range(size))  # the ranks in the world
        self._others = tuple(m for i, m in enumerate(self._members) if i != rank)
        self._ended = ended  # the ranks that have ended, as the launcher knows it
        self._inside: list[ProcessGroupTransport] = []  # made from this one
        self._groups: Counter[tuple[int, ...]] = Counter()  # made so far, by members
        self._sockets = Sockets()
        with self._sockets:
            self._group = self._guard(
                lambda: self._connected(store.under(f"{name}/{generation}")),
                what="the connections",
            )
        self._agreed: set[tuple[str, int, torch.dtype, str, bool]] = set()
        self._arrived, self._waiters = threading.Condition(), Waiters()
        self._reduce = {}
        for op, reduce_op in REDUCE.items():
            self._reduce[op] = dist.AllreduceOptions()
            self._reduce[op].reduceOp = reduce_op

    @abstractmethod
    def make_group(self, store: Any) -> Any: ...

    def _connected(self, store: Any) -> Any:
        """Make the group. The library waits for every rank, so a thread does that, and this one
        gives up when a rank has ended, as far as that is known, or is given up.
        """
        made: queue.SimpleQueue[Any] = queue.SimpleQueue()

        def make() -> None:
            try:
                made.put((self.make_group(store), None))
            except RuntimeError as error:
                made.put((None, error))

        threading.Thread(target=make, name="connects", daemon=True).start()
        while True:
            try:
                group, error = made.get(timeout=CONNECT_LOOK_S)
            except queue.Empty:
                ended = self._ended() if self._ended is not None else frozenset[int]()
                if gone := sorted(ended & set(self._members)):
                    raise PeerLost(gone[0], "it ended while the ranks connected") from None
                if (verdict := self.patience.verdict) is not None:
                    raise verdict from None
                continue
            if error is not None:
                raise error
            return group

    @classmethod
    def connect(cls, rendezvous: Rendezvous) -> Self:
        board, members = connect_store(rendezvous), rendezvous.members
        return cls(
            board.under(f"{cls.name}-{rendezvous.generation}"),
            rendezvous.own,
            members.index(rendezvous.rank),
            len(members),
            rendezvous.waits.deadline_s,
            rendezvous.generation,
            f"{cls.name}/world",
            patience_for(rendezvous, board),
            members,
            rendezvous.ended,
        )

    @property
    def timeout(self) -> timedelta:
        """The library's timeout, should `patience` not end a wait first."""
        return timeout_of(self.patience)

    def isend(self, tensor: Tensor, to: int, tag: int = 0) -> Work:
        return _GroupWork(self, self._guard(lambda: self._group.send([tensor], to, tag), to), to)

    def irecv(self, tensor: Tensor, source: int, tag: int = 0) -> Work:
        return _GroupWork(
            self, self._guard(lambda: self._group.recv([tensor], source, tag), source), source
        )

    def barrier(self) -> None:
        self._guard(lambda: self._group.barrier().wait())

    def all_reduce(self, tensor: Tensor, op: Op = "sum") -> None:
        if self.size > 1:
            self._expect_the_same(op, tensor)
            self._guard(lambda: self._group.allreduce([tensor], self._reduce[op]).wait())

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        if self.size > 1:
            self._expect_the_same("broadcast", tensor)
            self._guard(lambda: self._group.broadcast(tensor, root).wait())

    def _expect_the_same(self, operation: str, tensor: Tensor) -> None:
        """Compare the ranks' calls before the first call of each kind.

        The library ends the process when ranks bring different lengths.
        """
        key = (operation, tensor.numel(), tensor.dtype, tensor.device.type, tensor.is_contiguous())
        if key not in self._agreed:
            agree(self, wording(operation, tensor))
            check_tensor(tensor, self)
            self._agreed.add(key)

    def wait_any(self, works: Sequence[Work], patience_s: float | None = None) -> int | None:
        """Wait in one thread per message: these libraries have no call that waits for several."""
        waited = [w for w in works if isinstance(w, _GroupWork)]
        until = time.monotonic() + patience_s if patience_s is not None else None
        with self._arrived:
            for work in waited:
                work.wait_aside(self._waiters, self._arrived)
            while True:
                for index, work in enumerate(waited):
                    if work.over:
                        return index
                left = None if until is None else until - time.monotonic()
                if left is not None and left <= 0:
                    return None
                self._arrived.wait(left)

    def group(self, ranks: Sequence[int]) -> Self:
        members = check_ranks(ranks, self.size, self.rank)
        if members == tuple(range(self.size)):
            return self
        self._groups[members] += 1
        label = f"{'-'.join(map(str, members))}/{self._groups[members]}"
        return self.over(type(self), label, members)

    def side(self, label: str) -> Self:
        return self.over(type(self), f"side/{label}", range(self.size))

    def over(self, kind: type[Kind], label: str, ranks: Sequence[int]) -> Kind:
        """Another process group over some of these ranks; all of them call it."""
        made = kind(
            self.store,
            self._host,
            ranks.index(self.rank),
            len(ranks),
            self.deadline_s,
            self.generation,
            f"{self._label}/{label}",
            self.patience,
            tuple(self._members[rank] for rank in ranks),
            self._ended,
        )
        self._inside.append(made)
        return made

    def close(self) -> None:
        """Break the connections, also those of all groups that were made from this one."""
        for made in self._inside:
            made.close()
        if self._group is not None:
            self._group.abort()
        self._group = None  # gloo closes its connections only when the group is gone
        self._sockets.shut()  # and a message that no call waits for may keep it
        if self._waiters.busy:  # a thread inside a library must not outlive the interpreter
            self._waiters.wait(CLOSE_S)
        if self._label.endswith("/world"):
            self.patience.close()
            self.store.close()

    def _abort(self) -> None:
        """End all calls of this process group that wait."""
        if (group := getattr(self, "_group", None)) is not None:  # None: it is being made
            group.abort()
        self._sockets.shut()

    def _guard(
        self,
        call: Callable[[], Any],
        peer: int | None = None,
        what: str = "an exchange",
        aside: bool = False,
    ) -> Any:
        """Call the library and turn its RuntimeError into `PeerLost`, `PeerSlow` or another error.

        `aside`: a thread waits while this rank may do something else, so the wait is not reported.
        """
        patience, others = self.patience, self._others if peer is None else (self._members[peer],)
        wait = None if aside else patience.enter(what, others, self._abort)
        began = time.monotonic()
        try:
            result = call()
        except PacelineError:
            raise
        except RuntimeError as error:
            text, other = first_line(error), others[0] if len(others) == 1 else None
            if patience.verdict is not None:
                raise patience.verdict from None
            # gloo says "timed out", too, when a rank that has died refuses its connection.
            limit_s, waited_s = self.timeout.total_seconds(), time.monotonic() - began
            if ("imed out" in text or "imeout" in text) and waited_s > limit_s - MARGIN_S:
                slow = PeerSlow(other, limit_s, what)
                raise patience.blame(slow) from None
            if any(words in str(error) for words in (*self.failure_words, "imed out", "imeout")):
                raise patience.blame(PeerLost(other, "its connection closed")) from None
            raise TransportError(f"{self.name}: {text}") from None
        finally:
            if wait is not None:
                patience.leave(wait)
        if patience.verdict is not None:  # the call was aborted just when it was complete
            raise patience.verdict
        return result


def timeout_of(patience: Patience) -> timedelta:
    """A timeout for a library whose waits `patience` watches: it ends them a while before."""
    limit_s = patience.limit_s + MARGIN_S
    return LONG if limit_s > LONG.total_seconds() else timedelta(seconds=limit_s)


class _GroupWork:
    def __init__(self, transport: ProcessGroupTransport, work: Any, peer: int) -> None:
        self._transport, self._work, self._peer = transport, work, peer
        self.over, self._aside = False, False
        self._error: PacelineError | None = None

    def wait(self) -> None:
        if self._aside:
            arrived = self._transport._arrived  # a thread waits already and notifies this
            with arrived:
                arrived.wait_for(lambda: self.over)
            if self._error is not None:
                raise self._error
            return
        self._transport._guard(self._work.wait, self._peer, "a message")

    def wait_aside(self, waiters: Waiters, arrived: threading.Condition) -> None:
        """Let a thread wait for this work and notify `arrived`."""
        if self._aside:
            return
        self._aside = True

        def wait() -> None:
            try:
                self._transport._guard(lambda: self._work.wait(LONG), self._peer, aside=True)
            except PacelineError as error:
                self._error = error
            with arrived:
                self.over = True
                arrived.notify_all()

        waiters.start(wait)


class Waiters:
    """A pool of threads that wait for works. They end with the process."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self.busy = 0  # threads that wait
        self._change = threading.Condition()

    def start(self, task: Callable[[], None]) -> None:
        if not self._idle.acquire(blocking=False):
            threading.Thread(target=self._work, daemon=True).start()
        with self._change:
            self.busy += 1
        self._tasks.put(task)

    def wait(self, most_s: float) -> None:
        """Wait until no thread waits any more."""
        with self._change:
            self._change.wait_for(lambda: not self.busy, most_s)

    def _work(self) -> None:
        while True:
            self._tasks.get()()
            with self._change:
                self.busy -= 1
                self._change.notify_all()
            self._idle.release()
