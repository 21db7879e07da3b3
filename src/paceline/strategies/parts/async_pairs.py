"""Asynchronous pairs: a worker sends a request, and a thread of its partner replies while the
partner's worker computes.

    request:  send w_p ; wait for w_q ; w_p <- w_p + (w_q - w_p as it was sent) / 2
    reply:    receive w_p ; send w_q ; w_q <- w_q + (w_p - w_q) / 2

Both workers' weights change by the same amount in opposite directions, so the sum over all workers
is preserved, however many pairs overlap. Requests and replies have separate memory (`pairs.py`), so
that two workers can send each other requests at the same time.
"""

from __future__ import annotations

import copy
import queue
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from torch import Tensor

from paceline.errors import PacelineError, PeerLost, RunFailed
from paceline.strategies.base import Context
from paceline.strategies.parts.pairs import make_pairing
from paceline.transport.base import Work

if TYPE_CHECKING:
    from paceline.replica.replica import Replica

PATIENCE_S = 0.05  # how often the thread checks whether it has to stop


class AsyncPairs:
    """Sends one worker's requests and, on a thread, replies to the other workers' requests.

    `lock` must be held while weights are changed.
    """

    def __init__(self, ctx: Context, replica: Replica) -> None:
        self._ctx, self._replica, self.lock = ctx, replica, threading.Lock()
        requests, replies = ctx.transport.side("requests"), ctx.transport.side("replies")
        requests.tolerant = replies.tolerant = True
        self._requests_out, self._replies_in = requests, replies.twin()
        self._requests_in, self._replies_out = requests.twin().aside(), replies.aside()
        self._served: queue.SimpleQueue[Any] = queue.SimpleQueue()  # what each reply moved
        self._requests_in.tolerant = True
        here = [p for p in ctx.transport.present if p < ctx.workers]
        others = [p for p in here if p != ctx.worker_index]
        aside = copy.deepcopy(ctx.codec)  # for the thread
        self._own_pairings = {p: make_pairing(ctx, ctx.codec, replica.regions) for p in others}
        self._their_pairings = {p: make_pairing(ctx, aside, replica.regions) for p in others}
        self._stop = threading.Event()
        self._failure: PacelineError | None = None
        self._thread = threading.Thread(target=self._run, name="responder", daemon=True)
        ctx.peers.barrier()  # all workers have allocated their memory
        self._thread.start()

    def _weights(self) -> list[Tensor]:
        return [r.trained for r in self._replica.regions]

    def average_with(self, partner: int) -> None:
        """Send a request to a partner and average with its reply."""
        if self._failure is not None:
            raise self._failure
        pairing = self._own_pairings[partner]
        with self.lock:
            pairing.prepare(self._weights())
        pairing.listen(self._replies_in, partner)
        for work in pairing.send(self._requests_out, partner):
            work.wait()  # before the reply: a send only makes progress while a thread waits for it
        pairing.receive(self._replies_in, partner)
        with self.lock:
            pairing.average(self._weights())
        self._count_served()

    def stop(self) -> None:
        """End the thread and raise its failure, if any; no worker sends requests any more."""
        self._stop.set()
        self._thread.join()
        self._count_served()
        if self._failure is not None:
            raise self._failure

    def _count_served(self) -> None:
        """Count the requests and replies of the thread since the last call."""
        while not self._served.empty():
            self._ctx.transport.settle(self._served.get(), 0.0)

    def _run(self) -> None:
        if not any(w.numel() for w in self._weights()):
            return  # nothing is trained, so no request will come
        awaited: dict[int, Work] = {}
        for partner in self._their_pairings:
            with suppress(PeerLost):
                awaited[partner] = self._listen(partner)
        while not self._stop.is_set() and awaited:
            order = list(awaited)
            which = self._requests_in.wait_any([awaited[p] for p in order], PATIENCE_S)
            if which is None:
                continue
            partner = order[which]
            try:
                del awaited[partner]
                self._reply(partner)
                awaited[partner] = self._listen(partner)
            except PeerLost:
                continue  # it will send no more requests
            except PacelineError as error:
                self._failure = error
                return
            except Exception as error:  # `average_with` or `stop` raises it
                self._failure = RunFailed(
                    f"the reply to worker {partner} failed: {type(error).__name__}: {error}"
                )
                return

    def _listen(self, partner: int) -> Work:
        """Start the receives of a partner's next request; return the first of them."""
        works = self._their_pairings[partner].listen(self._requests_in, partner)
        return works[0]

    def _reply(self, partner: int) -> None:
        pairing = self._their_pairings[partner]
        pairing.receive(self._requests_in, partner)
        with self.lock:
            pairing.prepare(self._weights())
        works = pairing.send(self._replies_out, partner)
        with self.lock:
            pairing.average(self._weights())
        for work in works:
            work.wait()
        self._served.put(self._requests_in.take())
        self._served.put(self._replies_out.take())
