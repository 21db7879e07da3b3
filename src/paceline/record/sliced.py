"""One safetensors file that several processes fill: each writes the slices that it holds.

The file's format is a length (8 bytes), a header in JSON with the place of every tensor, and their
bytes. Who knows all names, types and shapes knows all places, and needs no other process's tensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
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

    def write(self, path: Path, name: str, put: Callable[[Tensor], None]) -> None:
        """Let `put` write into a whole tensor, which is mapped into memory."""
        place = self.places()[name]
        low, high = place["data_offsets"]
        if low == high:
            return
        mapped = np.memmap(path, np.uint8, "r+", offset=len(self.header) + low, shape=(high - low,))
        put(torch.from_numpy(mapped).view(TYPES[place["dtype"]]).view(place["shape"]))
        mapped.flush()


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
