"""Read MNIST's idx format: a magic number, the sizes, then the bytes."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from paceline.errors import DataCorrupt


def read_idx(path: Path) -> npt.NDArray[np.uint8]:
    """Read `path`, or `path`.gz if that exists instead."""
    try:
        if path.exists():
            raw = path.read_bytes()
        else:
            path = path.with_name(path.name + ".gz")
            raw = gzip.decompress(path.read_bytes())
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataCorrupt(f"{path} is damaged ({error}): fetch it again") from None
    except OSError as error:
        raise DataCorrupt(f"{path} cannot be read: {error.strerror or error}") from None
    if len(raw) < 4 or raw[:3] != b"\x00\x00\x08":
        raise DataCorrupt(
            f"{path} is not an idx file of bytes: its first bytes are {raw[:4].hex() or 'missing'}"
        )
    dims = raw[3]
    sizes = [int.from_bytes(raw[4 + 4 * i : 8 + 4 * i], "big") for i in range(dims)]
    expected = 4 + 4 * dims + int(np.prod(sizes, dtype=np.int64))
    if len(raw) != expected:
        raise DataCorrupt(
            f"{path} is {'truncated' if len(raw) < expected else 'too long'}: {len(raw):,} bytes,"
            f" its header promises {expected:,}. Fetch it again."
        )
    return np.frombuffer(raw, dtype=np.uint8, offset=4 + 4 * dims).reshape(sizes)
