"""A codec combines a buffer over all ranks, or takes it from one rank to another, in fewer bytes
than the buffer has.

Four kinds, by what can be done with a message on its way:

    none     it is the buffer
    hop      it can be decoded, added to and encoded again at every hop of a ring or tree (fp16, bf16, int8)
    gather   it cannot: everybody's message goes to everybody, and all add them up in the order of the ranks (sign, top-k, ...)
    linear   what travels is linear in the buffer, so it is summed by any all-reduce (random-k, PowerSGD)

A message is bytes with everything in it: values, indices, scales. What a codec remembers from step
to step is its `state`, a dictionary that goes into checkpoints; scratch memory is its own and is
made once.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from paceline.collectives.base import Collective
from paceline.collectives.operations import Operations
from paceline.errors import BadRequest, NotFinite
from paceline.transport.base import Transport
from paceline.types import Layout

Kind = Literal["none", "hop", "gather", "linear"]
State = dict[str, Any]
ALIGNMENT = 8  # bytes


@dataclass
class Clock:
    """Seconds spent in making messages and in reading them; and how long messages were that differ
    in length.
    """

    encode_s: float = 0.0
    decode_s: float = 0.0
    messages: int = 0  # of those that differ in length: how many were made,
    message_bytes: int = 0  # and how long they were together

    @contextmanager
    def encoding(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.encode_s += time.perf_counter() - began

    @contextmanager
    def decoding(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.decode_s += time.perf_counter() - began

    def taken(self) -> tuple[float, float]:
        """Both, since the last time."""
        both, self.encode_s, self.decode_s = (self.encode_s, self.decode_s), 0.0, 0.0
        return both


@dataclass
class Scratch:
    """Memory that is made once for each purpose and grows when it must."""

    _kept: dict[tuple[str, torch.dtype, torch.device], Tensor] = field(default_factory=dict)

    def __call__(
        self, purpose: str, numel: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        key = (purpose, dtype, device)
        found = self._kept.get(key)
        if found is None or found.numel() < numel:
            found = self._kept[key] = torch.empty(numel, dtype=dtype, device=device)
        return found[:numel]


class Codec(ABC):
    """A subclass's dataclass fields are its options. One object serves one rank."""

    name: ClassVar[str]
    kind: ClassVar[Kind]
    biased: ClassVar[bool] = (
        # on average something else arrives than was sent: what was left out must be remembered
        False
    )
    lossless: ClassVar[bool] = False
    feedback: bool = False  # whether what was left out is remembered and sent later (feedback.py)
    varies: bool = False  # whether messages of one layout differ in length

    def __init__(self) -> None:
        self._prepare()

    def __post_init__(self) -> None:
        self.check()
        self._prepare()

    @property
    def plain(self) -> Codec:
        """Without error feedback: for who sends differences from what the other side knows, which
        hold what was left out.
        """
        return self

    def _prepare(self) -> None:
        self.clock, self.scratch = Clock(), Scratch()
        self._operations: dict[int, Operations] = {}

    def check(self) -> None:
        """Refuse options that make no sense."""
        return

    def start(
        self, layout: Layout, random: torch.Generator, shared_random: torch.Generator
    ) -> State:
        """What the codec remembers from step to step for one buffer; saved in checkpoints.

        `random` is this rank's own, `shared_random` draws the same on all ranks.
        """
        return {}

    def fits(self, layout: Layout) -> None:
        """Refuse a model that the options do not fit."""
        return

    @abstractmethod
    def message_bytes(self, layout: Layout) -> int:
        """The length of one message, everything counted; the longest, where it varies."""

    @abstractmethod
    def encode(self, values: Tensor, layout: Layout, message: Tensor, state: State) -> int:
        """Write the message (uint8, `message_bytes` long); returns how much of it is used. `values`
        stay as they are.
        """

    @abstractmethod
    def decode(self, message: Tensor, layout: Layout, values: Tensor) -> None:
        """values <- what the message says."""

    def add(self, message: Tensor, layout: Layout, total: Tensor) -> None:
        """total <- total + what the message says."""
        values = self.scratch("added", total.numel(), total.dtype, total.device)
        self.decode(message, layout, values)
        total.add_(values)

    @abstractmethod
    def reduce(
        self,
        buffer: Tensor,
        layout: Layout,
        collective: Collective,
        state: State,
        sent: Tensor | None = None,
    ) -> None:
        """In place: the sum over all ranks, as far as the codec keeps it; bit-identical on all
        ranks.

        `sent`, where it is given, is filled with what this rank's own first message amounts to.
        """

    def operations(self, transport: Transport) -> Operations:
        """The collectives over a transport; kept, for they keep their plans."""
        if id(transport) not in self._operations:
            self._operations[id(transport)] = Operations(transport)
        return self._operations[id(transport)]


class GatherCodec(Codec):
    """Messages that cannot be added up: all go to all, in P-1 times the bytes of one."""

    kind = "gather"

    def reduce(
        self,
        buffer: Tensor,
        layout: Layout,
        collective: Collective,
        state: State,
        sent: Tensor | None = None,
    ) -> None:
        transport, length = collective.transport, self.message_bytes(layout)
        everybody = self.scratch("gathered", transport.size * length, torch.uint8, buffer.device)
        messages = everybody.view(transport.size, length)
        own = messages[transport.rank]
        with self.clock.encoding():
            used = self.encode(buffer, layout, own, state)
            if sent is not None:
                self.decode(own[:used], layout, sent)
        lengths = [length] * transport.size
        if self.varies:
            self.clock.messages, self.clock.message_bytes = (
                self.clock.messages + 1,
                self.clock.message_bytes + used,
            )
            lengths = exchange_uneven(messages, used, transport)
        else:
            self.operations(transport).all_gather(everybody)
        with self.clock.decoding():
            buffer.zero_()
            for message, used in zip(messages, lengths, strict=True):
                self.add(message[:used], layout, buffer)


def exchange_uneven(messages: Tensor, used: int, transport: Transport) -> list[int]:
    """Row p of `messages` goes to all, as much of it as is used; returns how much that is of each
    row.
    """
    lengths = torch.zeros(transport.size, dtype=torch.int64, device=messages.device)
    lengths[transport.rank] = used
    transport.all_reduce(lengths)
    found: list[int] = lengths.tolist()
    others = [p for p in range(transport.size) if p != transport.rank]
    with transport.together():
        works = [transport.irecv(messages[p, : found[p]], p) for p in others if found[p]]
        works += [transport.isend(messages[transport.rank, :used], p) for p in others if used]
    for work in works:
        work.wait()
    return found


def check_real(layout: Layout, dtype: torch.dtype, name: str) -> None:
    if layout.numel and not dtype.is_floating_point:
        first = layout.slots[0].name if layout.slots else "the model"
        raise BadRequest(
            f"codec {name} takes real numbers; {first} is {str(dtype).removeprefix('torch.')}"
        )


def refuse_nonfinite(probe: Tensor, name: str) -> None:
    """`probe` is anything that is not finite where the values are not: a sum of them,
    their scales.
    """
    if probe.numel() and not bool(torch.isfinite(probe).all()):
        raise NotFinite(
            f"codec {name}: what is to be sent holds NaN or infinity: try a smaller lr, or look for"
            " bad numbers in the data"
        )


def aligned(length: int) -> int:
    """Messages lie back to back, and numbers in them begin where numbers may: a few bytes of
    padding, counted like the rest.
    """
    return -(-length // ALIGNMENT) * ALIGNMENT


def part(message: Tensor, at: int, count: int, dtype: torch.dtype) -> tuple[Tensor, int]:
    """`count` numbers of a message from byte `at` on, and where they end. Long before short keeps
    them aligned.
    """
    end = at + count * dtype.itemsize
    return message[at:end].view(dtype), end
