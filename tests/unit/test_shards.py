"""Shards: each sample exactly once per epoch, equal numbers of steps, and exact resumption."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.data.shards import Cursor, Cuts, GlobalShards, Shards, StaticShards, split

sizes = st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any).map(tuple)


def epoch_of(shards: Shards, cursor: Cursor) -> tuple[list[list[int]], int, Cursor]:
    """Return each worker's samples from `cursor` to the end of its epoch.

    Also return the number of steps, and the cursor of the next epoch.
    """
    seen: list[list[int]] = [[] for _ in shards.batch_sizes]
    epoch, steps = cursor.epoch, 0
    while cursor.epoch == epoch:
        counts = shards.counts(cursor)
        for worker in range(len(seen)):
            part = shards.take(cursor, worker).tolist()
            assert len(part) == counts[worker]
            seen[worker] += part
        cursor = shards.advance(cursor)
        steps += 1
    return seen, steps, cursor


@given(st.integers(1, 80), sizes, st.integers(0, 2**40), st.sampled_from(["global", "static"]))
def test_every_sample_once_per_epoch(
    n: int, batch_sizes: tuple[int, ...], seed: int, kind: str
) -> None:
    shards = (
        GlobalShards(n, batch_sizes, seed)
        if kind == "global"
        else StaticShards(n, batch_sizes, seed)
    )
    cursor = Cursor()
    for _ in range(2):
        seen, steps, cursor = epoch_of(shards, cursor)
        assert sorted(i for own in seen for i in own) == list(range(n))
        assert steps == shards.steps_per_epoch


@given(st.integers(1, 80), sizes, st.integers(0, 99))
def test_global_shards_follow_serial(n: int, batch_sizes: tuple[int, ...], seed: int) -> None:
    """The union of the workers' slices, in order, is the serial batch of the same step."""
    many, serial = GlobalShards(n, batch_sizes, seed), GlobalShards(n, (sum(batch_sizes),), seed)
    cursor = Cursor()
    for _ in range(2 * many.steps_per_epoch):
        union = torch.cat([many.take(cursor, w) for w in range(len(batch_sizes))])
        assert torch.equal(union, serial.take(cursor, 0))
        assert many.advance(cursor) == serial.advance(cursor)
        cursor = many.advance(cursor)


@given(st.integers(1, 100), st.integers(1, 8))
def test_static_chunks_are_the_plain_ones(n: int, workers: int) -> None:
    shards = StaticShards(n, (4,) * workers)
    for p, chunk in enumerate(shards.chunks):
        assert chunk.tolist() == list(range(p * n // workers, (p + 1) * n // workers))


def test_static_chunks_stay_and_are_shuffled_anew() -> None:
    shards = StaticShards(40, (5, 5), seed=3)
    first, _, cursor = epoch_of(shards, Cursor())
    second, _, _ = epoch_of(shards, cursor)
    assert [sorted(s) for s in first] == [sorted(s) for s in second]
    assert first != second


def test_by_label_gives_each_worker_its_own_classes() -> None:
    labels = torch.tensor([3, 1, 0, 2] * 10)
    shards = StaticShards(40, (5, 5), labels=labels)
    assert [sorted(set(labels[c].tolist())) for c in shards.chunks] == [[0, 1], [2, 3]]


@given(
    st.integers(2, 60),
    sizes,
    sizes,
    st.integers(0, 9),
    st.integers(0, 12),
    st.sampled_from(["global", "static"]),
)
def test_resuming_with_other_workers_misses_and_repeats_nothing(
    n: int, before: tuple[int, ...], after: tuple[int, ...], seed: int, stop: int, kind: str
) -> None:
    make = GlobalShards if kind == "global" else StaticShards
    old, new = make(n, before, seed), make(n, after, seed)
    cursor, seen = Cursor(), []
    for _ in range(stop % old.steps_per_epoch):
        seen += [i for w in range(len(before)) for i in old.take(cursor, w).tolist()]
        cursor = old.advance(cursor)
    rest, _, _ = epoch_of(new, new.restore(old.state(cursor)))
    assert sorted(seen + [i for own in rest for i in own]) == list(range(n))


@given(
    st.integers(0, 1000),
    st.lists(st.floats(0, 10), min_size=1, max_size=8).filter(lambda w: sum(w) > 1e-3),
)
def test_split_is_whole_and_fair(total: int, weights: list[float]) -> None:
    parts = split(total, weights)
    assert sum(parts) == total
    for part, weight in zip(parts, weights, strict=True):
        assert abs(part - total * weight / sum(weights)) <= 1 + 1e-6


@given(st.integers(2, 60), st.lists(st.floats(0.1, 10), min_size=1, max_size=6))
def test_no_worker_gets_a_lone_row(rows: int, weights: list[float]) -> None:
    """Batch norm cannot take one row."""
    counts = Cuts(no_lone_row=True).split(rows, weights)
    assert sum(counts) == rows
    assert 1 not in counts


def test_no_batch_of_one_row_is_left_for_batch_norm() -> None:
    """Five rows in batches of two: the last batch has three, and no batch has one."""
    cuts = Cuts(no_lone_row=True)
    for rows, size, expected in (
        (5, 2, [(0, 2), (2, 5)]),
        (7, 3, [(0, 3), (3, 5), (5, 7)]),
        (6, 5, [(0, 4), (4, 6)]),
        (6, 2, [(0, 2), (2, 4), (4, 6)]),
        (8, 3, [(0, 3), (3, 6), (6, 8)]),
        (3, 1, [(0, 1), (1, 2), (2, 3)]),
    ):
        assert cuts.steps(rows, size) == len(expected), (rows, size)
        found = [cuts.bounds(rows, size, position) for position in range(len(expected))]
        assert found == expected, (rows, size)
