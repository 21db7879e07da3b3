"""The executor runs any schedule on any transport, in place, without allocating memory per call.

All messages of a round are in flight together. Chunks that are to be added arrive in scratch
memory. Long ones arrive in segments, so that one is added while the next is in flight.
With a `wire` (wire.py) messages hold encoded chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from paceline.collectives.schedule import Schedule
from paceline.collectives.wire import CodedMemory, CodedRound, Wire, coded_rounds
from paceline.transport.base import REDUCE, Message, Op, Transport, check_tensor, wording
from paceline.transport.together import agree

# Measured on gloo, shm and mpi: smaller segments cost more than the overlap of adding and receiving
# gains.
SEGMENT_BYTES = 4 << 20
# Buffers whose messages are kept. A training run has a few, and the same ones in every step.
BOUND = 16

PeerSpan = tuple[int, int, int]  # (peer, start, stop): a span of the buffer and the other rank


@dataclass(frozen=True)
class RankRound:
    """The spans that one rank sends and receives in one round.

    `places` arrive in the buffer. `adds` and `swaps` arrive in scratch memory: an add is summed
    into the buffer on arrival; a swap is copied into the buffer once the old content has been sent.
    """

    sends: tuple[PeerSpan, ...]
    places: tuple[PeerSpan, ...]
    adds: tuple[PeerSpan, ...]
    swaps: tuple[PeerSpan, ...]

    @property
    def aside(self) -> int:
        """Elements that arrive in scratch memory."""
        return sum(high - low for _, low, high in (*self.adds, *self.swaps))


def compile_for_rank(
    schedule: Schedule, rank: int, length: int, segment: int = 0
) -> list[RankRound]:
    """One rank's rounds of a schedule for a buffer of `length` elements.

    Adds are cut into segments of `segment` elements (0: uncut). Empty spans are left out, on both
    sides.
    """
    rounds = []
    for transfers in schedule.rounds:
        sends: list[PeerSpan] = []
        places: list[PeerSpan] = []
        adds: list[PeerSpan] = []
        swaps: list[PeerSpan] = []
        ours = [t for t in transfers if rank in (t.source, t.target)]
        own = {(t.target, t.start, t.stop) for t in ours if t.source == rank}
        for t in ours:
            low, high = schedule.bounds(t.start, length)[0], schedule.bounds(t.stop - 1, length)[1]
            into = schedule.bounds(t.lands, length)[0]
            cut = segment if segment and t.adds else high - low
            for start in range(low, high, cut or 1):
                stop = min(start + cut, high)
                if t.source == rank:
                    sends.append((t.target, start, stop))
                if t.target == rank:
                    swapped = (t.source, t.lands, t.lands + t.stop - t.start) in own
                    kind = adds if t.adds else swaps if swapped else places
                    kind.append((t.source, start - low + into, stop - low + into))
        if sends or places or adds or swaps:
            rounds.append(RankRound(tuple(sends), tuple(places), tuple(adds), tuple(swaps)))
    return rounds


class BoundRound:
    """A round on one buffer, with its messages, which are made once and started in every call."""

    def __init__(
        self, round_: RankRound, flat: Tensor, scratch: Tensor, transport: Transport
    ) -> None:
        sizes = [high - low for _, low, high in (*round_.adds, *round_.swaps)]
        asides = iter(scratch[: round_.aside].split(sizes))

        def aside(spans: tuple[PeerSpan, ...]) -> list[tuple[Message, Tensor, Tensor]]:
            arriving = [(peer, flat[low:high], next(asides)) for peer, low, high in spans]
            return [(transport.receiving(place, peer), own, place) for peer, own, place in arriving]

        self.adds, self.swaps = aside(round_.adds), aside(round_.swaps)
        placing = [transport.receiving(flat[low:high], peer) for peer, low, high in round_.places]
        leaving = [transport.sending(flat[low:high], peer) for peer, low, high in round_.sends]
        self.messages = [*(m for m, _, _ in (*self.adds, *self.swaps)), *placing, *leaving]
        self.others = [*placing, *leaving]


class Executor:
    """Runs a schedule on a transport, with plain messages or with those of a wire.

    The rank's rounds and scratch memory are made at the first call with a buffer of a size, and
    kept.
    """

    def __init__(
        self,
        schedule: Schedule,
        transport: Transport,
        segment_bytes: int = SEGMENT_BYTES,
        wire: Wire | None = None,
    ) -> None:
        self.schedule, self.transport, self._segment_bytes = schedule, transport, segment_bytes
        self._wire = wire
        self._compiled: dict[tuple[Any, ...], Any] = {}
        self._bound: dict[tuple[Any, ...], Any] = {}

    def run(self, buffer: Tensor, op: Op = "sum") -> None:
        reduce, rounds = REDUCE[op], self._rounds_for(buffer, op)
        if self._wire is None:
            self._run_plain(rounds, reduce)
        else:
            self._run_coded(rounds, reduce, self._wire, self._memory(buffer, op).values)

    def _run_plain(self, rounds: list[BoundRound], reduce: Callable[..., Tensor]) -> None:
        for round_ in rounds:
            with self.transport.together():
                for message in round_.messages:
                    message.start()
            for message, own, aside in round_.adds:
                message.wait()
                reduce(own, aside, out=own)
                self.transport.added(aside.nbytes)
            for message in round_.others:
                message.wait()
            for message, own, aside in round_.swaps:
                message.wait()
                own.copy_(aside)

    def _run_coded(
        self, rounds: list[CodedRound], reduce: Callable[..., Tensor], wire: Wire, scratch: Tensor
    ) -> None:
        for round_ in rounds:
            with wire.encoding():
                for chunk, encoded, final in round_.packs:
                    wire.pack(chunk, encoded)
                    if final:
                        wire.unpack(encoded, chunk)
            with self.transport.together():
                for message in round_.messages:
                    message.start()
            for message in round_.messages:
                message.wait()
            with wire.decoding():
                for chunk, encoded in round_.adds:
                    values = scratch[: chunk.numel()]
                    wire.unpack(encoded, values)
                    reduce(chunk, values, out=chunk)
                    self.transport.added(values.nbytes)
                for chunk, encoded in round_.places:
                    wire.unpack(encoded, chunk)

    def _rounds_for(self, buffer: Tensor, op: Op) -> list[Any]:
        """The rank's rounds on this buffer; kept, because training steps reuse their buffers."""
        place = (buffer.data_ptr() if buffer.device.type != "meta" else 0, *_like(buffer, op))
        bound = self._bound.get(place)
        if bound is None:
            memory, flat = self._memory(buffer, op), buffer.detach().view(-1)
            while len(self._bound) >= BOUND:
                self._bound.pop(next(iter(self._bound)))
            bound = self._bound[place] = (
                [BoundRound(round_, flat, memory[1], self.transport) for round_ in memory[0]]
                if self._wire is None
                else coded_rounds(self.schedule, flat, memory, self.transport)
            )
        return bound

    def _memory(self, buffer: Tensor, op: Op) -> Any:
        """What all buffers like this one share: the rank's rounds, scratch memory.

        Raises unless all ranks bring the same kind of buffer and the transport can move it.
        """
        key = _like(buffer, op)
        if key not in self._compiled:
            if self.transport.size > 1:
                agree(self.transport, wording(f"{self.schedule.name} {op}", buffer))
            check_tensor(buffer, self.transport)
            self._compiled[key] = (
                self._compile(buffer)
                if self._wire is None
                else CodedMemory(self.schedule, buffer, self._wire, self.transport)
            )
        return self._compiled[key]

    def _compile(self, buffer: Tensor) -> tuple[list[RankRound], Tensor]:
        segment = self._segment_bytes // buffer.element_size()
        rounds = compile_for_rank(self.schedule, self.transport.rank, buffer.numel(), segment)
        aside = max((round_.aside for round_ in rounds), default=0)
        return rounds, self.transport.allocate(aside, buffer.dtype, buffer.device)


def _like(buffer: Tensor, op: Op) -> tuple[Any, ...]:
    return (buffer.numel(), buffer.dtype, buffer.device, buffer.is_contiguous(), op)
