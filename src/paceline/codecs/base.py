"""The interface of codecs: they sum a buffer over all ranks, or send it from one rank to another,
in fewer bytes than the buffer has.

There are four kinds, by how messages are summed:

    none     the message is the buffer
    hop      each hop of a ring or tree decodes the message, adds to it and encodes the sum
             (fp16, bf16, int8)
    gather   messages cannot be added: each rank sends its message to all ranks, and all ranks add
             the messages in rank order (sign, top-k, ...)
    linear   the message is linear in the buffer, so any all-reduce sums it (random-k, PowerSGD)

A message is bytes that contain everything: values, indices, scales. What a codec keeps from step to
step is its `state`, a dictionary that is saved in checkpoints. Its scratch memory is allocated
once.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from paceline.collectives.base import Collective
from paceline.collectives.moves import Sum
from paceline.collectives.operations import Operations
from paceline.collectives.wire import Wire
from paceline.errors import BadRequest, NotFinite
from paceline.transport.base import Transport
from paceline.types import Layout

Kind = Literal["none", "hop", "gather", "linear"]
State = dict[str, Any]
ALIGNMENT = 8  # bytes


@dataclass
class CodecTimer:
    """Measures the seconds of encoding and decoding, and counts messages of varying length."""

    encode_s: float = 0.0
    decode_s: float = 0.0
    messages: int = 0  # the number of messages of varying length
    message_bytes: int = 0  # the total length of those messages
    now: Callable[[], float] = time.perf_counter

    @contextmanager
    def encoding(self) -> Iterator[None]:
        began = self.now()
        yield
        self.encode_s += self.now() - began

    @contextmanager
    def decoding(self) -> Iterator[None]:
        began = self.now()
        yield
        self.decode_s += self.now() - began

    def taken(self) -> tuple[float, float]:
        """Return the seconds of encoding and of decoding since the last call."""
        both, self.encode_s, self.decode_s = (self.encode_s, self.decode_s), 0.0, 0.0
        return both


@dataclass
class Scratch:
    """Scratch memory, allocated once for each purpose; it grows when a longer tensor is needed."""

    _kept: dict[tuple[str, torch.dtype, torch.device], Tensor] = field(default_factory=dict)

    def __call__(
        self,
        purpose: str,
        numel: int,
        dtype: torch.dtype,
        device: torch.device,
        transport: Transport | None = None,
    ) -> Tensor:
        """Memory for a purpose; of `transport`, where it is exchanged."""
        key = (purpose, dtype, device)
        found = self._kept.get(key)
        if found is None or found.numel() < numel:
            found = self._kept[key] = (
                torch.empty(numel, dtype=dtype, device=device)
                if transport is None
                else transport.allocate(numel, dtype, device)
            )
        return found[:numel]


class Codec(ABC):
    """One rank's encoder and decoder; a subclass's dataclass fields are its options."""

    name: ClassVar[str]
    kind: ClassVar[Kind]
    # True: the expected decoded value differs from the value sent, so the codec needs error
    # feedback.
    biased: ClassVar[bool] = False
    lossless: ClassVar[bool] = False
    feedback: bool = False  # whether the user wants error feedback (feedback.py)
    varies: bool = False  # whether messages of one layout differ in length

    def __init__(self) -> None:
        self._prepare()

    def __post_init__(self) -> None:
        self.check()
        self._prepare()

    @property
    def plain(self) -> Codec:
        """The codec without error feedback.

        Senders of *differences* need none: what one message leaves out is still part of the next
        difference.
        """
        return self

    @property
    def wire(self) -> Wire | None:
        """How the codec writes any span of a buffer, where it can (hop codecs)."""
        return None

    def _prepare(self) -> None:
        self.timer, self.scratch = CodecTimer(), Scratch()
        self._operations: dict[int, Operations] = {}

    def check(self) -> None:
        """Raise BadRequest if an option has an invalid value."""
        return

    def start(
        self, layout: Layout, random: torch.Generator, shared_random: torch.Generator
    ) -> State:
        """The codec's initial state for one buffer; checkpoints save the state.

        `random` is this rank's generator; `shared_random` draws the same numbers on all ranks.
        """
        return {}

    def fits(self, layout: Layout) -> None:
        """Raise BadRequest if the options do not fit this model."""
        return

    @abstractmethod
    def message_bytes(self, layout: Layout) -> int:
        """The length of one message in bytes; the largest length, if it varies."""

    @abstractmethod
    def encode(self, values: Tensor, layout: Layout, message: Tensor, state: State) -> int:
        """Write the message (uint8, `message_bytes` long) and return how many bytes are used.

        `values` are not changed.
        """

    @abstractmethod
    def decode(self, message: Tensor, layout: Layout, values: Tensor) -> None:
        """values <- the decoded message."""

    def add(self, message: Tensor, layout: Layout, total: Tensor) -> None:
        """total <- total + the decoded message."""
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
        """Replace the buffer by its (lossy) sum over all ranks, bit-identical on all ranks.

        `sent`, if given, is filled with the decoded form of this rank's own first message.
        """

    def sums(self, layout: Layout, schedule: str, workers: int) -> tuple[Sum, ...]:
        """The schedules that `reduce` runs, as data, for the planner.

        Where the length of messages varies, it is the largest.
        """
        raise BadRequest(
            f"codec {self.name} does not declare what it sends (Codec.sums), so its cost cannot be"
            " predicted; measure it by paceline study"
        )

    def operations(self, transport: Transport) -> Operations:
        """The collective operations over a transport; kept, because they keep their executors."""
        if id(transport) not in self._operations:
            self._operations[id(transport)] = Operations(transport)
        return self._operations[id(transport)]


class GatherCodec(Codec):
    """A codec whose messages cannot be added: each rank sends its message to the P-1 others."""

    kind = "gather"

    def sums(self, layout: Layout, schedule: str, workers: int) -> tuple[Sum, ...]:
        return (Sum("all-gather", workers * self.message_bytes(layout), 1),)

    def reduce(
        self,
        buffer: Tensor,
        layout: Layout,
        collective: Collective,
        state: State,
        sent: Tensor | None = None,
    ) -> None:
        transport, length = collective.transport, self.message_bytes(layout)
        whole = transport.size * length
        gathered = self.scratch("gathered", whole, torch.uint8, buffer.device, transport)
        messages = gathered.view(transport.size, length)
        own = messages[transport.rank]
        with self.timer.encoding():
            used = self.encode(buffer, layout, own, state)
            if sent is not None:
                self.decode(own[:used], layout, sent)
        lengths = [length] * transport.size
        if self.varies:
            self.timer.messages, self.timer.message_bytes = (
                self.timer.messages + 1,
                self.timer.message_bytes + used,
            )
            lengths = gather_uneven(messages, used, transport)
        else:
            self.operations(transport).all_gather(gathered)
        with self.timer.decoding():
            buffer.zero_()
            for message, used in zip(messages, lengths, strict=True):
                self.add(message[:used], layout, buffer)


def gather_uneven(messages: Tensor, used: int, transport: Transport) -> list[int]:
    """Send the used bytes of each rank's row of `messages` to all ranks.

    Returns how many bytes of each row are used.
    """
    lengths = torch.zeros(transport.size, dtype=torch.int64)
    lengths[transport.rank] = used
    transport.control.all_reduce(lengths)
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
            f"codec {name} encodes real floating-point numbers; {first} is"
            f" {str(dtype).removeprefix('torch.')}: use --codec none"
        )


def refuse_nonfinite(probe: Tensor, name: str) -> None:
    """Raise unless `probe` is finite.

    `probe` is anything that is not finite if a value is not: the sum of the values, their scales.
    """
    if probe.numel() and not bool(torch.isfinite(probe).all()):
        raise NotFinite(
            f"codec {name}: the values to send contain NaN or infinity: try a smaller lr, or look"
            " for bad numbers in the data"
        )


def aligned(length: int) -> int:
    """`length` rounded up, so that the next message begins at an aligned address.

    The padding is counted like the rest of the message.
    """
    return -(-length // ALIGNMENT) * ALIGNMENT


def numbers_at(message: Tensor, at: int, count: int, dtype: torch.dtype) -> tuple[Tensor, int]:
    """View `count` numbers of a message from byte `at` on; return them and the byte after them.

    Messages hold their wider numbers first, which keeps all of them aligned.
    """
    end = at + count * dtype.itemsize
    return message[at:end].view(dtype), end
