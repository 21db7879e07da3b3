"""Timetables: proved by symbolic execution, costed by formulas, and equal to PyTorch's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from paceline.errors import BadRequest
from paceline.parallel.later import Later, compute_later
from paceline.parallel.prove import prove, room
from paceline.parallel.timetable import Task, Timetable, alone, listed, timing
from paceline.registry import timetables

NAMES = timetables.names()


def made(name: str, ranks: int, micros: int) -> Timetable:
    built: Timetable = timetables.build(name, ranks=ranks, micros=micros)
    return built


@settings(max_examples=20)
@given(st.integers(1, 16), st.integers(1, 32))
def test_every_timetable_is_proved(ranks: int, micros: int) -> None:
    for name in NAMES:
        whole = -(-micros // ranks) * ranks if name == "interleaved" else micros
        table = made(name, ranks, whole)
        assert prove(table, ranks + 1 if name == "interleaved" else 1).wrong == ()


def test_how_much_room_messages_need() -> None:
    assert [room(made(name, 4, 8)) for name in NAMES] == [1, 1, 2, 1]


@settings(max_examples=20)
@given(st.integers(1, 8), st.integers(1, 16))
def test_idle_shares_are_the_formulas(p: int, m: int) -> None:
    for name in ("gpipe", "1f1b"):
        assert timing(made(name, p, m)).idle == pytest.approx((p - 1) / (m + p - 1))
    for each in (1, 3):
        table = timetables.build(f"interleaved:each={each}", ranks=p, micros=m * p)
        assert timing(table).idle == pytest.approx((p - 1) / (each * m * p + p - 1))
    if m >= p:
        assert timing(made("zero-bubble", p, m)).idle == pytest.approx((p - 1) / (3 * m + p - 1))


@settings(max_examples=20)
@given(st.integers(1, 12), st.integers(1, 24))
def test_how_many_activations_live_at_once(p: int, m: int) -> None:
    assert prove(made("gpipe", p, m)).live == (m,) * p
    assert prove(made("1f1b", p, m)).live == tuple(min(m, p - s) for s in range(p))
    assert max(prove(made("zero-bubble", p, m)).live) == min(m, p)


def test_one_batch_keeps_one_worker_busy_at_a_time() -> None:
    table = alone(range(4))
    assert prove(table).holds
    assert timing(table).idle == pytest.approx(3 / 4)
    assert listed(table.ranks[3]) == "3F0 3B0"


@given(st.data())
def test_a_damaged_timetable_is_found_out(data: st.DataObject) -> None:
    """Two tasks of a rank that depend on each other are swapped, one is lost, or made twice."""
    name = data.draw(st.sampled_from(["gpipe", "1f1b", "zero-bubble"]))
    p, m = data.draw(st.integers(2, 5)), data.draw(st.integers(2, 6))
    table = made(name, p, m)
    rank = data.draw(st.integers(0, p - 1))
    tasks = list(table.ranks[rank])
    kind = data.draw(st.sampled_from(["swap", "lose", "repeat", "move"]))
    at = data.draw(st.integers(0, len(tasks) - 1))
    if kind == "swap":
        first = tasks.index(Task("F", rank, 0))
        second = tasks.index(Task("B", rank, 0))
        tasks[first], tasks[second] = tasks[second], tasks[first]
    elif kind == "lose":
        del tasks[at]
    elif kind == "repeat":
        tasks.insert(at, tasks[at])
    ranks = [*table.ranks]
    ranks[rank] = tuple(tasks)
    if kind == "move":
        ranks[rank], ranks[rank - 1] = ranks[rank][1:], (*ranks[rank - 1], ranks[rank][0])
    assert not prove(replace(table, ranks=tuple(ranks)), 100).holds


def test_a_circle_is_found_out() -> None:
    """Rank 0 wants the first backward pass before rank 1 has seen the second forward pass."""
    waits = (Task("F", 0, 0), Task("B", 0, 0), Task("F", 0, 1), Task("B", 0, 1))
    needs = (Task("F", 1, 0), Task("F", 1, 1), Task("B", 1, 0), Task("B", 1, 1))
    table = Timetable("circle", 2, 2, (waits, needs))
    assert prove(table, 100).wrong[0] == "rank 0 waits forever before 0B0"
    with pytest.raises(BadRequest, match="wait for each other forever"):
        timing(table)


def test_interleaved_wants_groups_of_micro_batches() -> None:
    with pytest.raises(BadRequest, match=r"micro=6 is not a multiple of 4"):
        made("interleaved", 4, 6)


@pytest.mark.parametrize(("p", "m", "each"), [(2, 4, 2), (4, 8, 2), (3, 6, 3)])
def test_pytorch_interleaves_in_the_same_order(p: int, m: int, each: int) -> None:
    """GPipe's and 1F1B's executed orders are nowhere as data in PyTorch."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    compute = getattr(schedules, "_get_1f1b_rank_ops", None)
    if compute is None:
        pytest.skip("this PyTorch has no _get_1f1b_rank_ops")
    table = timetables.build(f"interleaved:each={each}", ranks=p, micros=m)
    for rank in range(p):
        warm = min(m * each, (each - 1) * p + 2 * (p - 1 - rank))
        ops = compute(
            each, p, warm, m * each - warm, warm, rank,
            lambda i, rank=rank: (i // p) % each * p + rank,
            lambda i, rank=rank, warm=warm: (each - 1 - (i - warm) // p % each) * p + rank,
        )  # fmt: skip
        theirs = [
            f"{op.stage_index}{'F' if op.computation_type.name == 'FORWARD' else 'B'}"
            f"{op.microbatch_index}"
            for op in ops
            if op is not None
        ]
        assert theirs == [str(task) for task in table.ranks[rank]]


# --- weight gradients apart


def test_products_are_made_once_and_later() -> None:
    """B makes no gradient of a weight; W makes one product for each layer and micro-batch."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 4 * 4, 5)
    ).double()
    inputs = torch.randn(6, 1, 8, 8, dtype=torch.float64)
    targets = torch.randint(0, 5, (6,))
    nn.functional.cross_entropy(model(inputs), targets).backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    later = Later()
    assert compute_later(model, later) == 2
    later.active = True
    waiting = []
    for rows in (slice(0, 2), slice(2, 6)):
        loss = nn.functional.cross_entropy(model(inputs[rows]), targets[rows])
        (loss * len(targets[rows]) / 6).backward()
        waiting.append(later.taken())
    assert all(p.grad is None for p in model.parameters())
    assert [len(products) for products in waiting] == [2, 2]
    assert later.products == 0
    for products in waiting:
        later.make(products)
    assert later.products == 4
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert parameter.grad is not None
        assert torch.allclose(parameter.grad, gradient, atol=1e-14)
    later.active = False
    assert torch.equal(model(inputs), model(inputs.clone()))
    assert later.waiting == []
