"""Symbolic execution proves the result of every schedule for many numbers of ranks and lengths."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.collectives.base import SCHEDULES
from paceline.collectives.schedule import Schedule, Transfer, conflicts, states
from paceline.errors import BadRequest, TransportError
from paceline.registry import collectives
from paceline.transport.base import ring_bytes
from paceline.transport.inproc import Hub, InprocTransport
from paceline.transport.metered import Metered

NAMES = sorted(SCHEDULES)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ranks", [*range(1, 18), 31, 32, 33, 64])
def test_every_contribution_exactly_once(name: str, ranks: int) -> None:
    schedule = SCHEDULES[name](ranks)
    assert conflicts(schedule) == []
    assert len(schedule.phases) == len(schedule.rounds)
    everything = (1,) * ranks
    assert all(chunk == everything for rank in states(schedule)[-1] for chunk in rank)


@given(st.integers(1, 24), st.integers(1, 9))
def test_hierarchical_for_any_group(ranks: int, group: int) -> None:
    schedule = SCHEDULES["hierarchical"](ranks, group=group)
    assert conflicts(schedule) == []
    assert all(chunk == (1,) * ranks for rank in states(schedule)[-1] for chunk in rank)


@given(st.integers(1, 64), st.integers(0, 500))
def test_rounds_and_bytes_are_the_formulas(ranks: int, length: int) -> None:
    log = math.ceil(math.log2(ranks)) if ranks > 1 else 0
    inner = 1 << (ranks.bit_length() - 1)
    whole = 2 * (ranks - 1) * length
    expected = {
        "ring": (2 * (ranks - 1), whole),
        "ring-reduce": (2 * (ranks - 1), whole),
        "tree": (2 * log, whole),
        "star": (2 if ranks > 1 else 0, whole),
        "halving-doubling": (2 * (ranks.bit_length() - 1) + 2 * (ranks > inner), whole),
    }
    for name, (rounds, total) in expected.items():
        schedule = SCHEDULES[name](ranks)
        assert len(schedule.rounds) == rounds, name
        assert sum(schedule.sent(r, length) for r in range(ranks)) == total, name
        assert sum(schedule.received(r, length) for r in range(ranks)) == total, name
    ring = SCHEDULES["ring"](ranks)
    for rank in range(ranks):
        assert (4 * ring.sent(rank, length), 4 * ring.received(rank, length)) == ring_bytes(
            length, 4, rank, ranks
        )


def test_the_ring_starts_with_its_own_chunk() -> None:
    """Rank p first sends chunk p to p + 1."""
    first = SCHEDULES["ring"](5).rounds[0]
    assert [(t.source, t.target, t.start) for t in first] == [(p, (p + 1) % 5, p) for p in range(5)]


@settings(max_examples=40)
@given(
    st.sampled_from([*NAMES, "native"]),
    st.integers(1, 9),
    st.integers(0, 40),
    st.integers(0, 10**6),
    st.sampled_from(["sum", "max", "min"]),
)
def test_executed_on_inproc(name: str, ranks: int, length: int, seed: int, op: str) -> None:
    """The result of a float64 reference, bit-identical on all ranks, with the schedule's bytes."""
    inputs = torch.randn(ranks, length, generator=torch.Generator().manual_seed(seed))

    def body(transport: InprocTransport):
        metered = Metered(transport)
        collective = collectives.build(name, transport=metered)
        buffer = inputs[transport.rank].clone()
        for _ in range(2):  # the second call reuses what the first made
            buffer.copy_(inputs[transport.rank])
            collective.all_reduce(buffer, op)
        return buffer, metered.meter.total("setup")

    results = Hub(ranks, seed).run(body)
    wide = inputs.double()
    expected = wide.sum(0) if op == "sum" else wide.amax(0) if op == "max" else wide.amin(0)
    for rank, (buffer, tally) in enumerate(results):
        torch.testing.assert_close(buffer.double(), expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(buffer, results[0][0])
        if name != "native":
            schedule = SCHEDULES[name](ranks)
            assert tally.sent_bytes == 2 * 4 * schedule.sent(rank, length)
            assert tally.received_bytes == 2 * 4 * schedule.received(rank, length)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8]
)
def test_other_dtypes(dtype: torch.dtype) -> None:
    def body(transport: InprocTransport) -> torch.Tensor:
        buffer = torch.full((10,), transport.rank + 1).to(dtype)
        collectives.build("ring", transport=transport).all_reduce(buffer)
        return buffer

    assert all(r.tolist() == [6] * 10 for r in Hub(3).run(body))


def test_bad_requests() -> None:
    (error,) = Hub(1).run(
        lambda t: collectives.build("ring", transport=t).all_reduce(torch.zeros(4, 4).t()[1:])
    )
    assert isinstance(error, TransportError)
    assert "not contiguous" in str(error)
    with pytest.raises(BadRequest, match="group=0"):
        SCHEDULES["hierarchical"](4, group=0)


def test_a_schedule_that_would_lose_something_is_found_out() -> None:
    def found(*transfers: Transfer) -> list[str]:
        return conflicts(Schedule("made up", 3, 4, (transfers,), ("round",)))

    swap = (Transfer(0, 1, 0, 2, False, 2), Transfer(1, 0, 2, 4, False, 0))
    assert found(*swap) == []
    assert found(swap[0], Transfer(1, 2, 2, 4, False)) == [
        "round 0: rank 1 sends and receives chunk 2",
        "round 0: rank 1 sends and receives chunk 3",
    ]
    assert found(Transfer(0, 2, 0, 1, False), Transfer(1, 2, 0, 1, False)) == [
        "round 0: rank 2 gets chunk 0 twice"
    ]
    assert found(Transfer(0, 2, 0, 1, True), Transfer(1, 2, 0, 1, True)) == []  # both are added
    assert found(Transfer(1, 1, 0, 1, False, 3)) == ["round 0: rank 1 sends to itself"]
