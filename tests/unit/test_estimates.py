"""Intervals, sample sizes and corrections: against SciPy, and against what they promise."""

import itertools
import math
import random
import statistics
from statistics import fmean, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from paceline.common.estimates import (
    MOST_BLOCKS,
    Prior,
    blocks_needed,
    holm,
    paired,
    t_quantile,
    unpaired,
    variance,
)

numbers = st.lists(st.floats(-5, 5), min_size=3, max_size=30).filter(lambda x: stdev(x) > 1e-3)


@given(numbers)
def test_a_paired_interval_is_that_of_scipy(values: list[float]) -> None:
    found, expected = paired(values), stats.ttest_1samp(values, 0.0)
    assert found is not None
    low, high = expected.confidence_interval(0.95)
    assert (found.low, found.high, found.p) == pytest.approx((low, high, expected.pvalue))


@given(numbers, numbers)
def test_an_unpaired_interval_is_welchs(one: list[float], other: list[float]) -> None:
    found, expected = unpaired(one, other), stats.ttest_ind(one, other, equal_var=False)
    assert found is not None
    low, high = expected.confidence_interval(0.95)
    assert (found.low, found.high, found.p) == pytest.approx((low, high, expected.pvalue))


def test_too_few_numbers_have_no_interval() -> None:
    assert paired([1.0]) is None
    assert unpaired([1.0], [1.0, 2.0]) is None
    assert paired([0.0, 0.0, 0.0]).p == 1.0
    assert paired([0.5, 0.5, 0.5]).p == 0.0


def test_steins_rule_keeps_its_width_and_its_coverage() -> None:
    """2,000 studies of a known truth: the interval made from the pilot's variance is never wider
    than wanted, and it holds the truth in 95% of them.
    """
    luck, half, held = random.Random(0), 0.1, 0
    for _ in range(2000):
        pilot = [luck.gauss(0.3, 0.15) for _ in range(5)]
        n = blocks_needed(pilot, half)
        all_of_them = pilot + [luck.gauss(0.3, 0.15) for _ in range(n - 5)]
        width = t_quantile(4) * stdev(pilot) / math.sqrt(n)
        assert width <= half or n == MOST_BLOCKS
        held += abs(fmean(all_of_them) - 0.3) <= width
    assert 0.935 <= held / 2000 <= 0.965


def test_the_number_of_blocks_ignores_the_mean() -> None:
    pilot = [0.1, 0.2, 0.15, 0.3, 0.05]
    assert blocks_needed(pilot, 0.05) == blocks_needed([x + 7 for x in pilot], 0.05) > 5
    assert blocks_needed([0.1, 0.1001, 0.1, 0.1, 0.1], 0.1) == 5  # at least the pilot


@given(st.lists(st.floats(0, 1), max_size=20))
def test_holm_keeps_the_order_and_is_never_smaller(ps: list[float]) -> None:
    found = holm(ps)
    assert all(p <= q <= 1 for p, q in zip(ps, found, strict=True))
    order = sorted(range(len(ps)), key=lambda i: ps[i])
    assert all(found[a] <= found[b] for a, b in itertools.pairwise(order))


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])


def test_variances_that_are_alike_are_pooled_and_others_are_not() -> None:
    luck = random.Random(0)
    alike = [[luck.gauss(0, 0.1) for _ in range(3)] for _ in range(200)]
    found = Prior.of(alike)
    assert found is not None
    assert found.freedom > 30
    assert found.variance == pytest.approx(0.01, rel=0.2)
    unlike = [[luck.gauss(0, 0.1 * 5 ** (n % 3)) for _ in range(3)] for n in range(200)]
    spread = Prior.of(unlike)
    assert spread is not None
    assert spread.freedom < 5
    assert Prior.of([[1.0], [2.0, 2.0]]) is None
    own, freedom = spread.drawn(1.0, 2)
    assert freedom == pytest.approx(spread.freedom + 2)
    assert min(1.0, spread.variance) <= own <= max(1.0, spread.variance)


@given(st.lists(st.floats(-50, 50), min_size=2, max_size=30))
def test_the_variance_is_that_of_the_library(values: list[float]) -> None:
    assert variance(values) == pytest.approx(statistics.variance(values), rel=1e-9, abs=1e-12)
    assert variance([values[0]] * len(values)) == 0.0
