"""A profile: what one or two workers cost, measured.

It is made by measuring (measure/), from the record of a run (from_run.py), or from a table that was
measured elsewhere (`Profile.from_measurements`). stored.py writes and reads its file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch

from paceline.errors import BadRequest
from paceline.planning.accuracy import Accuracy
from paceline.planning.compute import Compute
from paceline.planning.fit import Line
from paceline.planning.measurements import Row, read_rows, steps_of
from paceline.replica.buckets import LEAST_BYTES, cut
from paceline.types import Layout, Slot

Source = Literal["measured", "record", "measurements"]


@dataclass(frozen=True)
class TensorShape:
    """One trained tensor."""

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Model:
    """The model as far as messages depend on it."""

    name: str
    parameters: int  # all, also those that are not trained
    dtype_bytes: int  # of one number
    # The trained tensors, in the order of the flat gradients; empty: not known.
    tensors: tuple[TensorShape, ...] = ()

    @property
    def trained(self) -> int:
        """The numbers that are trained, and exchanged."""
        return sum(t.numel for t in self.tensors) if self.tensors else self.parameters

    @property
    def gradient_bytes(self) -> int:
        return self.trained * self.dtype_bytes

    @property
    def layout(self) -> Layout:
        """The layout of the gradients; one long vector where the tensors are not known."""
        slots, at = [], 0
        for tensor in self.tensors or (TensorShape("parameters", (self.parameters,)),):
            stride = torch.empty(tensor.shape, device="meta").stride()
            slots.append(Slot(tensor.name, tensor.shape, tuple(stride), at, tensor.numel, 0))
            at += tensor.numel
        return Layout(tuple(slots))


@dataclass(frozen=True)
class CodecCost:
    """What a codec's work takes, as lines over the bytes of the numbers that are encoded.

    hop: encoding and decoding one chunk. gather: encoding the whole gradients, and adding one
    worker's message to the sum. linear: all encoding and all decoding of one exchange. Only hop
    codecs encode parts, so the others have no fixed seconds.
    """

    name: str
    kind: str
    message_bytes: int  # of the whole gradients
    encode: Line
    decode: Line


@dataclass(frozen=True)
class LinkCost:
    """What moving bytes between two processes of this machine takes, by one transport.

    A message of n bytes arrives after latency_s + n * s_per_byte. The CPU seconds are those of a
    rank's process, with the time in which it polls for a message.
    """

    transport: str
    latency_s: float
    s_per_byte: float
    s_per_byte_added: float  # to add an arrived byte to the rank's own buffer
    cpu_s_per_message_sent: float
    cpu_s_per_byte_sent: float
    cpu_s_per_message_received: float
    cpu_s_per_byte_received: float
    points: tuple[tuple[int, float], ...] = ()  # bytes and median seconds that were measured

    @property
    def line(self) -> Line:
        return Line(self.latency_s, self.s_per_byte)

    @property
    def worst(self) -> tuple[int, float]:
        """The measured message that the line misses most: its bytes, and by which share."""
        misses = ((size, self.line.at(size) / seconds - 1) for size, seconds in self.points)
        return max(misses, key=lambda miss: abs(miss[1]), default=(0, 0.0))


@dataclass(frozen=True)
class Memory:
    """The most memory that a worker held, with pages that it shares with other workers."""

    peak_bytes: int
    batch_size: int


@dataclass(frozen=True)
class Made:
    """When, where and with which versions the profile was made."""

    date: str  # UTC, ISO 8601
    machine: Mapping[str, Any]  # cpu, cores, memory_bytes, system; empty: not known
    versions: Mapping[str, str]


@dataclass(frozen=True)
class Profile:
    """What one or two workers cost."""

    source: Source
    model: Model
    data: str
    made: Made
    compute: Compute
    codecs: tuple[CodecCost, ...] = ()
    memory: Memory | None = None
    links: tuple[LinkCost, ...] = ()
    measurements: tuple[Row, ...] = ()  # rows with several workers, for a fit of the network
    accuracy: Accuracy | None = None  # steps to an accuracy; None: not measured
    missing: tuple[str, ...] = ()  # what it cannot say, in sentences

    def codec(self, name: str) -> CodecCost | None:
        """Return what a codec costs; None where that was not measured."""
        return next((c for c in self.codecs if c.name == name), None)

    def link(self, transport: str) -> LinkCost | None:
        return next((link for link in self.links if link.transport == transport), None)

    def buckets(self, least_bytes: int = LEAST_BYTES) -> list[tuple[int, float]]:
        """Return each bucket's bytes, and when it is ready as a fraction of the backward pass.

        In the order in which overlap exchanges them: a bucket waits for all before it.
        """
        tensors, ready = self.model.tensors, self.compute.ready
        when = {t.name: r for t, r in zip(tensors, ready, strict=True)} if ready else {}
        found, latest = [], 0.0
        for slots in cut(self.model.layout, self.model.dtype_bytes, least_bytes):
            latest = max(latest, *(when.get(slot.name, 1.0) for slot in slots))
            found.append((self.model.dtype_bytes * sum(s.numel for s in slots), latest))
        return found

    @classmethod
    def from_measurements(cls, path: str | Path, parameters: int, dtype_bytes: int = 4) -> Profile:
        """Make a profile of a table that was measured elsewhere, with the number of parameters.

        Computing is fitted as a + b * batch_size to the rows with one worker. The other rows are
        kept as they are: the network's cost is not fitted here.
        """
        if parameters < 1:
            raise BadRequest(f"parameters={parameters}: the model has 1 or more")
        rows = read_rows(path)
        steps, missing = steps_of(rows, Path(path).name)
        return cls(
            source="measurements",
            model=Model("unknown", parameters, dtype_bytes),
            data="unknown",
            made=Made(now(), {}, {"paceline": version("paceline")}),
            compute=Compute(steps),
            measurements=tuple(row for row in rows if row.workers > 1),
            missing=(
                *missing,
                "The shapes of the tensors are not known: the messages of powersgd are computed as"
                " if the parameters were one vector, which it does not compress.",
                "Codecs, links, memory and buckets were not measured.",
            ),
        )

    def without(self, sentence: str) -> Profile:
        """Return the profile with one more sentence on what it cannot say."""
        return replace(self, missing=(*self.missing, sentence))


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def portable(choice: Any) -> str:
    """Return a choice (of a model, of data) by name, without options that are paths."""
    said = str(choice or "unknown") if not isinstance(choice, type) else choice.__name__
    if "<" in said:  # an object without a name
        return "own"
    return said.partition(":")[0] if "/" in said or "\\" in said else said
