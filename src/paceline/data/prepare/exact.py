"""Exact sums of floating-point numbers, the same for every engine and number of partitions.

A float64 is an integer of 53 bits times a power of two, so a sum of float64 numbers or of their
squares is an integer times a power of two, too. The sum is a Python integer in units of 2^-UNIT and
is rounded once, at the end. So a standard deviation is right even if it is tiny compared to the
mean (for example seconds since 1970).
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

UNIT = 2400  # 2^-UNIT is below the square of the smallest float64
MOST_TERMS = 1 << 24  # float64 adds so many integers of 27 bits exactly
HALF = 27  # bits

Whole = npt.NDArray[np.int64]


def exact_sums(values: npt.NDArray[Any], times: npt.NDArray[Any]) -> tuple[int, int]:
    """Return the sum of finite numbers and the sum of their squares, in units of 2^-UNIT.

    Value i counts `times[i]` times. (a 2^27 + b)^2 = a^2 2^54 + 2 a b 2^27 + b^2, and every term
    is exact.
    """
    if not len(values):
        return 0, 0
    if int(times.sum()) > MOST_TERMS:
        middle = len(values) // 2
        if not middle:
            raise ValueError(f"one value occurs {int(times[0]):,} times in one batch")
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
    """Return the sum of whole * 2^exponent.

    Numbers of equal exponent are added in two halves of HALF bits, so that no sum is rounded.
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
    """Return mean and population standard deviation from exact sums of x and of x*x."""
    if count == 0:
        return 0.0, 1.0
    mean = Fraction(total, count << UNIT)
    variance = Fraction(squares, count << UNIT) - mean * mean
    root = math.isqrt((variance.numerator << (2 * UNIT)) // variance.denominator)
    return float(mean), float(Fraction(root, 1 << UNIT))
