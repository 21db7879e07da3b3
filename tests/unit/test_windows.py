"""Shards on disk: each row once per epoch, own host first, bounded memory, exact resumption."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.test_shards import epoch_of

from paceline.data.sharded import RowSpan
from paceline.data.shards import Cursor
from paceline.data.windows import WindowShards, arrangement, assign

sizes = st.lists(st.integers(0, 6), min_size=1, max_size=5).filter(any).map(tuple)
hosts = st.lists(st.sampled_from(["a", "b", "c"]), min_size=5, max_size=5)
lengths = st.lists(
    st.tuples(st.integers(1, 20), st.sampled_from(["a", "b", "z"])), min_size=1, max_size=6
)


def spans_of(parts: list[tuple[int, str]]) -> list[RowSpan]:
    spans, at = [], 0
    for rows, host in parts:
        spans.append(RowSpan(at, at + rows, host))
        at += rows
    return spans


@given(lengths, sizes, hosts, st.integers(1, 30), st.integers(0, 99))
def test_every_row_once_per_epoch(parts, batch_sizes, on, window, seed) -> None:  # type: ignore[no-untyped-def]
    spans = spans_of(parts)
    shards = WindowShards(spans, batch_sizes, seed, window, tuple(on[: len(batch_sizes)]))
    cursor = Cursor()
    for _ in range(2):
        seen, steps, cursor = epoch_of(shards, cursor)
        assert sorted(i for own in seen for i in own) == list(range(spans[-1].stop))
        assert steps == shards.steps_per_epoch


@given(
    lengths,
    sizes,
    hosts,
    st.integers(1, 30),
    st.integers(0, 99),
    sizes,
    hosts,
    st.integers(1, 30),
    st.data(),
)
def test_an_epoch_that_others_finish(
    parts, first, on, window, seed, second, then_on, then_window, data
) -> None:  # type: ignore[no-untyped-def]
    """Two interruptions, each resumed by the same or other workers: each row exactly once."""
    spans = spans_of(parts)
    shards = WindowShards(spans, first, seed, window, tuple(on[: len(first)]))
    cursor, seen = Cursor(), []
    for again, there, bytes_ in (
        (first, on, window),
        (second, then_on, then_window),
        (second, then_on, then_window),
    ):
        for _ in range(data.draw(st.integers(0, 4))):
            if cursor.epoch:
                break
            seen += [
                i for w in range(len(shards.batch_sizes)) for i in shards.take(cursor, w).tolist()
            ]
            cursor = shards.advance(cursor)
        state = shards.state(cursor)
        shards = WindowShards(spans, again, seed, bytes_, tuple(there[: len(again)]))
        cursor = shards.restore(state)
    if cursor.epoch == 0:
        seen += [i for own in epoch_of(shards, cursor)[0] for i in own]
    assert sorted(seen) == list(range(spans[-1].stop))


@given(lengths, sizes, st.integers(1, 30), st.integers(0, 99), st.data())
def test_the_same_workers_go_on_exactly(parts, batch_sizes, window, seed, data) -> None:  # type: ignore[no-untyped-def]
    spans = spans_of(parts)
    one, other = (WindowShards(spans, batch_sizes, seed, window) for _ in range(2))
    cursor = Cursor()
    for _ in range(data.draw(st.integers(0, 6))):
        cursor = one.advance(cursor)
    assert other.restore(one.state(cursor)) == cursor
    for worker in range(len(batch_sizes)):
        assert torch.equal(one.take(cursor, worker), other.take(cursor, worker))


def test_a_worker_takes_its_own_host_first() -> None:
    spans = [RowSpan(0, 10, "a"), RowSpan(10, 20, "b"), RowSpan(20, 30, "b")]
    assert assign(spans, (1, 1, 1), ("b", "a", "b")) == [[(10, 20)], [(0, 10)], [(20, 30)]]
    # then by rows
    assert assign(spans, (1, 1), ("b", "a")) == [[(10, 20), (20, 25)], [(0, 10), (25, 30)]]
    assert assign(spans, (1, 1), ()) == [[(0, 10), (10, 15)], [(15, 20), (20, 30)]]
    assert arrangement(spans, (1, 1, 1), ("b", "a", "b")).tolist() == [
        *range(10, 20),
        *range(10),
        *range(20, 30),
    ]


def test_a_batch_stays_in_a_window() -> None:
    shards = WindowShards([RowSpan(0, 1000)], (10,), 0, 100)
    windows = {
        tuple(sorted({i // 100 for i in shards.take(Cursor(0, s), 0).tolist()})) for s in range(100)
    }
    assert windows == {(w,) for w in range(10)}
    order = [shards.take(Cursor(0, s), 0).tolist()[0] // 100 for s in range(0, 100, 10)]
    assert order != sorted(order)  # windows are shuffled, too
    assert order != [shards.take(Cursor(1, s), 0).tolist()[0] // 100 for s in range(0, 100, 10)]
