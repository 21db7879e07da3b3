"""One safetensors file that several processes fill: each writes the slices that it holds.

The file's format is a length (8 bytes), a header in JSON with the place of every tensor, and their
bytes. Who knows all names, types and shapes knows all places, and needs no other process's tensors.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from paceline.errors import DataCorrupt

NAMES = {
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
TYPES = {name: dtype for dtype, name in NAMES.items()}
ALIGNED = 8  # bytes

Spans = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Layout:
    """Where each tensor is in the file."""

    header: bytes  # with its length in front

    @classmethod
    def of(cls, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> Layout:
        """Lay out whole tensors: those with the largest numbers first, so that all are aligned."""
        order = sorted(tensors, key=lambda name: (-tensors[name][0].itemsize, name))
        content: dict[str, Any] = {}
        at = 0
        for name in order:
            dtype, shape = tensors[name]
            end = at + dtype.itemsize * math.prod(shape)
            content[name] = {
                "dtype": NAMES[dtype],
                "shape": list(shape),
                "data_offsets": [at, end],
            }
            at = end
        text = json.dumps(content, separators=(",", ":")).encode()
        text += b" " * (-len(text) % ALIGNED)
        return cls(len(text).to_bytes(8, "little") + text)

    def places(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.header[8:])
        return found

    @property
    def size_bytes(self) -> int:
        ends = (place["data_offsets"][1] for place in self.places().values())
        return len(self.header) + max(ends, default=0)

    def create(self, path: Path) -> None:
        """Make the file, with its header and room for all tensors."""
        with open(path, "wb") as file:
            file.write(self.header)
            file.truncate(self.size_bytes)

    def is_at(self, path: Path) -> bool:
        """Whether this process sees the file that another one has made."""
        try:
            with open(path, "rb") as file:
                return file.read(len(self.header)) == self.header
        except OSError:
            return False

    def write(self, path: Path, tensors: Iterable[tuple[str, int, Spans | None, Tensor]]) -> None:
        """Write slices: of a named tensor, these spans of a dimension (None: all of it).

        Bytes are written, and no page is mapped: two hosts that map one page of a network file
        system would undo each other's work.
        """
        places = self.places()
        with open(path, "r+b") as file:
            for name, dim, spans, tensor in tensors:
                place = places[name]
                begin = len(self.header) + place["data_offsets"][0]
                for at, content in _stretches(place["shape"], dim, spans, tensor):
                    os.pwrite(file.fileno(), content, begin + at)
            os.fsync(file.fileno())


def _stretches(
    shape: Sequence[int], dim: int, spans: Spans | None, tensor: Tensor
) -> Iterator[tuple[int, memoryview]]:
    """The stretches of bytes that a slice is made of, with their places in the whole tensor."""
    if not tensor.numel():
        return
    plain = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
    content = plain.numpy().data
    if spans is None:
        yield 0, content
        return
    inner = math.prod(shape[dim + 1 :]) * tensor.element_size()
    at = 0
    for row in range(math.prod(shape[:dim])):
        for low, high in spans:
            length = (high - low) * inner
            yield (row * shape[dim] + low) * inner, content[at : at + length]
            at += length


class Slices:
    """Reads parts of the tensors of a file: only what is asked for comes into memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = safe_open(path, framework="pt")
            self.names = frozenset(self._file.keys())
            self.metadata: dict[str, str] = self._file.metadata() or {}
        except (OSError, SafetensorError) as error:
            raise DataCorrupt(f"{path} cannot be read: {error}") from None

    def whole(self, name: str) -> Tensor:
        found: Tensor = self._file.get_tensor(name)
        return found

    def rows(self, name: str, dim: int, low: int, high: int) -> Tensor:
        """The span [low, high) of one dimension."""
        index = (slice(None),) * dim + (slice(low, high),)
        found: Tensor = self._file.get_slice(name)[index]
        return found
