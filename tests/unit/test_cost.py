"""The cost function against the formulas of the literature, and rules against schedules."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.collectives.base import SCHEDULES, schedule_of
from paceline.collectives.cost import Cost, cost, loads, sent_shares
from paceline.collectives.schedule import Schedule, Transfer
from paceline.errors import BadRequest
from paceline.registry import operations

ALPHA, BETA, GAMMA, N = 50e-6, 8e-9, 1e-10, 4e6
RANKS = [1, 2, 3, 4, 5, 8, 13, 16]


def seconds(name: str, ranks: int) -> float:
    return cost(schedule_of(name, ranks), N, ALPHA, BETA, GAMMA).seconds


@pytest.mark.parametrize("p", RANKS)
def test_known_formulas(p: int) -> None:
    log = math.ceil(math.log2(p))
    formulas = {
        "ring": 2 * (p - 1) * (ALPHA + N * BETA / p) + (p - 1) / p * N * GAMMA,
        "ring-reduce": 2 * (p - 1) * (ALPHA + N * BETA) + (p - 1) * N * GAMMA,
        "tree": 2 * log * (ALPHA + N * BETA) + log * N * GAMMA,
        "star": (2 * ALPHA + 2 * (p - 1) * N * BETA + (p - 1) * N * GAMMA) if p > 1 else 0,
        "broadcast": log * (ALPHA + N * BETA),
        "reduce-scatter": (p - 1) * (ALPHA + N * BETA / p + N * GAMMA / p),
        "all-gather": (p - 1) * (ALPHA + N * BETA / p),
    }
    if p == 1 << log:
        formulas["halving-doubling"] = (
            2 * log * ALPHA + 2 * (p - 1) / p * N * BETA + (p - 1) / p * N * GAMMA
        )
    for name, expected in formulas.items():
        assert seconds(name, p) == pytest.approx(expected, rel=1e-12), name


def test_bytes_are_those_of_the_schedule() -> None:
    for name in SCHEDULES:
        for p in RANKS:
            schedule = schedule_of(name, p)
            length = 720720 * 16  # every number of chunks up to 16 divides it
            found = cost(schedule, length, 0, 0)
            assert found.rounds == len(schedule.rounds)
            assert found.sent_bytes == pytest.approx([schedule.sent(r, length) for r in range(p)])
            assert found.busiest_bytes == max(found.sent_bytes)
    assert sent_shares(schedule_of("ring", 4)) == [1.5] * 4
    assert cost(schedule_of("ring", 1), N, 1.0, 1.0) == Cost(0, (0.0,), 0.0)


@given(
    st.sampled_from(["ring", "tree", "halving-doubling", "star", "hierarchical:group=3"]),
    st.integers(2, 16),
    st.floats(0, 1e-2),
    st.floats(0, 1e-6),
    st.floats(0, 1e-6),
)
def test_a_round_lasts_as_long_as_its_slowest_rank(
    name: str, ranks: int, alpha: float, beta: float, gamma: float
) -> None:
    """Against a sum that looks at every rank, without the loads that are left out."""
    schedule = schedule_of(name, ranks)
    total = 0.0
    for transfers in schedule.rounds:
        slowest = 0.0
        for rank in range(ranks):
            sent = sum(t.stop - t.start for t in transfers if t.source == rank)
            got = [t for t in transfers if t.target == rank]
            received = sum(t.stop - t.start for t in got)
            added = sum(t.stop - t.start for t in got if t.adds)
            taken = (max(sent, received) * beta + added * gamma) * N / schedule.chunks
            slowest = max(slowest, taken)
        total += alpha + slowest
    assert cost(schedule, N, alpha, beta, gamma).seconds == pytest.approx(total, rel=1e-9)


def test_loads_that_another_rank_exceeds_are_left_out() -> None:
    busy = (Transfer(0, 1, 0, 1, True), Transfer(2, 3, 0, 4, False), Transfer(4, 5, 0, 1, False))
    schedule = Schedule("mixed", 6, 4, (busy,), ("mixed",))
    assert loads(schedule) == [[(1.0, 0.0), (0.25, 0.25)]]


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_costs_of_nonsense(bad: float) -> None:
    with pytest.raises(BadRequest, match=r"latency_s=.*0 or more"):
        cost(schedule_of("ring", 4), 1e6, bad, 1e-9)


@pytest.mark.parametrize(
    "name", ["ring", "all-gather", "reduce-scatter", "stepwise", "stepwise:start=2"]
)
@pytest.mark.parametrize("ranks", [3, 4, 5, 8])
def test_the_rule_in_words_is_the_schedule(name: str, ranks: int) -> None:
    """Evaluates "rank p sends chunk (p - r) mod P to rank (p + 1) mod P" for every p and r."""
    schedule = schedule_of(name, ranks)
    phases = schedule.phases
    for number, (phase, transfers) in enumerate(zip(phases, schedule.rounds, strict=True)):
        rule = schedule.rules[phase]
        found = re.search(
            r"rank p sends chunk \(([pr0-9+ -]+)\) mod P to rank \(([pr0-9+ -]+)\) mod P, which"
            r" (adds|replaces)",
            rule,
        )
        assert found, rule
        r = number - phases.index(phase)
        said = {
            (
                p,
                eval(found[2], {"p": p, "r": r}) % ranks,
                eval(found[1], {"p": p, "r": r}) % ranks,
                found[3] == "adds",
            )
            for p in range(ranks)
        }
        assert said == {(t.source, t.target, t.start, t.adds) for t in transfers}


def test_every_phase_of_every_algorithm_has_a_rule() -> None:
    for name in [*SCHEDULES, *operations.names(), "stepwise:chunked=false", "hierarchical:group=3"]:
        for ranks in (2, 5, 8):
            schedule = schedule_of(name, ranks)
            assert set(schedule.phases) <= set(schedule.rules), name
