"""Sums of floating-point numbers that do not depend on the order: every engine and every number of partitions gets the same.

A float64 is a whole number times a power of two, so a sum of them is a whole number times a power of two as well. It is kept as
a Python integer in units of 2^-UNIT and rounded once, at the end.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

UNIT = 1200  # below the smallest float64 (2^-1074) times 2^-53
BLOCK = 1 << 24  # so many halves of 27 bits add up exactly in float64's 53
SPLIT = 26


def exact_sum(values: npt.NDArray[Any]) -> int:
    """Of finite float64 numbers, in units of 2^-UNIT."""
    total = 0
    for start in range(0, len(values), BLOCK):
        part, exponent = np.frexp(values[start : start + BLOCK].astype(np.float64, copy=False))
        whole = (part * 2.0**53).astype(np.int64)
        low = int(exponent.min())
        place = exponent - low
        high = np.bincount(place, weights=(whole >> SPLIT).astype(np.float64))
        rest = np.bincount(place, weights=(whole & ((1 << SPLIT) - 1)).astype(np.float64))
        block = sum(((int(h) << SPLIT) + int(r)) << i for i, (h, r) in enumerate(zip(high, rest, strict=True)))
        total += block << (low - 53 + UNIT)
    return total


def mean_and_spread(count: int, total: int, squares: int) -> tuple[float, float]:
    """Mean and standard deviation (of the population) from exact sums of x and of x*x."""
    if count == 0:
        return 0.0, 1.0
    mean = Fraction(total, count << UNIT)
    variance = Fraction(squares, count << UNIT) - mean * mean
    return float(mean), float(max(variance, Fraction(0))) ** 0.5
