"""Operations other than all-reduce (broadcast, gather, half a ring, ...), proved and run."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.collectives.algorithms.stepwise import counts
from paceline.collectives.base import choose, schedule_of
from paceline.collectives.execute import compile_for_rank
from paceline.collectives.operations import Operations
from paceline.collectives.schedule import Schedule, conflicts, states
from paceline.errors import BadRequest, UnknownName
from paceline.registry import operations
from paceline.transport.inproc import Hub, InprocTransport

RANKS = [*range(1, 18), 31, 32, 33, 48]


def only(rank: int, ranks: int) -> tuple[int, ...]:
    return tuple(int(r == rank) for r in range(ranks))


def ends_right(name: str, schedule: Schedule, root: int) -> bool:
    """The law of each operation, on the state after the last round."""
    ranks, end = schedule.ranks, states(schedule)[-1]
    everything = (1,) * ranks
    laws = {
        "broadcast": lambda: all(row == [only(root, ranks)] for row in end),
        "reduce": lambda: end[root] == [everything],
        "gather": lambda: end[root] == [only(p, ranks) for p in range(ranks)],
        "scatter": lambda: all(end[p][p] == only(root, ranks) for p in range(ranks)),
        "reduce-scatter": lambda: all(end[p][p] == everything for p in range(ranks)),
        "all-gather": lambda: all(row == [only(p, ranks) for p in range(ranks)] for row in end),
        "all-to-all": lambda: all(row == [only(p, ranks) for p in range(ranks)] for row in end),
        "stepwise": lambda: all(
            sorted(counts(schedule, p)) == list(range(1, ranks + 1)) for p in range(ranks)
        ),
    }
    return bool(laws[name]())


@pytest.mark.parametrize("name", operations.names())
@pytest.mark.parametrize("ranks", RANKS)
def test_every_operation_ends_as_it_should(name: str, ranks: int) -> None:
    for root in (
        {0, ranks - 1, ranks // 2} if name in ("broadcast", "reduce", "gather", "scatter") else {0}
    ):
        schedule = schedule_of(f"{name}:root={root}" if root else name, ranks)
        assert conflicts(schedule) == []
        assert ends_right(name, schedule, root)


@given(st.integers(1, 64), st.integers(0, 200))
def test_rounds_and_elements_are_the_formulas(ranks: int, length: int) -> None:
    log = math.ceil(math.log2(ranks)) if ranks > 1 else 0
    others = length - length // ranks  # chunk 0 is the root's own
    expected = {
        "broadcast": (log, (ranks - 1) * length),
        "reduce": (log, (ranks - 1) * length),
        "gather": (min(1, ranks - 1), others),
        "scatter": (min(1, ranks - 1), others),
        "reduce-scatter": (ranks - 1, (ranks - 1) * length),
        "all-gather": (ranks - 1, (ranks - 1) * length),
        "stepwise": (ranks - 1, (ranks - 1) * length),
    }
    for name, (rounds, sent) in expected.items():
        schedule = schedule_of(name, ranks)
        assert len(schedule.rounds) == rounds, name
        assert sum(schedule.sent(r, length) for r in range(ranks)) == sent, name


@given(st.integers(1, 64), st.data())
def test_stepwise_holds_the_stated_prefix(ranks: int, data: st.DataObject) -> None:
    """At rank p, chunk c has visited exactly the ranks c + start, c + start + 1, ..., p."""
    start = data.draw(st.integers(0, ranks - 1))
    for rank, row in enumerate(states(schedule_of(f"stepwise:start={start}", ranks))[-1]):
        for chunk, holding in enumerate(row):
            heard = (rank - chunk - start) % ranks + 1
            assert [r for r in range(ranks) if holding[r]] == sorted(
                (chunk + start + i) % ranks for i in range(heard)
            )
    for rank, (holding,) in enumerate(
        states(schedule_of(f"stepwise:chunked=false,start={start}", ranks))[-1]
    ):
        heard = (rank - start) % ranks + 1
        assert [r for r in range(ranks) if holding[r]] == sorted(
            (start + i) % ranks for i in range(heard)
        )


@settings(max_examples=40)
@given(
    st.integers(1, 7),
    st.integers(0, 30),
    st.integers(0, 10**6),
    st.sampled_from(["sum", "max", "min"]),
)
def test_operations_on_inproc(ranks: int, length: int, seed: int, op: str) -> None:
    inputs = torch.randn(
        ranks, length, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    root = seed % ranks
    combined = {"sum": inputs.sum(0), "max": inputs.amax(0), "min": inputs.amin(0)}[op]
    bounds = [(p * length // ranks, (p + 1) * length // ranks) for p in range(ranks)]

    def body(transport: InprocTransport) -> None:
        me, do = transport.rank, Operations(transport)
        own = slice(*bounds[me])

        def fresh() -> torch.Tensor:
            return inputs[me].clone()

        torch.testing.assert_close(do.broadcast(fresh(), root), inputs[root])
        torch.testing.assert_close(do.reduce_scatter(fresh(), op), combined[own])
        torch.testing.assert_close(do.scatter(fresh(), root), inputs[root][own])
        gathered = torch.cat([inputs[p][slice(*bounds[p])] for p in range(ranks)])
        torch.testing.assert_close(do.all_gather(fresh()), gathered)
        reduced, collected = do.reduce(fresh(), root, op), do.gather(fresh(), root)
        if me == root:
            torch.testing.assert_close(reduced, combined)
            torch.testing.assert_close(collected, gathered)
        whole = torch.arange(3.0 * ranks) + 100 * me
        swapped = torch.cat([torch.arange(3.0) + 3 * me + 100 * p for p in range(ranks)])
        torch.testing.assert_close(do.all_to_all(whole), swapped)
        weights = [float(1 + p) for p in range(ranks)]
        mean = sum(w * x for w, x in zip(weights, inputs, strict=True)) / sum(weights)
        torch.testing.assert_close(do.mean(fresh(), weights[me]), mean)

    assert Hub(ranks, seed).run(body) == [None] * ranks


def test_bytes_travel_too() -> None:
    def body(transport: InprocTransport) -> bytes:
        buffer = torch.zeros(6, dtype=torch.uint8)
        Operations(transport).chunk(buffer).copy_(
            torch.tensor([65 + transport.rank, 97 + transport.rank])
        )
        return bytes(Operations(transport).all_gather(buffer).tolist())

    assert Hub(3).run(body) == [b"AaBbCc"] * 3


def test_segments_change_nothing() -> None:
    schedule = schedule_of("ring", 3)
    whole = compile_for_rank(schedule, 0, 1000)
    cut = compile_for_rank(schedule, 0, 1000, segment=100)
    assert [sum(high - low for _, low, high in s.adds) for s in whole] == [
        sum(high - low for _, low, high in s.adds) for s in cut
    ]
    assert len(cut[0].adds) == 4
    assert cut[-1].places == whole[-1].places  # what is only put in its place is not cut


def test_bad_requests() -> None:
    with pytest.raises(UnknownName, match="all-gather"):
        schedule_of("all-gathr", 3)
    with pytest.raises(BadRequest, match="root=5"):
        schedule_of("broadcast:root=5", 3)
    for start in (99, -1):
        with pytest.raises(BadRequest, match=f"start={start}: a rank, 0 to 3"):
            schedule_of(f"stepwise:start={start}", 4)
    errors = Hub(2).run(lambda t: Operations(t).all_to_all(torch.zeros(3)))
    assert all(isinstance(e, BadRequest) for e in errors)
    errors = Hub(2).run(lambda t: Operations(t).mean(torch.zeros(3), weight=0.0))
    assert all("the ranks' weights add up to 0; the sum must be above 0" in str(e) for e in errors)


def test_auto_takes_one_choice_and_keeps_the_buffer() -> None:
    def body(transport: InprocTransport):
        auto = choose("auto", transport)
        buffer = torch.full((10,), float(transport.rank))
        auto.prepare(buffer)
        kept = buffer.clone()
        auto.all_reduce(buffer)
        return kept.tolist(), buffer.tolist(), auto.choices

    results = Hub(3).run(body)
    assert [r[0] for r in results] == [[float(p)] * 10 for p in range(3)]
    assert all(r[1:] == ([3.0] * 10, {"40": "native"}) for r in results)
