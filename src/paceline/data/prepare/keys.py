"""A 64-bit hash of each row. It decides the row's part (train or test), its shard and its place.

It depends only on the values of the columns as they were read. So it is the same in every engine,
on every machine and in a task that Spark repeats, and copies of a row stay together. Text is hashed
as a polynomial in its bytes, modulo 2^64, for all rows at once. The hash of each column is mixed
with splitmix64 before it is added.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Words = npt.NDArray[np.uint64]
BASE = 0x9E3779B97F4A7C15 | 1
ROWS_AT_ONCE = 1 << 15
MISSING = np.uint64(0x5851F42D4C957F2D)


def row_keys(columns: Sequence[Any], seed: int) -> Words:
    """Return one key for each row of Arrow arrays of equal length."""
    keys = np.full(len(columns[0]), np.uint64(seed & (2**64 - 1)), dtype=np.uint64)
    with np.errstate(over="ignore"):
        for column in columns:
            array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
            if isinstance(array, pa.ChunkedArray):
                array = pa.concat_arrays(array.chunks)
            for start in range(0, len(keys), ROWS_AT_ONCE):
                part = keys[start : start + ROWS_AT_ONCE]
                part[:] = mixed(part + mixed(_hashed(array.slice(start, ROWS_AT_ONCE))))
    return keys


def mixed(words: Words) -> Words:
    """Apply splitmix64: each bit of the input affects all bits of the output."""
    with np.errstate(over="ignore"):
        words = words + np.uint64(0x9E3779B97F4A7C15)
        words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return words ^ (words >> np.uint64(31))


def _hashed(array: Any) -> Words:
    if pa.types.is_string(array.type) or pa.types.is_large_string(array.type):
        hashed = _text(array.cast(pa.large_string()))
    else:
        numbers = pc.fill_null(array.cast(pa.float64()), 0.0).to_numpy(zero_copy_only=False)
        hashed = (numbers + 0.0).view(np.uint64).copy()  # -0.0 + 0.0 is 0.0
    if array.null_count:
        hashed[pc.is_null(array).to_numpy(zero_copy_only=False)] = MISSING
    return hashed


def _text(array: Any) -> Words:
    _, offsets, content = array.buffers()
    ends = np.frombuffer(offsets, np.int64, len(array) + 1, array.offset * 8)
    first, last = int(ends[0]), int(ends[-1])
    size = last - first
    data = np.frombuffer(content, np.uint8, size, first) if size else np.empty(0, np.uint8)
    powers, inverses = _powers(1 << max(10, size.bit_length()))
    sums = np.zeros(size + 1, dtype=np.uint64)
    np.cumsum((data.astype(np.uint64) + np.uint64(1)) * powers[:size], out=sums[1:])
    starts, stops = ends[:-1] - first, ends[1:] - first
    hashed: Words = (sums[stops] - sums[starts]) * inverses[starts]
    return hashed + (stops - starts).astype(np.uint64)


@cache
def _powers(size: int) -> tuple[Words, Words]:
    """Return BASE^j and BASE^-j modulo 2^64, for j = 0 to `size`."""
    inverse = pow(BASE, -1, 2**64)
    both = []
    for base in (BASE, inverse):
        factors = np.full(size + 1, np.uint64(base), dtype=np.uint64)
        factors[0] = 1
        both.append(np.cumprod(factors, dtype=np.uint64))
    return both[0], both[1]
