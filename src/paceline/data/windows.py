"""Which rows of shards on disk a worker sees at a step: window by window, each row once per epoch.

A worker gets rows of shards on its own host first. It goes through its windows in a shuffled order,
and through the rows of each window in a shuffled order. A batch is from one window, rarely from
two, so memory holds one window and not the whole data set. Rows are in shards by their hash, so
each window is a random sample. Like other shards this is a pure function of (seed, epoch, position,
batch sizes, hosts).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.common.seeding import generator
from paceline.data.sharded import RowSpan
from paceline.data.shards import Cursor, Cuts, common_steps, split
from paceline.errors import BadRequest


@dataclass(frozen=True)
class Window:
    """Rows [start, stop), or only those in `rows` if a checkpoint fell inside the window."""

    start: int
    stop: int
    rows: Tensor | None = field(default=None, compare=False)

    def __len__(self) -> int:
        return self.stop - self.start if self.rows is None else len(self.rows)

    def shuffled(self, seed: int, epoch: int) -> Tensor:
        order = torch.randperm(
            len(self), generator=generator(seed, "epoch", epoch, "window", self.start, self.stop)
        )
        return order + self.start if self.rows is None else self.rows[order]


@dataclass
class WindowShards:
    spans: Sequence[RowSpan]
    batch_sizes: tuple[int, ...]
    seed: int
    window_rows: int
    hosts: tuple[str, ...] = ()  # of the workers; empty if all are on one host
    cuts: Cuts = Cuts()
    _began: tuple[int, list[Window]] | None = field(default=None, repr=False, compare=False)
    _epoch: tuple[int, list[list[Window]], list[Any]] | None = field(
        default=None, repr=False, compare=False
    )
    _orders: dict[tuple[int, int, int], Tensor] = field(
        default_factory=dict, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        self.samples = sum(s.stop - s.start for s in self.spans)
        if self.samples < 1 or sum(self.batch_sizes) < 1 or min(self.batch_sizes) < 0:
            raise BadRequest(
                f"{self.samples} samples with batch sizes {self.batch_sizes}: nothing to train on"
            )
        self.assigned = assign(self.spans, self.batch_sizes, self.hosts)

    @property
    def lengths(self) -> list[int]:
        return [sum(stop - start for start, stop in own) for own in self.assigned]

    @property
    def steps_per_epoch(self) -> int:
        return common_steps(self.cuts, self.lengths, self.batch_sizes)

    def windows(self, epoch: int) -> tuple[list[list[Window]], list[Any]]:
        """Return each worker's windows in the order of this epoch, and where each window ends."""
        if self._epoch is None or self._epoch[0] != epoch:
            if self._began is not None and self._began[0] == epoch:
                own = _dealt(self._began[1], self.batch_sizes)
            else:
                own = [
                    [w for span in spans for w in _cut(*span, self.window_rows)]
                    for spans in self.assigned
                ]
            ordered = []
            for worker, windows in enumerate(own):
                order = torch.randperm(
                    len(windows), generator=generator(self.seed, "epoch", epoch, "worker", worker)
                )
                ordered.append([windows[i] for i in order.tolist()])
            self._epoch = (
                epoch,
                ordered,
                [np.cumsum([len(w) for w in windows], dtype=np.int64) for windows in ordered],
            )
            self._orders.clear()
        return self._epoch[1], self._epoch[2]

    def _rows(self, epoch: int) -> list[int]:
        return [int(ends[-1]) if len(ends) else 0 for ends in self.windows(epoch)[1]]

    def counts(self, cursor: Cursor) -> tuple[int, ...]:
        workers = zip(self._rows(cursor.epoch), self.batch_sizes, strict=True)
        bounds = [self.cuts.bounds(rows, size, cursor.position) for rows, size in workers]
        return tuple(stop - start for start, stop in bounds)

    def take(self, cursor: Cursor, worker: int) -> Tensor:
        all_windows, all_ends = self.windows(cursor.epoch)
        windows, ends = all_windows[worker], all_ends[worker]
        at, stop = self.cuts.bounds(
            int(ends[-1]) if len(ends) else 0, self.batch_sizes[worker], cursor.position
        )
        found = []
        place = int(np.searchsorted(ends, at, side="right"))
        while at < stop:
            begin = int(ends[place - 1]) if place else 0
            order = self._order(cursor.epoch, worker, place, windows[place])
            found.append(order[at - begin : min(stop, int(ends[place])) - begin])
            at = int(ends[place])
            place += 1
        return (
            found[0]
            if len(found) == 1
            else torch.cat(found)
            if found
            else torch.empty(0, dtype=torch.int64)
        )

    def _order(self, epoch: int, worker: int, place: int, window: Window) -> Tensor:
        key = (epoch, worker, place)
        if key not in self._orders:
            for old in [k for k in self._orders if k[1] == worker and k[2] < place]:
                del self._orders[old]
            self._orders[key] = window.shuffled(self.seed, epoch)
        return self._orders[key]

    def advance(self, cursor: Cursor) -> Cursor:
        position = cursor.position + 1
        last = position >= common_steps(self.cuts, self._rows(cursor.epoch), self.batch_sizes)
        return Cursor(cursor.epoch + 1, 0) if last else Cursor(cursor.epoch, position)

    def state(self, cursor: Cursor) -> dict[str, Any]:
        return {
            "kind": "windows",
            "epoch": cursor.epoch,
            "position": cursor.position,
            "batch_sizes": list(self.batch_sizes),
            "hosts": list(self.hosts),
            "window_rows": self.window_rows,
            "began": (
                _packed(self._began[1])
                if self._began is not None and self._began[0] == cursor.epoch
                else None
            ),
            "left": _packed(self._left(cursor)),
        }

    def _left(self, cursor: Cursor) -> list[Window]:
        """Return the windows, or the rows of them, that no worker has seen yet in this epoch."""
        left: list[Window] = []
        for worker, (windows, ends) in enumerate(zip(*self.windows(cursor.epoch), strict=True)):
            rows = int(ends[-1]) if len(ends) else 0
            seen, _ = self.cuts.bounds(rows, self.batch_sizes[worker], cursor.position)
            for window, end in zip(windows, ends.tolist(), strict=True):
                begin = end - len(window)
                if seen <= begin:
                    left.append(window)
                elif seen < end:
                    unseen = window.shuffled(self.seed, cursor.epoch)[seen - begin :]
                    left.append(Window(window.start, window.stop, unseen))
        return left

    def restore(self, state: dict[str, Any]) -> Cursor:
        if state["kind"] != "windows":
            raise BadRequest(
                f"the checkpoint was made with shard={state['kind']}: resume it with that"
            )
        self._epoch = None
        same = (tuple(state["batch_sizes"]), tuple(state["hosts"]), state["window_rows"]) == (
            self.batch_sizes,
            self.hosts,
            self.window_rows,
        )
        left = state["began"] if same else state["left"]
        self._began = (state["epoch"], _unpacked(left)) if left is not None else None
        if self._began is not None and not sum(len(w) for w in self._began[1]):
            self._began = None
            return Cursor(state["epoch"] + (0 if same else 1), state["position"] if same else 0)
        return Cursor(state["epoch"], state["position"] if same else 0)


def assign(
    spans: Sequence[RowSpan], sizes: Sequence[int], hosts: Sequence[str]
) -> list[list[tuple[int, int]]]:
    """Return each worker's spans of rows, in proportion to the batch sizes.

    A worker gets rows on its own host first, then rows that are left.
    """
    quota = list(split(sum(s.stop - s.start for s in spans), sizes))
    own: list[list[tuple[int, int]]] = [[] for _ in sizes]
    starts = [s.start for s in spans]
    known = {s.host for s in spans}
    for near in (True, False):
        for worker in range(len(sizes)):
            host = hosts[worker] if worker < len(hosts) else None
            if near and host not in known:
                continue
            for i, span in enumerate(spans):
                take = min(quota[worker], span.stop - starts[i])
                if take and (not near or span.host == host):
                    own[worker].append((starts[i], starts[i] + take))
                    starts[i] += take
                    quota[worker] -= take
    return [sorted(assigned) for assigned in own]


def arrangement(spans: Sequence[RowSpan], sizes: Sequence[int], hosts: Sequence[str]) -> Tensor:
    """Return all rows in an order in which the rows of each worker are adjacent."""
    return torch.cat(
        [torch.arange(start, stop) for own in assign(spans, sizes, hosts) for start, stop in own]
    )


def _cut(start: int, stop: int, rows: int) -> list[Window]:
    return [Window(at, min(at + rows, stop)) for at in range(start, stop, rows)]


def _dealt(windows: list[Window], sizes: Sequence[int]) -> list[list[Window]]:
    """Distribute the windows that are left of an epoch, in proportion to the batch sizes.

    A window may be split between two workers.
    """
    quota = list(split(sum(len(w) for w in windows), sizes))
    own: list[list[Window]] = [[] for _ in sizes]
    worker = 0
    for window in windows:
        rest: Window | None = window
        while rest is not None and len(rest):
            while not quota[worker]:
                worker += 1
            take = min(quota[worker], len(rest))
            quota[worker] -= take
            if rest.rows is None:
                mine, rest = (
                    Window(rest.start, rest.start + take),
                    Window(rest.start + take, rest.stop),
                )
            else:
                mine, rest = (
                    Window(rest.start, rest.stop, rest.rows[:take]),
                    Window(rest.start, rest.stop, rest.rows[take:]),
                )
            own[worker].append(mine)
    return own


def _packed(windows: list[Window]) -> list[Any]:
    return [[w.start, w.stop, w.rows] for w in windows]


def _unpacked(content: list[Any]) -> list[Window]:
    return [Window(start, stop, rows) for start, stop, rows in content]
