"""Asynchronous pairs: whoever wants to average asks; a thread of the other answers, whatever its
worker is doing.

    asking:     send w_p ; wait for w_q ; w_p <- w_p + (w_q - w_p as it was sent) / 2
    answering:  receive w_p ; send w_q ; w_q <- w_q + (w_p - w_q) / 2

What one gains the other loses, so the sum over all workers stays what it was, however many pairs
cross each other. Who asks and who answers have memory of their own for it (`meeting.py`), so that
two who ask each other at once do not mix it up.
"""

from __future__ import annotations

import copy
import threading

from torch import Tensor

from paceline.errors import PacelineError, PeerLost, RunFailed
from paceline.strategies.base import Context
from paceline.strategies.parts.averaging import trained
from paceline.strategies.parts.pairs import meeting
from paceline.transport.base import Work
from paceline.transport.metered import Metered
from paceline.types import ReplicaLike

PATIENCE_S = 0.05  # between two looks at whether it is time to stop


class Pairs:
    """Both sides of it. `lock` is held whenever the weights are changed."""

    def __init__(self, ctx: Context, replica: ReplicaLike) -> None:
        self._ctx, self._replica, self.lock = ctx, replica, threading.Lock()
        requests, replies = (
            ctx.transport.inner.side("requests"),
            ctx.transport.inner.side("replies"),
        )
        requests.tolerant = replies.tolerant = True
        meter = ctx.transport.meter
        self._ask, self._hear = Metered(requests, meter), Metered(replies.twin(), meter)
        self._requests, self._answers = Metered(requests.twin()), Metered(replies)
        self._requests.tolerant = True
        others = [p for p in range(ctx.workers) if p != ctx.worker_index]
        aside = copy.deepcopy(ctx.codec)  # the thread's own
        self._asking = {p: meeting(ctx, ctx.codec, replica.regions) for p in others}
        self._answering = {p: meeting(ctx, aside, replica.regions) for p in others}
        self._stop = threading.Event()
        self._failure: PacelineError | None = None
        self._thread = threading.Thread(target=self._run, name="responder", daemon=True)
        ctx.peers.barrier()  # all have made their memory: it is numbered
        self._thread.start()

    def _weights(self) -> list[Tensor]:
        return [trained(r.params, r.grads) for r in self._replica.regions]

    def meet(self, partner: int) -> None:
        """Ask a partner, and average with it."""
        if self._failure is not None:
            raise self._failure
        talk = self._asking[partner]
        with self.lock:
            talk.prepare(self._weights())
        talk.listen(self._hear, partner)
        for work in talk.send(self._ask, partner):
            # before the answer: a question that is under way moves on only while somebody waits for
            # it
            work.wait()
        talk.hear(self._hear, partner)
        with self.lock:
            talk.average(self._weights())
        self._ctx.transport.count(
            self._answers.meter.taken("setup"), 0.0
        )  # what the thread has sent meanwhile

    def stop(self) -> None:
        """Nobody asks any more."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        ears = {p: self._listen(p) for p in self._answering}
        while not self._stop.is_set() and ears:
            order = list(ears)
            which = self._requests.wait_any([ears[p] for p in order], PATIENCE_S)
            if which is None:
                continue
            partner = order[which]
            try:
                del ears[partner]
                self._answer(partner)
                ears[partner] = self._listen(partner)
            except PeerLost:
                continue  # it will not ask again
            except PacelineError as error:
                self._failure = error
                return
            except Exception as error:  # a thread's end must not go unnoticed
                self._failure = RunFailed(
                    f"answering worker {partner}: {type(error).__name__}: {error}"
                )
                return

    def _listen(self, partner: int) -> Work:
        """Ready for its next question; the first part of it rings."""
        works = self._answering[partner].listen(self._requests, partner)
        return works[0]

    def _answer(self, partner: int) -> None:
        talk = self._answering[partner]
        talk.hear(self._requests, partner)
        with self.lock:
            talk.prepare(self._weights())
        works = talk.send(self._answers, partner)
        with self.lock:
            talk.average(self._weights())
        for work in works:
            work.wait()
