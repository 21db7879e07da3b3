"""Ranks as threads of one process, one running at a time: every run can be repeated exactly.

Only the thread that holds the baton runs. It hands the baton over at transport calls and nowhere
else, and a seeded scheduler chooses the next thread. So asynchronous strategies are repeatable too,
and a test that varies the scheduler's seed explores their interleavings. A deadlock is detected at
once: no thread is able to take the baton.
"""

from __future__ import annotations

import ctypes
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.common.links import Links
from paceline.common.seeding import random_states, set_random_states
from paceline.errors import PeerLost, TransportError
from paceline.registry import transports
from paceline.transport.base import Op, Traits, Transport, Work, check_ranks
from paceline.transport.patience import Patience
from paceline.transport.remaining import with_absent

Ready = Callable[[], bool]


class Baton:
    """Lets one thread run at a time. Each thread has its own state of the default generators."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self._turns: dict[int, threading.Lock] = {}  # released to let a thread run
        self._ready: dict[int, Ready] = {}
        self._why: dict[int, str] = {}
        self._stuck = ""
        self._aborted = False

    def choose(self, count: int) -> int:
        """Choose one of `count` events that could happen now, by the seed."""
        return self._random.randrange(count)

    def abort(self) -> None:
        """From now on every thread that gets the baton raises."""
        self._aborted = True

    def join(self, who: int) -> None:
        """Add a thread. All threads must be added before the first one runs."""
        self._turns[who] = threading.Lock()
        self._turns[who].acquire()
        self._ready[who] = _always
        self._why[who] = "start"

    def start(self) -> None:
        self._turns[self._next()].release()

    def enter(self, who: int) -> None:
        """Wait for the first turn; each thread calls this first."""
        self._turns[who].acquire()

    def leave(self, who: int) -> None:
        """Give the baton away for good; each thread calls this last, also after an error."""
        del self._ready[who], self._why[who]
        if self._ready:
            self._turns[self._next()].release()

    def hand_over(self, who: int, ready: Ready, why: str) -> None:
        """Let another thread run; return at this thread's next turn once `ready()` holds."""
        self._ready[who], self._why[who] = ready, why
        if (chosen := self._next()) != who:
            saved = random_states()
            self._turns[chosen].release()
            self._turns[who].acquire()
            set_random_states(saved)
        if self._aborted:
            raise TransportError("interrupted")
        if self._stuck and not ready():
            raise TransportError(self._stuck)
        self._ready[who] = _always

    def _next(self) -> int:
        """The thread that runs next."""
        able = self._able()
        if not able:
            self._stuck = "deadlock: " + "; ".join(
                f"rank {who} waits for {self._why[who]}" for who in sorted(self._ready)
            )
            able = sorted(self._ready)
        return self._pick(able)

    def _able(self) -> list[int]:
        """The threads that could go on now."""
        return [who for who in sorted(self._ready) if self._ready[who]()]

    def _pick(self, able: list[int]) -> int:
        """Choose one of these threads, by the seed."""
        return self._random.choice(able)


class Hub:
    """What the ranks of one in-process run share: the baton, the messages, the ranks that ended."""

    def __init__(
        self,
        size: int,
        seed: int = 0,
        deadline_s: float = 30.0,
        kind: type[InprocTransport] | None = None,
    ) -> None:
        self.size, self.deadline_s, self.kind = size, deadline_s, kind or InprocTransport
        self.baton = self.make_baton(seed)
        self.messages: dict[tuple[Any, ...], deque[Tensor]] = {}  # sent, not received yet
        self.brought: dict[tuple[Any, ...], dict[int, Tensor]] = {}  # to a collective, by rank
        self.results: dict[tuple[Any, ...], Tensor | str] = {}  # a string: the error
        self.shared: dict[tuple[Any, ...], Tensor] = {}
        self.gone: set[int] = set()
        self.closed: set[tuple[tuple[Any, ...], int]] = set()  # (place, rank) that left there
        self._roll: dict[int, set[int]] = {}  # by attempt: the ranks that begin
        self._present: dict[int, tuple[int, ...]] = {}
        for rank in range(size):
            self.baton.join(rank)

    def make_baton(self, seed: int) -> Baton:
        return Baton(seed)

    def transport(self, rank: int) -> InprocTransport:
        return self.kind(self, rank, tuple(range(self.size)))

    def connect(self, rank: int, attempt: int) -> Transport:
        """Connect the ranks that have not ended, for the first time or again."""
        roll = self._roll.setdefault(attempt, set())
        roll.add(rank)
        everyone = set(range(self.size))
        self.baton.hand_over(rank, lambda: everyone <= roll | self.gone, "all to connect")
        if 0 in self.gone:
            raise PeerLost(0)
        present = self._present.setdefault(attempt, tuple(sorted(roll - self.gone)))
        if rank not in present:
            raise PeerLost(rank)
        own = self.kind(self, rank, present, (attempt,) if attempt else ())
        return with_absent(own, present, rank, self.size)

    def run(self, body: Callable[[InprocTransport], Any]) -> list[Any]:
        """Run `body(transport)` on every rank; return what each rank returned or raised."""
        results: list[Any] = [None] * self.size
        ended = threading.Semaphore(0)

        def thread(rank: int) -> None:
            self.baton.enter(rank)
            try:
                results[rank] = body(self.transport(rank))
            except BaseException as error:  # the caller gets it as this rank's result
                results[rank] = error
            finally:
                self.gone.add(rank)
                self.baton.leave(rank)
                ended.release()

        threads = [
            threading.Thread(target=thread, args=(r,), name=f"rank-{r}", daemon=True)
            for r in range(self.size)
        ]
        before = random_states()
        for t in threads:
            t.start()
        # Not Thread.join: after Ctrl-C it takes a running thread for a finished one (Python 3.11).
        try:
            self.baton.start()
            for _ in threads:
                ended.acquire()
        except BaseException:  # Ctrl-C arrives here: stop all ranks before the caller goes on
            self.baton.abort()
            self._stop(threads)
            raise
        finally:
            set_random_states(before)
        return results

    def _stop(self, threads: list[threading.Thread]) -> None:
        """Interrupt the ranks, also one that computes and makes no call of the transport."""
        until = time.monotonic() + self.deadline_s
        while len(self.gone) < self.size and time.monotonic() < until:
            for rank, running in enumerate(threads):
                if rank not in self.gone and running.ident is not None:
                    raise_in(running.ident, TransportError)
            again = time.monotonic() + 0.5  # an exception in a `__del__` is lost
            while len(self.gone) < self.size and time.monotonic() < again:
                time.sleep(0.005)


def raise_in(thread: int, error: type[BaseException]) -> None:
    """Raise an exception in a thread of this process, between two of its Python operations."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))


@transports.register("inproc")
class InprocTransport(Transport):
    """Threads that take turns: repeatable, for tests, teaching and debugging; not for speed."""

    traits = Traits(
        started_by="threads",
        devices=("cpu", "cuda"),
        native=("all_reduce", "broadcast"),
        shares_memory=True,
        take_turns=True,
    )

    def __init__(
        self, hub: Hub, rank: int, members: tuple[int, ...], place: tuple[Any, ...] = ()
    ) -> None:
        patience = Patience(rank, hub.size, hub.deadline_s)
        super().__init__(members.index(rank), len(members), hub.deadline_s, patience=patience)
        self._hub, self._world_rank, self._members = hub, rank, members
        self._place = (*place, members)  # separates the messages of groups with the same members
        self._groups: Counter[tuple[int, ...]] = Counter()
        self._calls = 0

    @classmethod
    def hub(
        cls, size: int, seed: int = 0, deadline_s: float = 30.0, links: Links | None = None
    ) -> Hub:
        """What the ranks of a run on this transport share.

        `links`: the network between the ranks, for a transport that simulates one.
        """
        return Hub(size, seed, deadline_s, cls)

    def has_left(self, member: int) -> bool:
        """Whether a rank has ended, or has closed this transport or one that it was made from."""
        hub, place = self._hub, self._place
        if member in hub.gone or not hub.closed:
            return member in hub.gone
        return any((place[:end], member) in hub.closed for end in range(len(place) + 1))

    def close(self) -> None:
        self._hub.closed.add((self._place, self._world_rank))

    def isend(self, tensor: Tensor, to: int, tag: int = 0) -> Work:
        self._post(tensor, self._members[to], tag)
        self._yield(_always, "its turn")
        return _Done()

    def _post(self, tensor: Tensor, target: int, tag: int) -> None:
        if self.has_left(target):
            raise PeerLost(target)
        key = (self._place, self._world_rank, target, tag)
        self._hub.messages.setdefault(key, deque()).append(tensor.detach().clone())

    def irecv(self, tensor: Tensor, source: int, tag: int = 0) -> Work:
        return Receive(self, tensor, self._members[source], tag)

    def wait_any(self, works: Sequence[Work], patience_s: float | None = None) -> int | None:
        receives = [w for w in works if isinstance(w, Receive)]
        if len(receives) < len(works):
            return next(i for i, w in enumerate(works) if not isinstance(w, Receive))
        self._yield(lambda: any(r.ready() for r in receives), "one message of several")
        ready = [i for i, r in enumerate(receives) if r.ready()]
        return ready[self._hub.baton.choose(len(ready))]

    def share(self, tensor: Tensor, root: int = 0) -> Tensor:
        hub, key = self._hub, (self._place, "share", self._calls)
        if self.rank == root:
            hub.shared[key] = tensor
        self.barrier()
        return hub.shared[key]

    def pause(self) -> None:
        self._yield(_always, "a pause")

    def barrier(self) -> None:
        self._combine(torch.zeros(0), "barrier")

    def group(self, ranks: Sequence[int]) -> InprocTransport:
        members = check_ranks(ranks, self.size, self.rank)
        self._groups[members] += 1
        place = (*self._place, self._groups[members])
        return type(self)(
            self._hub, self._world_rank, tuple(self._members[r] for r in members), place
        )

    def all_reduce(self, tensor: Tensor, op: Op = "sum") -> None:
        if self.size > 1:
            tensor.copy_(
                self._combine(tensor, f"all_reduce {op}", lambda tensors: _reduced(tensors, op))
            )

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        if self.size > 1:
            tensor.copy_(self._combine(tensor, "broadcast", lambda tensors: tensors[root]))

    def _yield(self, ready: Ready, why: str) -> None:
        self._hub.baton.hand_over(self._world_rank, ready, why)

    def _combine(
        self, tensor: Tensor, what: str, combine: Callable[[list[Tensor]], Tensor] | None = None
    ) -> Tensor:
        """Combine all ranks' tensors in rank order; the last rank to call does it for all."""
        hub, key = self._hub, (self._place, self._calls)
        self._calls += 1
        brought = hub.brought.setdefault(key, {})
        brought[self.rank] = tensor.detach().clone()
        if len(brought) == self.size:
            tensors = [brought[r] for r in range(self.size)]
            if len({(t.shape, t.dtype) for t in tensors}) > 1:
                told = ", ".join(
                    f"rank {r}: {tuple(t.shape)} {t.dtype}" for r, t in enumerate(tensors)
                )
                hub.results[key] = f"{what}: the ranks brought different tensors ({told})"
            else:
                hub.results[key] = combine(tensors) if combine else tensors[0]

        def lost() -> int | None:
            return next(
                (m for r, m in enumerate(self._members) if r not in brought and self.has_left(m)),
                None,
            )

        self._yield(lambda: key in hub.results or lost() is not None, what)
        if key not in hub.results:
            raise PeerLost(lost(), f"during {what}")
        result = hub.results[key]
        brought.pop(self.rank)
        if not brought:
            del hub.brought[key], hub.results[key]
        if isinstance(result, str):
            raise TransportError(result)
        return result


class _Done:
    def wait(self) -> None:
        return None


class Receive:
    """A receive that has started."""

    def __init__(self, transport: InprocTransport, tensor: Tensor, source: int, tag: int) -> None:
        self._transport, self._tensor, self._source = transport, tensor, source
        self._key = (transport._place, source, transport._world_rank, tag)

    def ready(self) -> bool:
        hub = self._transport._hub
        return bool(hub.messages.get(self._key)) or self._transport.has_left(self._source)

    def wait(self) -> None:
        self._transport._yield(self.ready, f"a message from rank {self._source}")
        self.take()

    def take(self) -> None:
        """Copy the message, which is there, into the tensor."""
        hub = self._transport._hub
        messages = hub.messages.get(self._key)
        if not messages:
            raise PeerLost(self._source)
        sent = messages.popleft()
        if sent.shape != self._tensor.shape or sent.dtype != self._tensor.dtype:
            raise TransportError(
                f"rank {self._source} sent {tuple(sent.shape)} {sent.dtype}; "
                f"{tuple(self._tensor.shape)} {self._tensor.dtype} was expected"
            )
        self._tensor.copy_(sent)


def _reduced(tensors: list[Tensor], op: Op) -> Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        if op == "sum":
            total += tensor
        else:
            (torch.maximum if op == "max" else torch.minimum)(total, tensor, out=total)
    return total


def _always() -> bool:
    return True
