"""The baton: repeatable interleavings, deadlocks detected at once, peers that have ended."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import PeerLost, TransportError
from paceline.transport.base import ring_bytes
from paceline.transport.inproc import Hub, InprocTransport
from paceline.transport.metered import Meter, Metered


@given(st.integers(1, 6), st.integers(0, 50), st.integers(1, 20))
def test_all_reduce_gives_every_rank_the_same_sum(size: int, seed: int, length: int) -> None:
    def body(transport: InprocTransport) -> list[float]:
        tensor = torch.arange(length, dtype=torch.float64) * (transport.rank + 1)
        transport.all_reduce(tensor)
        low = torch.tensor([transport.rank])
        transport.all_reduce(low, "min")
        transport.broadcast(high := torch.tensor([transport.rank * 7]), root=size - 1)
        return [*tensor.tolist(), int(low), int(high)]

    results = Hub(size, seed).run(body)
    total = size * (size + 1) / 2
    assert all(r == [*[i * total for i in range(length)], 0, 7 * (size - 1)] for r in results)


def chatter(transport: InprocTransport) -> list[int]:
    """Each rank sends to the next one; return the ranks in the order of their turns."""
    shared.append(transport.rank)
    for _ in range(3):
        transport.send(torch.tensor([transport.rank]), (transport.rank + 1) % transport.size)
        shared.append(transport.rank)
    got = torch.zeros(1, dtype=torch.int64)
    for _ in range(3):
        transport.recv(got, (transport.rank - 1) % transport.size)
    return [int(got), int(torch.randint(1000, (1,))), random.randrange(1000)]


shared: list[int] = []


def interleaving(seed: int) -> tuple[list[int], list[list[int]]]:
    shared.clear()
    torch.manual_seed(0)
    random.seed(0)
    results = Hub(3, seed).run(chatter)
    return list(shared), results


def test_the_same_seed_gives_the_same_interleaving() -> None:
    assert interleaving(4) == interleaving(4)
    assert len({tuple(interleaving(seed)[0]) for seed in range(12)}) > 3, (
        "the seed should choose who is next"
    )


def test_random_states_are_each_ranks_own() -> None:
    def body(transport: InprocTransport) -> list[int]:
        torch.manual_seed(transport.rank)
        drawn = []
        for _ in range(3):
            drawn.append(int(torch.randint(10**6, (1,))))
            transport.barrier()
        return drawn

    results = Hub(3, 1).run(body)
    for rank, drawn in enumerate(results):
        torch.manual_seed(rank)
        assert drawn == [int(torch.randint(10**6, (1,))) for _ in range(3)]


def test_the_callers_random_state_is_left_alone() -> None:
    torch.manual_seed(9)
    expected = torch.get_rng_state()
    Hub(2).run(lambda transport: torch.randn(5))
    assert torch.equal(torch.get_rng_state(), expected)


def test_a_deadlock_is_an_error_at_once() -> None:
    results = Hub(2).run(lambda transport: transport.recv(torch.zeros(1), 1 - transport.rank))
    assert all(isinstance(r, (TransportError, PeerLost)) for r in results)
    assert any("deadlock" in str(r) for r in results)


@given(st.integers(0, 30))
def test_a_rank_that_dies_is_peer_lost_for_the_others(seed: int) -> None:
    def body(transport: InprocTransport) -> None:
        for step in range(5):
            if (transport.rank, step) == (1, 2):
                raise RuntimeError("died")
            transport.all_reduce(torch.ones(2))

    results = Hub(3, seed).run(body)
    assert str(results[1]) == "died"
    assert all(isinstance(results[r], PeerLost) and results[r].rank == 1 for r in (0, 2))


def test_messages_to_and_from_the_dead() -> None:
    def body(transport: InprocTransport) -> None:
        if transport.rank == 0:
            return
        for call in (transport.recv, transport.send):
            with pytest.raises(PeerLost, match="rank 0"):
                call(torch.zeros(1), 0)

    assert Hub(2, 3).run(body) == [None, None]


def test_tensors_that_differ_are_an_error_on_all_ranks() -> None:
    results = Hub(3).run(lambda t: t.all_reduce(torch.zeros(2 + t.rank)))
    assert all(isinstance(r, TransportError) and "different tensors" in str(r) for r in results)


def test_groups_have_ranks_of_their_own() -> None:
    def body(transport: InprocTransport) -> tuple[int, int, float]:
        members = [2, 0] if transport.rank != 1 else [1]
        group = transport.group(members)
        value = torch.tensor([float(transport.rank + 1)])
        group.all_reduce(value)
        return group.rank, group.size, float(value)

    assert Hub(3).run(body) == [(1, 2, 4.0), (0, 1, 2.0), (0, 2, 4.0)]
    for bad in ([0, 0], [0, 7], [1]):
        (result,) = Hub(1).run(lambda t, bad=bad: t.group(bad))
        assert isinstance(result, TransportError)


@given(st.integers(2, 5), st.integers(0, 50))
def test_groups_of_the_same_members_do_not_hear_each_other(size: int, seed: int) -> None:
    """A fast rank may call the second group while a slow one is still in the first group's call."""

    def body(transport: InprocTransport) -> tuple[float, float]:
        first, second = torch.ones(1), torch.ones(3)
        transport.all_reduce(first)
        transport.group(range(size)).all_reduce(second)
        return float(first), float(second.sum())

    assert Hub(size, seed=seed).run(body) == [(size, 3 * size)] * size


@given(st.integers(1, 12), st.integers(0, 200))
def test_ring_bytes_add_up(size: int, length: int) -> None:
    both = [ring_bytes(length, 4, rank, size) for rank in range(size)]
    assert sum(s for s, _ in both) == sum(r for _, r in both) == 2 * (size - 1) * 4 * length
    for rank in range(size):
        assert both[rank][0] == both[(rank + 1) % size][1], "what one sends, the next receives"


def test_the_meter_counts_by_phase_operation_and_peer() -> None:
    def body(transport: InprocTransport) -> Meter:
        metered = Metered(transport)
        metered.broadcast(torch.zeros(10))
        with metered.meter.during("train"):
            metered.all_reduce(torch.zeros(6))
            metered.group([0, 1]).all_reduce(torch.zeros(6))
            if transport.rank == 0:
                metered.send(torch.zeros(3), 1)
            else:
                metered.recv(torch.zeros(3), 0)
        return metered.meter

    first, second = Hub(2).run(body)
    assert first.total("setup").sent_bytes == 40
    assert second.total("setup").received_bytes == 40
    assert first.tallies[("train", "send", 1)].sent_bytes == 12
    assert second.tallies[("train", "recv", 0)].received_bytes == 12
    assert first.tallies[("train", "all_reduce", -1)].sent_bytes == 48
    assert first.totals["train"].seconds > 0
    assert first.total("finish").sent_bytes == 0
