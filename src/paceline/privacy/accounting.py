"""What has been spent: epsilon for a delta, from the noise, the sampling rate and the number of
steps.

Computed by Google's `dp-accounting`: by privacy loss distributions (`pld`), and by Rényi
divergences (`rdp`) beside it. Both are upper bounds, and the first is the tighter one but where
epsilon is small and its cells are coarse: `pld` takes the least of both. A line of the account
says: a Gaussian mechanism with this noise (in units of the clip norm), of a Poisson sample at this
rate (1: everybody), so many times. Lines of several sessions, or of other settings, compose.

Two data sets are neighbours when they have the same places, and one of them has a person where the
other has a blank: the number of samples and who is in which shard are public.
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
FINEST, COARSEST, SLACK = (
    1e-4,
    1e-3,
    3e-3,
)  # of the loss: cells of its distribution, so small that epsilon is hardly rounded up
DIGITS = 4  # noise is found to so many, and rounded up


@dataclass(frozen=True)
class Spent:
    """One line of the account."""

    noise: float
    rate: float
    times: int

    def described(self) -> dict[str, Any]:
        return asdict(self)


def epsilon_of(lines: Iterable[Spent], delta: float, accountant: Accountant = "pld") -> float:
    """The smallest epsilon that is known to hold with this delta."""
    counted = tuple(line for line in lines if line.times)
    return _epsilon(counted, delta, accountant) if counted else 0.0


@functools.lru_cache(maxsize=512)
def _epsilon(lines: tuple[Spent, ...], delta: float, accountant: Accountant) -> float:
    if accountant == "pld":
        bound = _epsilon(lines, delta, "rdp")
        wide = (
            min(line.noise for line in lines) < LEAST_NOISE
        )  # so wide a distribution takes too long
        return bound if wide else min(bound, _by(lines, delta, "pld"))
    return _by(lines, delta, accountant)


def _by(lines: tuple[Spent, ...], delta: float, accountant: Accountant) -> float:
    """One accountant's bound."""
    library = _library()
    logging.getLogger("absl").setLevel(
        logging.ERROR
    )  # orders that do not converge are left out, which is right and no news
    if accountant == "rdp":
        account = library.rdp.RdpAccountant()
    else:
        cell = min(COARSEST, max(FINEST, math.sqrt(SLACK / sum(line.times for line in lines))))
        account = library.pld.PLDAccountant(value_discretization_interval=cell)
    for line in lines:
        event = library.GaussianDpEvent(line.noise)
        if line.rate < 1.0:
            event = library.PoissonSampledDpEvent(line.rate, event)
        account.compose(event, line.times)
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
    """The least noise (to four digits) with which so many steps keep within epsilon."""
    _library()
    from scipy.optimize import brentq

    def over(log_noise: float, way: Accountant = accountant) -> float:
        """Above 0: more is spent than epsilon."""
        spent = epsilon_of((*before, Spent(math.exp(log_noise), rate, times)), delta, way)
        return math.log(max(spent, 1e-9) / epsilon)  # with very much noise it is 0

    if before and epsilon_of(before, delta, accountant) >= epsilon:
        raise BadRequest(f"the budget epsilon={epsilon:g} is spent already")
    least, most = math.log(LEAST_NOISE), math.log(MOST_NOISE)
    if over(most, "rdp") > 0:
        raise BadRequest(
            f"epsilon={epsilon:g}: no noise up to {MOST_NOISE:g} keeps {times:,} steps within it:"
            " allow more"
        )
    if over(least, "rdp") <= 0:
        return LEAST_NOISE
    high = (
        brentq(lambda x: over(x, "rdp"), least, most, xtol=1e-2) + 1e-2
    )  # quick, and a little too careful
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
    """How many of the `wanted` steps keep within epsilon."""

    def fits(times: int) -> bool:
        return epsilon_of((*before, Spent(noise, rate, times)), delta, accountant) <= epsilon

    if fits(wanted):
        return wanted
    low, high = 0, wanted  # low fits, high does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
