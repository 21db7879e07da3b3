"""Rows of images that are split: every transfer is proved, and every exchange has its adjoint."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, combinations, pairwise

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from paceline.errors import BadRequest
from paceline.parallel.cut import balanced
from paceline.parallel.exchange import Exchange
from paceline.parallel.rows import (
    Rows,
    Span,
    Window,
    even,
    halo,
    proved,
    transposed,
)
from paceline.transport.inproc import Hub, InprocTransport

WINDOWS = st.builds(
    Window,
    kernel=st.integers(1, 7),
    stride=st.integers(1, 4),
    padding=st.integers(0, 3),
    dilation=st.integers(1, 3),
    ceil=st.booleans(),
)


def cut_unevenly(rows: int, weights: list[float]) -> tuple[Span, ...]:
    """Rows in spans in proportion to weights; some may be empty."""
    ends = [round(rows * sum_ / sum(weights)) for sum_ in accumulate(weights, initial=0.0)]
    return tuple(pairwise(ends))


@given(st.integers(1, 60), st.integers(1, 16), WINDOWS, st.data())
def test_every_movement_is_proved(
    rows: int, ranks: int, window: Window, data: st.DataObject
) -> None:
    outputs = window.outputs(rows)
    assume(outputs > 0)
    shares = st.lists(st.floats(0, 3), min_size=ranks, max_size=ranks)
    own, made = (
        cut_unevenly(count, data.draw(shares.filter(lambda w: sum(w) > 0)))
        for count in (rows, outputs)
    )
    movement = halo(own, [window.needs(span, rows) for span in made])
    assert proved(movement, rows) == ()
    back = transposed(movement)
    assert transposed(back) == movement
    assert sum(t.high - t.low for t in back.transfers) == sum(b - a for a, b in movement.held)


def test_a_damaged_movement_is_found_out() -> None:
    movement = halo(even(12, 3), [Window(3, padding=1).needs(s, 12) for s in even(12, 3)])
    assert proved(movement, 12) == ()
    lost = replace(movement, transfers=movement.transfers[1:])
    assert "does not get row" in proved(lost, 12)[0]
    wrong = replace(movement, transfers=(*movement.transfers, Rows(2, 0, 0, 1)))
    assert any("which it does not own" in said for said in proved(wrong, 12))
    twice = replace(movement, owned=((0, 5), (4, 8), (8, 12)))
    assert "row 4 has 2 owners" in proved(twice, 12)


@given(st.integers(1, 40), WINDOWS)
def test_outputs_are_pytorchs(rows: int, window: Window) -> None:
    window = replace(window, padding=min(window.padding, window.kernel // 2))
    image = torch.zeros(1, 1, rows, 1)
    layer = nn.MaxPool2d(
        (window.kernel, 1), (window.stride, 1), (window.padding, 0), (window.dilation, 1),
        ceil_mode=window.ceil,
    )  # fmt: skip
    try:
        expected = layer(image).shape[2]
    except RuntimeError:
        expected = 0
    assert max(0, window.outputs(rows)) == expected


def test_the_first_layer_of_the_cnn() -> None:
    """28 rows, 5 x 5 without padding, three workers."""
    window = Window(5)
    first = halo(even(28, 3), [window.needs(span, 28) for span in even(window.outputs(28), 3)])
    assert first.owned == ((0, 9), (9, 18), (18, 28))
    assert first.held == ((0, 12), (8, 20), (16, 28))
    assert [first.sent(rank) for rank in range(3)] == [1, 5, 2]
    assert Window(5).outputs(4) == 0


# --- <F x, y> = <x, F* y>


def inner(ones: list[Tensor], others: list[Tensor]) -> float:
    return sum(float((a * b).sum()) for a, b in zip(ones, others, strict=True))


@settings(max_examples=25)
@given(st.integers(2, 4), st.integers(4, 14), WINDOWS, st.integers(0, 999))
def test_moving_rows_back_is_the_adjoint(ranks: int, rows: int, window: Window, seed: int) -> None:
    outputs = window.outputs(rows)
    assume(outputs > 0)
    movement = halo(even(rows, ranks), [window.needs(s, rows) for s in even(outputs, ranks)])
    random = torch.Generator().manual_seed(seed)

    def drawn(spans: tuple[tuple[int, int], ...]) -> list[Tensor]:
        shapes = [(2, 1, high - low, 3) for low, high in spans]
        return [torch.randn(s, generator=random, dtype=torch.float64) for s in shapes]

    x, y = drawn(movement.owned), drawn(movement.held)

    def body(transport: InprocTransport) -> tuple[Tensor, Tensor]:
        own = x[transport.rank].clone().requires_grad_()
        moved = Exchange(transport).moved(own, movement)
        moved.backward(y[transport.rank])
        assert own.grad is not None
        return moved.detach(), own.grad

    made = Hub(ranks, seed).run(body)
    forward, back = [m[0] for m in made], [m[1] for m in made]
    assert inner(forward, y) == pytest.approx(inner(x, back))


@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_and_copies_are_each_others_adjoints(ranks: int) -> None:
    """`copied` maps one tensor to equal copies, `summed` maps parts to their one sum."""
    random = torch.Generator().manual_seed(ranks)
    x = torch.randn(5, generator=random, dtype=torch.float64)
    parts = [torch.randn(5, generator=random, dtype=torch.float64) for _ in range(ranks)]
    spans = even(5, ranks)

    def body(transport: InprocTransport) -> dict[str, Tensor]:
        exchange, me = Exchange(transport), transport.rank
        one = x.clone().requires_grad_()
        exchange.copied(one).backward(parts[me])
        own = parts[me].clone().requires_grad_()
        total = exchange.summed(own)
        total.backward(x)
        low, high = spans[me]
        piece = x[low:high].clone().requires_grad_()
        stacked = exchange.stacked(piece, 0, spans)
        stacked.backward(x)
        over = parts[me].clone().requires_grad_()
        exchange.over_all(over).backward(parts[me])
        found = {"copied": one.grad, "total": total.detach(), "summed": own.grad}
        found |= {"stacked": stacked.detach(), "piece": piece.grad, "over": over.grad}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    total = torch.stack(parts).sum(0)
    for rank, found in enumerate(Hub(ranks).run(body)):
        low, high = spans[rank]
        assert torch.allclose(found["copied"], total)  # <F x, y> = <x, sum of y>
        assert torch.allclose(found["total"], total)
        assert torch.equal(found["summed"], x)
        assert torch.equal(found["stacked"], x)
        assert torch.equal(found["piece"], x[low:high])
        assert torch.allclose(found["over"], total)


# --- where a model is cut


@given(
    st.lists(st.floats(0.001, 5), min_size=1, max_size=9),
    st.integers(1, 5),
    st.lists(st.booleans(), min_size=9, max_size=9),
)
def test_the_dearest_stage_is_as_cheap_as_it_can_be(
    costs: list[float], stages: int, drawn: list[bool]
) -> None:
    trained = drawn[: len(costs)]
    if sum(trained) < stages:
        with pytest.raises(BadRequest, match="a stage needs one"):
            balanced(costs, stages, trained)
        return

    def dearest(cuts: tuple[int, ...]) -> float:
        ends = [0, *cuts, len(costs)]
        runs = list(pairwise(ends))
        if not all(any(trained[a:b]) for a, b in runs):
            return float("inf")
        return max(sum(costs[a:b]) for a, b in runs)

    best = min(dearest(cuts) for cuts in combinations(range(1, len(costs)), stages - 1))
    assert dearest(balanced(costs, stages, trained)) == pytest.approx(best)
