"""Exchanging gradients while the backward pass still runs: buckets that become ready, in one fixed
order on all workers.

The last layers' gradients come first, so buckets are filled from the end of the flat buffer. A
thread exchanges each as soon as it is complete and all before it have been; what nobody touched
counts as complete when the backward pass is over. It pays only where a core is free for that
thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from torch import Tensor

from paceline.errors import BadRequest
from paceline.types import RegionLike

LEAST_BYTES = 1 << 20  # smaller buckets cost more than the overlap gains


class Buckets:
    """`exchange(stretch of a gradient buffer)` for every bucket of every step, on a thread of its
    own.
    """

    def __init__(
        self,
        regions: Sequence[RegionLike],
        exchange: Callable[[Tensor], None],
        least_bytes: int = LEAST_BYTES,
    ) -> None:
        self._exchange = exchange
        self.stretches: list[Tensor] = []
        self._bucket_of: dict[str, int] = {}  # by the parameter's name
        sizes: list[int] = []
        for region in regions:
            high, names = region.grads.numel(), 0
            for slot in reversed(region.grad_layout.slots):
                self._bucket_of[slot.name] = len(self.stretches)
                names += 1
                full = (high - slot.offset) * region.grads.element_size() >= least_bytes
                if full or slot is region.grad_layout.slots[0]:
                    self.stretches.append(region.grads[slot.offset : high])
                    sizes.append(names)
                    high, names = slot.offset, 0
        self._sizes, self._missing = sizes, list(sizes)
        self._reported: set[str] = set()
        self._turn = threading.Condition()
        self._next = len(self.stretches)  # nothing to do until a step begins
        self._error: BaseException | None = None
        threading.Thread(target=self._work, name="buckets", daemon=True).start()

    def begin(self) -> None:
        """A backward pass begins."""
        self._reported.clear()
        with self._turn:
            self._missing, self._next = list(self._sizes), 0

    def complete(self, name: str) -> None:
        """This parameter's gradient is in its place, for the first and last time in this backward
        pass.
        """
        if (
            name in self._reported
        ):  # its bucket may have been exchanged already, so what was added now would be lost
            raise BadRequest(
                f"{name} got its gradient twice in one backward pass (re-entrant activation"
                " checkpointing of a layer that is used twice does that), and overlap exchanges a"
                " gradient as soon as it comes: use --overlap off, or checkpoint(...,"
                " use_reentrant=False)"
            )
        self._reported.add(name)
        bucket = self._bucket_of[name]
        with self._turn:
            self._missing[bucket] -= 1
            if self._missing[bucket] == 0:
                self._turn.notify_all()

    def finish(self) -> None:
        """The backward pass is over: what is left is exchanged, and all of it awaited."""
        with self._turn:
            self._missing = [0] * len(self._sizes)
            self._turn.notify_all()
            self._turn.wait_for(
                lambda: self._next == len(self.stretches) or self._error is not None
            )
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        while True:
            with self._turn:
                self._turn.wait_for(
                    lambda: self._next < len(self.stretches) and self._missing[self._next] == 0
                )
                number = self._next
            try:
                self._exchange(self.stretches[number])
            except BaseException as error:  # handed to whoever awaits the exchange
                with self._turn:
                    self._error = error
                    self._turn.notify_all()
                return
            with self._turn:
                self._next += 1
                self._turn.notify_all()
