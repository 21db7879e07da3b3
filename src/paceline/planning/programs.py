"""What the ranks of a strategy do in virtual time: the declared exchanges as programs.

Each program sends the messages that the strategy's own code sends, in the same order, and waits for
them in the same order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import zip_longest

from paceline.codecs.base import Codec
from paceline.collectives.moves import Moves, Sum, moves
from paceline.planning.engine import Now, Post, Program, Spend, Take, TakeAny, Tell, Until
from paceline.planning.fit import Line
from paceline.registry import Spec, operations
from paceline.strategies.base import Strategy
from paceline.strategies.parts.pattern import PushPull, Reduction, Setting, Swap
from paceline.types import Layout

LENGTH_BYTES = 8  # announces a message whose length varies
MOST_PIECES = 32  # of one message
FREE = Line(0.0, 0.0)
FASTEST = ("auto", "native")  # stand for the fastest all-reduce there is


@dataclass(frozen=True)
class Costs:
    """What ranks spend beside computing, in seconds; per byte of float32 numbers."""

    s_per_byte_added: float = 0.0
    # Over the bytes of the numbers. A hop codec works on chunks: the fixed seconds are of each.
    encode: Line = FREE
    decode: Line = FREE
    summed_s_per_byte: float = 0.0  # a server sums the gradients of one step
    update_s_per_byte: float = 0.0  # a server's optimizer
    # The processor time of moving, at both ends together. It takes none of the clock of a rank that
    # has a core for itself and waits meanwhile; cores that several ranks share are busy with it.
    moved_s_per_message: float = 0.0
    moved_s_per_byte: float = 0.0
    # Of a step beside its computing: records, the data. It counts where ranks share cores.
    beside_s: float = 0.0

    def handling_s(self, size_bytes: int, share: float = 1.0) -> float:
        """The processor time of moving a message, or a share of one."""
        return share * self.moved_s_per_message + size_bytes * self.moved_s_per_byte


@dataclass(frozen=True)
class Overlap:
    """How a step's computing is divided, for an exchange that begins inside the backward pass."""

    before: float  # the share of loading and the forward pass
    backward: float
    # Of each bucket of gradients: its numbers, and when it is ready, as a share of the backward
    # pass, in the order in which they are exchanged.
    buckets: tuple[tuple[int, float], ...]


@dataclass
class Lineup:
    """The workers and servers of one setting: a strategy, a codec, a model, how many ranks."""

    strategy: Strategy
    codec: Codec
    layout: Layout
    workers: int
    servers: int = 0
    steps_per_epoch: int = 1 << 40
    seed: int = 0
    costs: Costs = Costs()
    fastest: str = "ring"  # what `collective=auto` means
    # What a rank sends to several others at once is cut into pieces of this size, which take turns;
    # None: one message after the other.
    piece_bytes: int | None = None
    overlap: Overlap | None = None
    _moves: dict[tuple[str, int, int, bool, int], list[Moves]] = field(
        default_factory=dict, repr=False
    )

    @cached_property
    def setting(self) -> Setting:
        compressed = not self.codec.lossless
        return Setting(self.workers, self.steps_per_epoch, self.seed, compressed)

    @property
    def size_bytes(self) -> int:
        """Of the gradients, as float32."""
        return 4 * self.layout.numel

    @cached_property
    def parts(self) -> list[Layout]:
        """What each server holds."""
        return [self._part(server) for server in range(self.servers)]

    def _part(self, server: int) -> Layout:
        bounds = server_bounds(self.layout, self.servers)[server]
        return self.layout.cut(*bounds)

    # --- ranks

    def programs(self, compute: Callable[[int, int], float], steps: int) -> list[Program]:
        """Programs of all ranks; `compute(worker, step)` is the time of a step in seconds."""
        ahead = self._ahead()
        return [
            *(self.worker(w, compute, steps) for w in range(self.workers)),
            *(self.server(s, ahead, steps) for s in range(self.servers)),
        ]

    def worker(self, me: int, compute: Callable[[int, int], float], steps: int) -> Program:
        for step in range(steps):
            if self.overlap is not None and self.workers > 1:
                yield from self._overlapped(me, compute(me, step), step)
                continue
            yield Spend(compute(me, step), shared=False)
            if self.costs.beside_s:
                yield Spend(self.costs.beside_s)
            if self.workers == 1 and not self.servers:
                continue
            for exchange in self.strategy.pattern(step, self.setting):
                if isinstance(exchange, Reduction):
                    yield from self.reduction(me, exchange)
                elif isinstance(exchange, Swap):
                    yield from self.swap(me, exchange)
                else:
                    yield from self.push_and_pull()

    def reduction(self, me: int, exchange: Reduction) -> Program:
        encoding, decoding = self.coding(exchange)
        if encoding:
            yield Spend(encoding)
        for run in self.sums(exchange):
            yield from self._sum(run, me)
        if decoding:
            yield Spend(decoding)

    def _sum(self, run: Sum, me: int) -> Program:
        """One rank's rounds of a schedule."""
        added = self.costs.s_per_byte_added
        for round_ in self._rounds(run, me):
            lefts = []
            if run.wire is not None and round_.sends and self.costs.encode.fixed:
                yield Spend(len(round_.sends) * self.costs.encode.fixed)
            for post in self._in_turns(round_.sends):
                lefts.append((yield post))
            if run.wire is None:
                for peer, size in round_.adds:
                    yield from self._take(peer, size)
                    yield Spend(size * added)
            for peer, size in (*(() if run.wire is None else round_.adds), *round_.takes):
                yield from self._take(peer, size)
            if lefts:
                yield Until(max(lefts))
            decoding = round_.decoded_bytes * added
            if run.wire is not None:
                decoding += (len(round_.adds) + len(round_.takes)) * self.costs.decode.fixed
            if decoding:
                yield Spend(decoding)

    def _take(self, peer: int, size: int) -> Program:
        for _ in self._pieces(size):
            yield Take(peer)

    def _post(self, peer: int, size: int, share: float = 1.0) -> Post:
        return Post(peer, size, self.costs.handling_s(size, share), share)

    def _tell(self, peer: int) -> Tell:
        return Tell(peer, self.costs.handling_s(0))

    def _pieces(self, size: int) -> list[int]:
        """A message as the pieces in which it takes turns with others."""
        if self.piece_bytes is None or size <= self.piece_bytes:
            return [size]
        count = min(MOST_PIECES, -(-size // self.piece_bytes))
        return [size * (n + 1) // count - size * n // count for n in range(count)]

    def _in_turns(self, sends: Sequence[tuple[int, int]]) -> list[Post]:
        """Messages to several ranks in pieces that take turns."""
        each = []
        for peer, size in sends:
            pieces = self._pieces(size)
            each.append([self._post(peer, piece, 1 / len(pieces)) for piece in pieces])
        return [post for turn in zip_longest(*each) for post in turn if post is not None]

    def _overlapped(self, me: int, seconds: float, step: int) -> Program:
        """A step whose buckets are exchanged as soon as they are ready, beside the computing.

        The exchange has a thread of its own, so it takes no time from the computing here.
        """
        assert self.overlap is not None
        before, backward = seconds * self.overlap.before, seconds * self.overlap.backward
        began = yield Now()
        for exchange in self.strategy.pattern(step, self.setting):
            assert isinstance(exchange, Reduction)
            schedule = self.fastest if exchange.schedule in FASTEST else exchange.schedule
            for numbers, ready in self.overlap.buckets:
                yield Until(began + before + ready * backward)
                yield from self._sum(Sum(schedule, numbers, 4), me)
        yield Until(began + before + backward)
        yield Spend(seconds - before - backward)

    def _rounds(self, run: Sum, me: int) -> list[Moves]:
        key = (run.schedule, run.numbers, run.itemsize, run.wire is None, me)
        if key not in self._moves:
            self._moves[key] = moves(run, me, self.workers)
        return self._moves[key]

    def coding(self, exchange: Reduction) -> tuple[float, float]:
        """Seconds in which a worker encodes and decodes. A gathered message is one per worker.

        What each chunk takes, where chunks are encoded one by one, is not in it.
        """
        if not exchange.coded or self.codec.lossless:
            return 0.0, 0.0
        encode, decode = self.costs.encode, self.costs.decode
        if any(run.wire is not None for run in self.sums(exchange)):
            return self.size_bytes * encode.slope, self.size_bytes * decode.slope
        senders = self.workers if self.codec.kind == "gather" else 1
        return encode.at(self.size_bytes), senders * decode.at(self.size_bytes)

    def sums(self, exchange: Reduction) -> tuple[Sum, ...]:
        """The schedules that a reduction runs."""
        schedule = self.fastest if exchange.schedule in FASTEST else exchange.schedule
        if exchange.coded and not self.codec.lossless:
            if Spec.of(schedule).name in operations:  # half an all-reduce adds encoded messages
                return (Sum(schedule, self.layout.numel, 4, self.codec.wire),)
            return self.codec.sums(self.layout, schedule, self.workers)
        return (Sum(schedule, self.layout.numel, 4),)

    def swap(self, me: int, exchange: Swap) -> Program:
        partner = exchange.partners[me]
        if partner is None:
            return
        if not self.codec.lossless:
            yield Spend(self.costs.encode.at(self.size_bytes))
        lefts = []
        for size in self.message(self.codec.plain, self.layout):
            lefts.append((yield self._post(partner, size)))
        for _ in lefts:
            yield Take(partner)
        yield Until(max(lefts))
        if self.codec.lossless:
            yield Spend(self.size_bytes * self.costs.s_per_byte_added)
        else:
            yield Spend(self.costs.decode.at(self.size_bytes))

    def push_and_pull(self) -> Program:
        ranks = range(self.workers, self.workers + self.servers)
        if not self.codec.lossless:
            yield Spend(self.costs.encode.at(self.size_bytes))
        lefts = []
        for server in ranks:
            yield self._tell(server)
        pushed = [
            (s, n)
            for s, p in zip(ranks, self.parts, strict=True)
            for n in self.message(self.codec, p)
        ]
        for post in self._in_turns(pushed):
            lefts.append((yield post))
        for server, part in zip(ranks, self.parts, strict=True):
            yield Take(server)  # the note
            for size in self.message(self.codec.plain, part):
                yield from self._take(server, size)
        yield Until(max(lefts))
        if not self.codec.plain.lossless:
            yield Spend(self.costs.decode.at(self.size_bytes))

    def server(self, index: int, ahead: int, steps: int) -> Program:
        """A server: it replies to every worker that may go on, after it has applied what came."""
        part, costs = self.parts[index], self.costs
        pushed, reply = self.message(self.codec, part), self.message(self.codec.plain, part)
        size = 4 * part.numel
        clocks, waiting = [0] * self.workers, set[int]()
        slowest = _Slowest(self.workers)
        pending: Counter[int] = Counter()  # by clock: the gradients that are not applied yet
        for _ in range(self.workers * steps):
            worker = yield TakeAny()
            for each in pushed:
                yield from self._take(worker, each)
            if not self.codec.lossless:
                yield Spend(costs.decode.at(size))
            clocks[worker] += 1
            waiting.add(worker)
            pending[clocks[worker]] += 1
            # Others that wait may go on only if the slowest has moved.
            asks = waiting if slowest.add(clocks[worker]) else {worker}
            allowed = sorted(w for w in asks if clocks[w] - slowest.clock <= ahead)
            if not allowed:
                continue
            # The gradients of each clock are summed, and applied as one update.
            summed = sum(count - 1 for count in pending.values()) * costs.summed_s_per_byte
            yield Spend(size * (summed + len(pending) * costs.update_s_per_byte))
            pending.clear()
            for client in allowed:
                waiting.remove(client)
            at_once = self.piece_bytes is not None
            for some in [allowed] if at_once else [[client] for client in allowed]:
                yield from self._reply(some, reply, size)

    def _reply(self, clients: Sequence[int], reply: Sequence[int], size: int) -> Program:
        """Reply to clients at once: the pieces of their messages take turns."""
        for client in clients:
            if not self.codec.plain.lossless:
                yield Spend(self.costs.encode.at(size))
            yield self._tell(client)
        lefts = []
        for post in self._in_turns([(c, n) for n in reply for c in clients]):
            lefts.append((yield post))
        yield Until(max(lefts))

    def shares_ways(self) -> bool:
        """Whether a rank sends to several others, or takes from several, at the same time."""
        exchanges = self.strategy.pattern(0, self.setting)
        if any(isinstance(e, PushPull) for e in exchanges):
            return self.workers > 1
        return any(
            max(len({p for p, _ in some}) for some in (round_.sends, round_.adds + round_.takes))
            > 1
            for exchange in exchanges
            if isinstance(exchange, Reduction)
            for run in self.sums(exchange)
            for me in range(self.workers)
            for round_ in self._rounds(run, me)
        )

    def _ahead(self) -> int:
        found = [e for e in self.strategy.pattern(0, self.setting) if isinstance(e, PushPull)]
        return found[0].ahead if found else 0

    def message(self, codec: Codec, layout: Layout) -> Sequence[int]:
        """The messages that carry a part of the numbers from one rank to another."""
        if codec.lossless:
            return (4 * layout.numel,)
        size = codec.message_bytes(layout)
        return (LENGTH_BYTES, size) if codec.varies else (size,)


class _Slowest:
    """The clock of the slowest worker: the largest c that every worker has reached."""

    def __init__(self, workers: int) -> None:
        self.clock, self._workers = 0, workers
        self._reached: dict[int, int] = {}

    def add(self, clock: int) -> bool:
        """A worker's clock has become `clock`. Returns whether the slowest has moved."""
        self._reached[clock] = self._reached.get(clock, 0) + 1
        before = self.clock
        while self._reached.get(self.clock + 1, 0) == self._workers:
            self.clock += 1
        return self.clock > before


def server_bounds(layout: Layout, servers: int) -> list[tuple[int, int]]:
    """The span of numbers that each server holds: whole tensors, about equally many numbers."""
    ends, seen = [0] * servers, 0
    for slot in layout.slots:
        if slot.numel:
            server = min(servers - 1, (seen + slot.numel // 2) * servers // max(1, layout.numel))
            seen += slot.numel
            for later in range(server, servers):
                ends[later] = seen
    return [(0 if s == 0 else ends[s - 1], ends[s]) for s in range(servers)]
