"""The clocks of many workers as arrays: a round of a schedule at a time.

The event queue (engine.py) is exact and takes a few microseconds per message. A ring of 4,096
workers has 33 million messages, so from `EXACTLY_UP_TO` workers on a round is computed for all
ranks at once:

    start[m]  = max(clock[source], way out free, way in free)     for every message m of the round
    clock[p]  = when rank p has sent, received and added all of its messages of the round

The schedules are the same, as arrays (`ring_rounds`), or as objects that are turned into arrays.
Where several messages of a round share a way, they are taken in the order of their posting. Both
forms give the same clocks as long as a link is not used by a later round before an earlier one
(tests/unit/test_planning.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.collectives.algorithms.hierarchical import merged
from paceline.collectives.algorithms.tree import outwards, towards
from paceline.collectives.base import schedule_of
from paceline.collectives.execute import SEGMENT_BYTES
from paceline.collectives.moves import Sum
from paceline.collectives.schedule import Transfer
from paceline.registry import Spec, collectives, operations
from paceline.transport.virtual import Network

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class Round(NamedTuple):
    """The transfers of one round: chunks [start, stop) from source to target."""

    source: Ints
    target: Ints
    start: Ints
    stop: Ints
    adds: bool


def ring_rounds(ranks: int, shift: int, adds: bool) -> Iterator[Round]:
    """In round r rank p sends chunk (p - r + shift) mod P to rank p + 1."""
    source = np.arange(ranks)
    target = (source + 1) % ranks
    for r in range(ranks - 1):
        chunk = (source - r + shift) % ranks
        yield Round(source, target, chunk, chunk + 1, adds)


def _ring(ranks: int) -> Iterator[Round]:
    yield from ring_rounds(ranks, 0, True)
    yield from ring_rounds(ranks, 1, False)


def _stepwise(ranks: int, chunked: bool = True, start: int = 0) -> Iterator[Round]:
    if chunked:
        yield from ring_rounds(ranks, -start, True)
    else:
        yield from _from_objects(f"stepwise:chunked=false,start={start}", ranks)


def _all_gather(ranks: int) -> Iterator[Round]:
    yield from ring_rounds(ranks, 0, False)


def _hierarchical(ranks: int, group: int = 2) -> Iterator[Round]:
    members = [list(range(low, min(low + group, ranks))) for low in range(0, ranks, group)]
    leaders = np.array([some[0] for some in members])
    count = len(leaders)
    yield from _as_arrays(merged([towards(some, count) for some in members]))
    for shift, adds in ((0, True), (1, False)):
        for r in ring_rounds(count, shift, adds):
            yield r._replace(source=leaders[r.source], target=leaders[r.target])
    yield from _as_arrays(merged([outwards(some, count) for some in members]))


# Schedules with about P * P transfers; all others have few enough to be made as objects.
AS_ARRAYS: dict[str, Callable[..., Iterator[Round]]] = {
    "ring": _ring,
    "stepwise": _stepwise,
    "all-gather": _all_gather,
    "hierarchical": _hierarchical,
}


# The halves of ring-like schedules: whether what arrives is added.
HALVES = {"ring": (True, False), "stepwise": (True,), "all-gather": (False,)}


def rounds_of(choice: str, ranks: int) -> Iterator[Round]:
    """The rounds of a schedule as arrays."""
    spec = resolved(choice)
    if spec.name in AS_ARRAYS:
        yield from AS_ARRAYS[spec.name](ranks, **spec.options)
    else:
        yield from _from_objects(str(spec), ranks)


def resolved(choice: str) -> Spec:
    """The name of a schedule, with its options checked and converted."""
    return (operations if Spec.of(choice).name in operations else collectives).resolve(choice)


@lru_cache(maxsize=64)
def _from_objects(spec: str, ranks: int) -> list[Round]:
    return _as_arrays(schedule_of(spec, ranks).rounds)


def _as_arrays(rounds: Sequence[Sequence[Transfer]]) -> list[Round]:
    found = []
    for transfers in rounds:
        for adds in (True, False):
            some = [t for t in transfers if t.adds == adds]
            if some:
                columns = np.array([(t.source, t.target, t.start, t.stop) for t in some]).T
                source, target, start, stop = columns
                found.append(Round(source, target, start, stop, adds))
    return found


def chunks_of(choice: str, ranks: int) -> int:
    """Into how many chunks a schedule cuts its buffer."""
    spec = resolved(choice)
    if spec.name in HALVES and spec.options.get("chunked", True):
        return ranks
    if spec.name == "hierarchical":
        return -(-ranks // int(spec.options.get("group", 2)))
    return schedule_of(spec, ranks).chunks


@dataclass
class Clocks:
    """The clocks of all ranks, and until when each way is busy."""

    network: Network
    s_per_byte_added: float = 0.0

    def __post_init__(self) -> None:
        ranks = self.network.ranks
        self.now: Floats = np.zeros(ranks)
        self.hosts: Ints = np.array(self.network.hosts)
        # Ways to other hosts by host, ways inside a host by rank.
        self._ways = Ways(ranks), Ways(ranks)
        self._inside = Ways(ranks), Ways(ranks)
        self.sent_bytes: Ints = np.zeros(ranks, dtype=np.int64)
        self.messages = 0

    def sum(self, run: Sum, ranks: int) -> None:
        """Run a schedule on the clocks of the first `ranks` ranks."""
        name = resolved(run.schedule).name
        chunks = chunks_of(run.schedule, ranks)
        if name in HALVES and chunks == ranks and len(set(self.network.hosts[:ranks])) == ranks:
            for adds in HALVES[name]:
                self._half_ring(run, ranks, adds)
            return
        edges = np.arange(chunks + 1) * run.numbers // chunks
        if run.wire is None:
            lengths = np.diff(edges) * run.itemsize
        else:
            lengths = np.array([run.wire.length(int(n)) if n else 0 for n in np.diff(edges)])
        ends = np.concatenate([[0], np.cumsum(lengths)])
        for round_ in rounds_of(run.schedule, ranks):
            sizes = ends[round_.stop] - ends[round_.start]
            self._round(round_, sizes, added=run.wire is None and round_.adds)
            if run.wire is not None and round_.adds:
                decoded = (edges[round_.stop] - edges[round_.start]) * run.itemsize
                np.add.at(self.now, round_.target, decoded * self.s_per_byte_added)

    def _half_ring(self, run: Sum, ranks: int, adds: bool) -> None:
        """P - 1 rounds of a ring of hosts, without going through them.

        In a round, rank p's clock moves by `stay` after its own, or to `hop` after its neighbour's:

            clock[p] <- max(clock[p] + stay, clock[p - 1] + hop)

        So after P - 1 rounds it is the largest of clock[p - h] + h hop + (P - 1 - h) stay over all
        h. A chunk has the mean size here; real ones differ from it by less than one number.
        """
        link, gamma, numbers = self.network.between, self.s_per_byte_added, run.numbers / ranks
        size = numbers * run.itemsize if run.wire is None else run.wire.length(round(numbers))
        sending = size * link.s_per_byte
        hop, stay = sending + link.latency_s, sending
        if adds and run.wire is None:
            segment = min(size, SEGMENT_BYTES)
            last = size % SEGMENT_BYTES or segment
            first = segment * link.s_per_byte + link.latency_s
            hop, stay = max(first + size * gamma, hop + last * gamma), max(stay, size * gamma)
        elif adds:
            decoding = numbers * run.itemsize * gamma
            hop, stay = hop + decoding, stay + decoding
        now, more = self.now[:ranks], hop - stay
        places = np.arange(2 * ranks)
        behind = np.concatenate([now, now]) - places * more  # twice around: p - h from P - 1 back
        latest = _window_maximum(behind, ranks) + places[ranks:] * more
        self.now[:ranks] = latest + (ranks - 1) * stay
        self.sent_bytes[:ranks] += round((ranks - 1) * size)
        self.messages += (ranks - 1) * ranks

    def _round(self, round_: Round, sizes: Ints, added: bool) -> None:
        some = sizes > 0
        if not some.all():
            source, target, start, stop = (column[some] for column in round_[:4])
            round_ = Round(source, target, start, stop, round_.adds)
            sizes = sizes[some]
        left, arrived = self.post(round_.source, round_.target, sizes)
        if added:
            self._add(round_.target, sizes, arrived)
        else:
            np.maximum.at(self.now, round_.target, arrived)
        np.maximum.at(self.now, round_.source, left)

    def _add(self, target: Ints, sizes: Ints, arrived: Floats) -> None:
        """Each target adds what arrives. Segments are added while the next ones arrive."""
        gamma, link = self.s_per_byte_added, self.network.between
        if _different(target):
            segment = np.minimum(sizes, SEGMENT_BYTES)
            last = np.where(sizes % SEGMENT_BYTES == 0, segment, sizes % SEGMENT_BYTES)
            first = np.maximum(self.now[target], arrived - (sizes - segment) * link.s_per_byte)
            done = np.maximum(arrived, self.now[target]) + last * gamma
            self.now[target] = np.maximum(first + sizes * gamma, done)
        else:
            for rank, size, at in zip(target, sizes, arrived, strict=True):
                self.now[rank] = max(self.now[rank], at) + size * gamma

    def post(self, source: Ints, target: Ints, sizes: Ints) -> tuple[Floats, Floats]:
        """Post messages at the clocks of their sources; when each has left and has arrived."""
        a, b = self.hosts[source], self.hosts[target]
        np.add.at(self.sent_bytes, source, sizes)
        self.messages += len(source)
        outside = a != b
        network, posted = self.network, self.now[source]
        if outside.all():
            spent = np.multiply(sizes, network.between.s_per_byte, dtype=np.float64)
            left = _through(posted, a, b, spent, *self._ways)
            return left, left + network.between.latency_s
        left, latency = np.empty(len(source)), np.empty(len(source))
        for here, link, out, into, ways in (
            (outside, network.between, a, b, self._ways),
            (~outside, network.inside, source, target, self._inside),
        ):
            spent = np.multiply(sizes[here], link.s_per_byte, dtype=np.float64)
            left[here] = _through(posted[here], out[here], into[here], spent, *ways)
            latency[here] = link.latency_s
        return left, left + latency


class Ways:
    """For each of several ways, the latest time in which it is busy without a gap."""

    def __init__(self, count: int) -> None:
        self.since, self.until = np.zeros(count), np.zeros(count)

    def take(self, which: Ints, since: Floats, until: Floats) -> None:
        """Make ways busy; a message that passed before their latest time changes nothing."""
        later = until > self.until[which]
        if not later.all():
            which, since, until = which[later], since[later], until[later]
        gap = since > self.until[which]
        self.since[which] = np.where(gap, since, self.since[which])
        self.until[which] = until


def _through(
    posted: Floats, out: Ints, into: Ints, spent: Floats, ways_out: Ways, ways_in: Ways
) -> Floats:
    """When messages have left that were posted at these times.

    A message that was posted earlier than a way's latest message, and fits in before it, passes it.
    """
    if _different(out) and _different(into):
        return _at_once(posted, out, into, spent, ways_out, ways_in)
    left = np.empty(len(posted))
    for m in np.lexsort((np.arange(len(posted)), posted)):
        one = slice(m, m + 1)
        left[one] = _at_once(posted[one], out[one], into[one], spent[one], ways_out, ways_in)
    return left


def _at_once(
    posted: Floats, out: Ints, into: Ints, spent: Floats, ways_out: Ways, ways_in: Ways
) -> Floats:
    start = posted
    for ways, which in ((ways_out, out), (ways_in, into)):
        waits = start + spent > ways.since[which]
        start = np.maximum(start, np.where(waits, ways.until[which], start))
    ended = start + spent
    for ways, which in ((ways_out, out), (ways_in, into)):
        ways.take(which, start, ended)
    return ended


def _window_maximum(values: Floats, width: int) -> Floats:
    """For each i from `width` on, the largest of values[i - width + 1 .. i]; 2 * width values."""
    first, second = values[:width], values[width:]
    later = np.maximum.accumulate(first[::-1])[::-1]  # from i on to the end of the first half
    found: Floats = np.maximum(np.append(later[1:], -np.inf), np.maximum.accumulate(second))
    return found


def _different(which: Ints) -> bool:
    return len(which) < 2 or bool(np.bincount(which).max() == 1)
