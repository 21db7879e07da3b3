"""Epsilon for a delta, from the noise, the sampling rate and the number of steps.

Google's `dp-accounting` computes it, by privacy loss distributions (`pld`) and by Rényi divergences
(`rdp`). Both are upper bounds. `pld` is usually tighter, except where epsilon is small and the
cells of its distribution are coarse, so `pld` here means the smaller of the two.

`Spent` stands for a Gaussian mechanism with this noise (in units of the clip norm) on a Poisson
sample of this rate (1: all samples), so many times. Those of several sessions compose.

Two data sets are neighbours if one has a person in a place where the other has a blank. So the
number of samples, and which shard a sample is in, are public.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from paceline.errors import BadRequest

Accountant = Literal["pld", "rdp"]

INSTALL = "pip install 'paceline[privacy]'"
LEAST_NOISE, MOST_NOISE = 0.2, 1e4
# Cells of the distribution of the privacy loss; small enough that epsilon is hardly rounded up.
FINEST, COARSEST, SLACK = 1e-4, 1e-3, 3e-3
DIGITS = 4  # of the noise that is found for an epsilon; it is rounded up


@dataclass(frozen=True)
class Spent:
    """One mechanism, applied several times."""

    noise: float
    rate: float
    times: int

    def described(self) -> dict[str, Any]:
        return asdict(self)


def epsilon_of(spent: Iterable[Spent], delta: float, accountant: Accountant = "pld") -> float:
    """Return the smallest epsilon that is known to hold with this delta."""
    counted = tuple(one for one in spent if one.times)
    return _epsilon(counted, delta, accountant) if counted else 0.0


@functools.lru_cache(maxsize=512)
def _epsilon(spent: tuple[Spent, ...], delta: float, accountant: Accountant) -> float:
    if accountant == "pld":
        bound = _epsilon(spent, delta, "rdp")
        # With less noise the distribution is so wide that it takes too long to compute.
        wide = min(one.noise for one in spent) < LEAST_NOISE
        return bound if wide else min(bound, _by(spent, delta, "pld"))
    return _by(spent, delta, accountant)


def _by(spent: tuple[Spent, ...], delta: float, accountant: Accountant) -> float:
    """Return one accountant's bound."""
    library = _library()
    # The library warns that it leaves out orders that do not converge, as it should.
    logging.getLogger("absl").setLevel(logging.ERROR)
    if accountant == "rdp":
        account = library.rdp.RdpAccountant()
    else:
        cell = min(COARSEST, max(FINEST, math.sqrt(SLACK / sum(one.times for one in spent))))
        account = library.pld.PLDAccountant(value_discretization_interval=cell)
    for one in spent:
        event = library.GaussianDpEvent(one.noise)
        if one.rate < 1.0:
            event = library.PoissonSampledDpEvent(one.rate, event)
        account.compose(event, one.times)
    return float(account.get_epsilon(delta))


def _library() -> Any:
    try:
        import dp_accounting
        import dp_accounting.pld
        import dp_accounting.rdp
    except ImportError:
        raise BadRequest(
            f"privacy needs the package dp-accounting, which computes epsilon: {INSTALL}"
        ) from None
    return dp_accounting


def noise_for(
    epsilon: float,
    delta: float,
    rate: float,
    times: int,
    accountant: Accountant = "pld",
    before: tuple[Spent, ...] = (),
) -> float:
    """Return the least noise (to four digits) with which so many steps keep within epsilon."""
    _library()
    from scipy.optimize import brentq

    def over(log_noise: float, way: Accountant = accountant) -> float:
        """Return the log of what is spent over epsilon: above 0 it is too much."""
        spent = epsilon_of((*before, Spent(math.exp(log_noise), rate, times)), delta, way)
        return math.log(max(spent, 1e-9) / epsilon)  # with much noise `spent` is 0

    if before and epsilon_of(before, delta, accountant) >= epsilon:
        raise BadRequest(f"the budget epsilon={epsilon:g} is spent already")
    least, most = math.log(LEAST_NOISE), math.log(MOST_NOISE)
    if over(most, "rdp") > 0:
        raise BadRequest(
            f"epsilon={epsilon:g}: no noise up to {MOST_NOISE:g} keeps {times:,} steps within it:"
            " use a larger epsilon or fewer steps"
        )
    if over(least, "rdp") <= 0:
        return LEAST_NOISE
    # A first bracket from `rdp`, which is fast and slightly too large.
    high = brentq(lambda x: over(x, "rdp"), least, most, xtol=1e-2) + 1e-2
    low = high - 0.15
    while over(high) > 0:
        low, high = high, high + 0.1
    while low > least and over(low) <= 0:
        low, high = low - 0.3, low
    found = (
        brentq(over, max(low, least), high, xtol=10.0**-DIGITS / 4)
        if over(max(low, least)) > 0
        else max(low, least)
    )
    noise = _rounded_up(math.exp(found))
    while over(math.log(noise)) > 0:
        noise = _rounded_up(noise * (1 + 10.0**-DIGITS))
    return noise


def _rounded_up(noise: float) -> float:
    unit = 10.0 ** (math.floor(math.log10(noise)) + 1 - DIGITS)
    return round(math.ceil(noise / unit - 1e-9) * unit, 12)


def most_times(
    epsilon: float,
    delta: float,
    noise: float,
    rate: float,
    wanted: int,
    accountant: Accountant,
    before: tuple[Spent, ...] = (),
) -> int:
    """Return how many of the `wanted` steps keep within epsilon."""

    def fits(times: int) -> bool:
        return epsilon_of((*before, Spent(noise, rate, times)), delta, accountant) <= epsilon

    if fits(wanted):
        return wanted
    low, high = 0, wanted  # low fits, high does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
