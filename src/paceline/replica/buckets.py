"""Buckets: all-reduce gradients while the backward pass still runs, in one fixed order on all
workers.

The backward pass computes the last layers' gradients first, so buckets are filled from the end of
the flat buffer. A thread all-reduces each bucket as soon as it and all earlier ones are complete.
Gradients that the backward pass does not touch count as complete at its end. It is faster only if a
core is free for that thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from paceline.errors import BadRequest
from paceline.types import Layout, Slot

if TYPE_CHECKING:
    from paceline.replica.flat import Region

LEAST_BYTES = 1 << 20  # smaller buckets cost more than the overlap gains


def cut(layout: Layout, itemsize: int, least_bytes: int = LEAST_BYTES) -> list[list[Slot]]:
    """Return the slots of each bucket, from the end of the layout on.

    A bucket has `least_bytes` or more; only the last one may have less.
    """
    buckets: list[list[Slot]] = []
    full, high = True, layout.numel
    for slot in reversed(layout.slots):
        if full:
            buckets.append([])
        buckets[-1].append(slot)
        full = (high - slot.offset) * itemsize >= least_bytes
        high = slot.offset if full else high
    return buckets


class Buckets:
    """Calls `all_reduce(span of a gradient buffer)` for each bucket in each step, on a thread."""

    def __init__(
        self,
        regions: Sequence[Region],
        all_reduce: Callable[[Tensor], None],
        least_bytes: int = LEAST_BYTES,
    ) -> None:
        self._all_reduce = all_reduce
        self.spans: list[Tensor] = []
        self._bucket_of: dict[str, int] = {}  # by the parameter's name
        sizes: list[int] = []
        for region in regions:
            high = region.grads.numel()
            for slots in cut(region.grad_layout, region.grads.element_size(), least_bytes):
                self._bucket_of |= {slot.name: len(self.spans) for slot in slots}
                self.spans.append(region.grads[slots[-1].offset : high])
                sizes.append(len(slots))
                high = slots[-1].offset
        self._sizes, self._missing = sizes, list(sizes)
        self._reported: set[str] = set()
        self._turn = threading.Condition()
        self._next = len(self.spans)  # the thread waits until a step begins
        self._error: BaseException | None = None
        threading.Thread(target=self._work, name="buckets", daemon=True).start()

    def begin(self) -> None:
        """Start over: a backward pass begins."""
        self._reported.clear()
        with self._turn:
            self._missing, self._next = list(self._sizes), 0

    def complete(self, name: str) -> None:
        """Report that this parameter's gradient is final in this backward pass."""
        if name in self._reported:  # its bucket may be summed already, without this gradient
            raise BadRequest(
                f"{name} got its gradient twice in one backward pass (re-entrant activation"
                " checkpointing of a layer that is used twice does that), and overlap exchanges"
                " each gradient as soon as it is computed: use --overlap off, or checkpoint(...,"
                " use_reentrant=False)"
            )
        self._reported.add(name)
        bucket = self._bucket_of[name]
        with self._turn:
            self._missing[bucket] -= 1
            if self._missing[bucket] == 0:
                self._turn.notify_all()

    def finish(self) -> None:
        """Wait until all buckets have been all-reduced; the backward pass is over."""
        with self._turn:
            self._missing = [0] * len(self._sizes)
            self._turn.notify_all()
            self._turn.wait_for(lambda: self._next == len(self.spans) or self._error is not None)
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        while True:
            with self._turn:
                self._turn.wait_for(
                    lambda: self._next < len(self.spans) and self._missing[self._next] == 0
                )
                number = self._next
            try:
                self._all_reduce(self.spans[number])
            except BaseException as error:  # `finish` raises it
                with self._turn:
                    self._error = error
                    self._turn.notify_all()
                return
            with self._turn:
                self._next += 1
                self._turn.notify_all()
