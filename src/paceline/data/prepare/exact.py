"""Sums of floating-point numbers that do not depend on the order: every engine and every number of
partitions gets the same.

A float64 is a whole number of 53 bits times a power of two, so a sum of them, or of their squares,
is a whole number times a power of two as well. It is kept as a Python integer in units of 2^-UNIT
and rounded once, at the end: a spread is right even where it is tiny beside the mean (seconds since
1970, say).
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

UNIT = 2400  # below the square of the smallest float64
BLOCK = 1 << 24  # so many numbers of at most 27 bits add up exactly in float64's 53
HALF = 27

Whole = npt.NDArray[np.int64]


def exact_sums(values: npt.NDArray[Any], times: npt.NDArray[Any]) -> tuple[int, int]:
    """Of finite float64 numbers and of their squares, each counted so many times, in units of
    2^-UNIT.

    (a 2^27 + b)^2 = a^2 2^54 + 2 a b 2^27 + b^2, and every part of it is exact.
    """
    if not len(values):
        return 0, 0
    if int(times.sum()) > BLOCK:
        middle = len(values) // 2
        if not middle:
            raise ValueError(f"one value {int(times[0]):,} times")
        parts = (
            exact_sums(values[:middle], times[:middle]),
            exact_sums(values[middle:], times[middle:]),
        )
        return parts[0][0] + parts[1][0], parts[0][1] + parts[1][1]
    part, exponent = np.frexp(values.astype(np.float64, copy=False))
    whole, exponent = (part * 2.0**53).astype(np.int64), exponent.astype(np.int64) - 53
    high, low = whole >> HALF, whole & ((1 << HALF) - 1)
    products = ((high * high, 2 * HALF), (high * low, HALF + 1), (low * low, 0))
    squares = sum(_by_place(product, 2 * exponent + shift, times) for product, shift in products)
    return _by_place(whole, exponent, times), squares


def _by_place(whole: Whole, exponent: Whole, times: npt.NDArray[Any]) -> int:
    """The sum of whole * 2^exponent: numbers of one exponent are added in two halves, none of which
    is ever rounded.
    """
    low = int(exponent.min())
    place = exponent - low
    high = np.bincount(place, weights=(whole >> HALF).astype(np.float64) * times)
    rest = np.bincount(place, weights=(whole & ((1 << HALF) - 1)).astype(np.float64) * times)
    total = sum(
        ((int(h) << HALF) + int(r)) << i for i, (h, r) in enumerate(zip(high, rest, strict=True))
    )
    return total << (low + UNIT)


def mean_and_spread(count: int, total: int, squares: int) -> tuple[float, float]:
    """Mean and standard deviation (of the population) from exact sums of x and of x*x."""
    if count == 0:
        return 0.0, 1.0
    mean = Fraction(total, count << UNIT)
    variance = Fraction(squares, count << UNIT) - mean * mean
    root = math.isqrt((variance.numerator << (2 * UNIT)) // variance.denominator)
    return float(mean), float(Fraction(root, 1 << UNIT))
