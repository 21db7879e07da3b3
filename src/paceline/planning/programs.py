"""What the ranks of a strategy do in virtual time: the declared exchanges as programs.

Each program sends the messages that the strategy's own code sends, in the same order, and waits for
them in the same order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from paceline.codecs.base import Codec
from paceline.collectives.moves import Moves, Sum, moves
from paceline.planning.engine import Flush, Now, Post, Program, Spend, Take, TakeAny, Tell, Until
from paceline.planning.fit import Line
from paceline.registry import Spec, operations
from paceline.strategies.base import Strategy
from paceline.strategies.parts.pattern import PushPull, Reduction, Setting, Swap
from paceline.types import Layout

LENGTH_BYTES = 8  # announces a message whose length varies
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

    def slower(self, factor: float) -> Costs:
        """The same work where it takes so many times as long."""
        return replace(
            self,
            s_per_byte_added=factor * self.s_per_byte_added,
            encode=self.encode.times(factor),
            decode=self.decode.times(factor),
            summed_s_per_byte=factor * self.summed_s_per_byte,
            update_s_per_byte=factor * self.update_s_per_byte,
        )

    def handling_s(self, size_bytes: int) -> float:
        """The processor time of moving a message."""
        return self.moved_s_per_message + size_bytes * self.moved_s_per_byte


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
            sent = []
            if run.wire is not None and round_.sends and self.costs.encode.fixed:
                yield Spend(len(round_.sends) * self.costs.encode.fixed)
            for peer, size in round_.sends:
                sent.append((yield self._post(peer, size)))
            if run.wire is None:
                for peer, size in round_.adds:
                    yield Take(peer)
                    yield Spend(size * added)
            for peer, _ in (*(() if run.wire is None else round_.adds), *round_.takes):
                yield Take(peer)
            if sent:
                yield Flush(sent)
            decoding = round_.decoded_bytes * added
            if run.wire is not None:
                decoding += (len(round_.adds) + len(round_.takes)) * self.costs.decode.fixed
            if decoding:
                yield Spend(decoding)

    def _post(self, peer: int, size: int) -> Post:
        return Post(peer, size, self.costs.handling_s(size))

    def _tell(self, peer: int) -> Tell:
        return Tell(peer, self.costs.handling_s(0))

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
        sent = []
        for size in self.message(self.codec.plain, self.layout):
            sent.append((yield self._post(partner, size)))
        for _ in sent:
            yield Take(partner)
        yield Flush(sent)
        if self.codec.lossless:
            yield Spend(self.size_bytes * self.costs.s_per_byte_added)
        else:
            yield Spend(self.costs.decode.at(self.size_bytes))

    def push_and_pull(self) -> Program:
        ranks = range(self.workers, self.workers + self.servers)
        if not self.codec.lossless:
            yield Spend(self.costs.encode.at(self.size_bytes))
        sent = []
        for server in ranks:
            yield self._tell(server)
        for server, part in zip(ranks, self.parts, strict=True):
            for size in self.message(self.codec, part):
                sent.append((yield self._post(server, size)))
        for server, part in zip(ranks, self.parts, strict=True):
            yield Take(server)  # the note
            for _ in self.message(self.codec.plain, part):
                yield Take(server)
        yield Flush(sent)
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
            for _ in pushed:
                yield Take(worker)
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
                yield from self._reply(client, reply, size)

    def _reply(self, client: int, reply: Sequence[int], size: int) -> Program:
        if not self.codec.plain.lossless:
            yield Spend(self.costs.encode.at(size))
        yield self._tell(client)
        sent = []
        for each in reply:
            sent.append((yield self._post(client, each)))
        yield Flush(sent)

    def shares_ways(self, step: int) -> bool:
        """Whether, in a step, a rank may send to several others at once, or take from several."""
        exchanges = self.strategy.pattern(step, self.setting)
        if any(isinstance(e, PushPull) for e in exchanges):
            return self.workers > 1
        runs = [run for e in exchanges if isinstance(e, Reduction) for run in self.sums(e)]
        for run in runs:
            for me in range(self.workers):
                rounds = self._rounds(run, me)
                to = {peer for round_ in rounds for peer, _ in round_.sends}
                of = {peer for round_ in rounds for peer, _ in (*round_.adds, *round_.takes)}
                if len(to) > 1 or len(of) > 1:
                    return True
        return False

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
