"""Asynchronous pairs: whoever wants to average asks; a thread of the other answers, whatever its worker is doing.

    asking:     send w_p ; wait for w_q ; w_p <- w_p + (w_q - w_p as it was sent) / 2
    answering:  receive w_p ; send w_q ; w_q <- w_q + (w_p - w_q) / 2

What one gains the other loses, so the sum over all workers stays what it was, however many pairs cross each other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from torch import Tensor

from paceline.errors import PacelineError, PeerLost
from paceline.strategies.base import Context
from paceline.transport.base import Work
from paceline.transport.metered import Metered

PATIENCE_S = 0.05  # between two looks at whether it is time to stop


class Pairs:
    """Both sides of it. `weights` gives the flat tensors that are averaged; `lock` is held whenever they are changed."""

    def __init__(self, ctx: Context, weights: Callable[[], Sequence[Tensor]]) -> None:
        self._ctx, self._weights, self.lock = ctx, weights, threading.Lock()
        requests, replies = ctx.transport.inner.side("requests"), ctx.transport.inner.side("replies")
        requests.tolerant = replies.tolerant = True
        meter = ctx.transport.meter
        self._ask, self._hear = Metered(requests, meter), Metered(replies.twin(), meter)
        self._requests, self._answers = requests.twin(), Metered(replies)
        self._requests.tolerant = True
        self._sent = [w.clone() for w in weights()]
        self._heard = [ctx.transport.allocate(w.numel(), w.dtype, w.device) for w in weights()]
        others = [p for p in range(ctx.workers) if p != ctx.worker_index]
        self._brought = {p: [ctx.transport.allocate(w.numel(), w.dtype, w.device) for w in weights()] for p in others}
        self._reply = [w.clone() for w in weights()]
        self._stop = threading.Event()
        self._failure: PacelineError | None = None
        self._thread = threading.Thread(target=self._run, name="responder", daemon=True)
        ctx.peers.barrier()  # all have made their memory: it is numbered
        self._thread.start()

    def meet(self, partner: int) -> None:
        """Ask a partner, and average with it."""
        if self._failure is not None:
            raise self._failure
        with self.lock:
            for kept, own in zip(self._sent, self._weights(), strict=True):
                kept.copy_(own)
        works: list[Work] = [self._hear.irecv(heard, partner) for heard in self._heard]
        works += [self._ask.isend(kept, partner) for kept in self._sent]
        for work in reversed(works):
            work.wait()
        with self.lock:
            for own, heard, kept in zip(self._weights(), self._heard, self._sent, strict=True):
                own.add_(heard.sub_(kept), alpha=0.5)
        self._ctx.transport.count(self._answers.meter.taken("setup"), 0.0)  # what the thread has sent meanwhile

    def stop(self) -> None:
        """Nobody asks any more."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        ears = {p: self._listen(p) for p in self._brought}
        while not self._stop.is_set() and ears:
            order = list(ears)
            which = self._requests.wait_any([ears[p][0] for p in order], PATIENCE_S)
            if which is None:
                continue
            partner = order[which]
            try:
                for work in ears.pop(partner):
                    work.wait()
                self._answer(partner)
                ears[partner] = self._listen(partner)
            except PeerLost:
                continue  # it will not ask again
            except PacelineError as error:
                self._failure = error
                return

    def _listen(self, partner: int) -> list[Work]:
        return [self._requests.irecv(place, partner) for place in self._brought[partner]]

    def _answer(self, partner: int) -> None:
        with self.lock:
            for reply, own, brought in zip(self._reply, self._weights(), self._brought[partner], strict=True):
                reply.copy_(own)
                own.add_(brought.sub_(own), alpha=0.5)
        for reply in self._reply:
            self._answers.send(reply, partner)
