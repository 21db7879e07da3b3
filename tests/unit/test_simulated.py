"""The transport `simulated`: virtual times, by hand and by laws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.traces import without_agreements

from paceline.collectives.base import choose, usual
from paceline.errors import PeerLost, TransportError
from paceline.transport.simulated import Sent, SimulatedHub, SimulatedTransport
from paceline.transport.virtual import Link, Network

Body = Callable[[SimulatedTransport], Any]


FREE = Link()


def simulate(size: int, body: Body, link: Link = FREE, **options: Any) -> list[Any]:
    network = Network(tuple(range(size)), link)
    with without_agreements():
        found = SimulatedHub(size, network, **options).run(body)
    for result in found:
        if isinstance(result, BaseException):
            raise result
    return found


def test_a_message_leaves_and_arrives_when_the_link_says() -> None:
    """100 bytes at 0.01 s each: it has left after 1 s, and arrives half a second later."""

    def body(transport: SimulatedTransport) -> float:
        buffer = torch.zeros(25)
        if transport.rank == 0:
            transport.charge(2.0)
            work = transport.isend(buffer, 1)
            assert transport.now() == 2.0  # posting takes no time
            work.wait()
        else:
            transport.irecv(buffer, 0).wait()
        return transport.now()

    assert simulate(2, body, Link(0.5, 0.01)) == [3.0, 3.5]


def test_a_message_that_is_there_costs_no_wait() -> None:
    def body(transport: SimulatedTransport) -> float:
        buffer = torch.zeros(25)
        if transport.rank == 0:
            transport.isend(buffer, 1)
        else:
            transport.charge(9.0)
            transport.irecv(buffer, 0).wait()
        return transport.now()

    assert simulate(2, body, Link(0.5, 0.01)) == [0.0, 9.0]


def test_wait_any_returns_the_earliest_arrival_also_one_that_is_posted_later() -> None:
    """Rank 1's message (800 bytes from another host) is posted at 0 and arrives at 8.5; rank 2's
    is posted at 1 on rank 0's host, and arrives at 1.125.
    """

    def body(transport: SimulatedTransport) -> Any:
        if transport.rank == 0:
            works = [transport.irecv(torch.zeros(200), 1), transport.irecv(torch.zeros(5), 2)]
            first, at = transport.wait_any(works), transport.now()
            works[1].wait()
            late = transport.wait_any(works[:1], patience_s=0.25)
            until = transport.now()
            return first, at, late, until, transport.wait_any(works[:1]), transport.now()
        if transport.rank == 1:
            transport.isend(torch.zeros(200), 0)
            transport.charge(20.0)
        else:
            transport.charge(1.0)
            transport.isend(torch.zeros(5), 0)
        return None

    network = Network((0, 1, 0), Link(0.5, 0.01), Link(0.125, 0.0))
    assert SimulatedHub(3, network).run(body)[0] == (1, 1.125, None, 1.375, 0, 8.5)


def test_a_deadline_is_virtual() -> None:
    def body(transport: SimulatedTransport) -> Any:
        if transport.rank == 1:
            transport.charge(10.0)
            transport.isend(torch.zeros(1), 0)
            return None
        work, looks = transport.irecv(torch.zeros(1), 1), 0
        while transport.wait_any([work], patience_s=3.0) is None:
            looks += 1
        return looks, transport.now()

    assert simulate(2, body)[0] == (3, 10.0)


def test_a_deadline_hides_no_deadlock() -> None:
    def body(transport: SimulatedTransport) -> None:
        work = transport.irecv(torch.zeros(1), 1 - transport.rank)
        while transport.wait_any([work], patience_s=1.0) is None:
            pass

    with pytest.raises(TransportError, match="deadlock"):
        simulate(2, body)


def test_control_takes_no_time_beyond_the_slowest_rank() -> None:
    sent: list[Sent] = []

    def body(transport: SimulatedTransport) -> list[float]:
        times = []
        transport.charge(1.0 + transport.rank)
        transport.barrier()
        times.append(transport.now())
        transport.charge(3.0 - transport.rank)
        transport.control.all_reduce(total := torch.ones(1))
        assert float(total) == 3.0
        times.append(transport.now())
        if transport.rank == 0:
            transport.send_note(torch.ones(1), 2).wait()
        if transport.rank == 2:
            transport.charge(0.5)
            transport.recv_note(torch.ones(1), 0).wait()
        return [*times, transport.now()]

    found = simulate(3, body, Link(1.0, 1.0), sent=sent)
    assert found == [[3.0, 6.0, 6.0], [3.0, 6.0, 6.0], [3.0, 6.0, 6.5]]
    assert sent == []


def test_a_rank_that_ended_is_noticed_at_the_time_of_its_end() -> None:
    def body(transport: SimulatedTransport) -> float:
        if transport.rank == 1:
            transport.charge(7.0)
            return 0.0
        with pytest.raises(PeerLost):
            transport.irecv(torch.zeros(1), 1).wait()
        return transport.now()

    assert simulate(2, body)[0] == 7.0


def test_payload_is_exchanged_by_a_ring() -> None:
    def body(transport: SimulatedTransport) -> list[str]:
        auto = choose("auto", transport)
        auto.prepare(torch.ones(8))
        return [*auto.choices.values(), usual(transport).schedule.name]

    assert simulate(3, body) == [["ring", "ring"]] * 3


# --- collectives at P = 3, computed by hand: 300 numbers (1,200 bytes), 0.01 s per byte,
# latency 0.5 s, 0.001 s per byte added; rank r begins at r + 1


def ends(collective: str, s_per_byte_added: float = 0.001) -> list[float]:
    def body(transport: SimulatedTransport) -> float:
        buffer = torch.ones(300)
        transport.charge(1.0 + transport.rank)
        choose(collective, transport).all_reduce(buffer)
        assert buffer.eq(3.0).all()
        return transport.now()

    found: list[float] = simulate(3, body, Link(0.5, 0.01), s_per_byte_added=s_per_byte_added)
    return found


def test_the_times_of_a_ring() -> None:
    """Chunks of 400 bytes: 4 s on a link, 4.5 s until they arrive, 0.4 s to add.

    Round 1: rank 0 sends from 1 to 5, rank 1 from 2 to 6, rank 2 from 3 to 7; they arrive at 5.5,
    6.5 and 7.5 at ranks 1, 2 and 0. A rank adds once its chunk is there, and goes on when its own
    has left: rank 0 at 7.9, rank 1 at 5.9 + 0.1 = 6 (its own has left at 6), rank 2 at 7.
    Round 2 (adding): rank 1 sends 6 to 10, rank 2 sends 7 to 11, rank 0 sends 7.9 to 11.9.
    They arrive at 10.5 (rank 2), 11.5 (rank 0), 12.4 (rank 1); added at 10.9, 11.9, 12.8, and the
    own ones have left at 11 (rank 2), 11.9 (rank 0), 10 (rank 1).
    Round 3: rank 2 sends 11 to 15, rank 0 11.9 to 15.9, rank 1 12.8 to 16.8; rank 0 has the chunk
    at 15.5, rank 1 at 16.4, rank 2 at 17.3; all wait for their own to leave: 15.9, 16.8, 17.3.
    Round 4: rank 0 sends 15.9 to 19.9, rank 1 16.8 to 20.8, rank 2 17.3 to 21.3: rank 1 has it at
    20.4 (and has sent at 20.8), rank 2 at 21.3, rank 0 at 21.8.
    """
    assert ends("ring") == pytest.approx([21.8, 20.8, 21.3])


def test_the_times_of_a_tree() -> None:
    """Whole buffers: 12 s on a link, 1.2 s to add.

    Ranks 1 and 2 send to rank 0: rank 1 from 2 to 14; rank 2 posts at 3, and rank 0's way in is
    busy until 14: from 14 to 26, there at 26.5. Rank 0 adds rank 1's from 14.5 to 15.7, rank 2's
    from 26.5 to 27.7. Then it sends to rank 2 (27.7 to 39.7, there at 40.2), and to rank 1 (39.7 to
    51.7, there at 52.2).
    """
    assert ends("tree") == pytest.approx([51.7, 52.2, 40.2])


# --- laws

times = st.lists(st.floats(0.0, 3.0), min_size=2, max_size=5)
links = st.builds(Link, st.floats(0.0, 0.1), st.floats(0.0, 1e-3))
names = st.sampled_from(["ring", "tree", "star", "halving-doubling", "ring-reduce"])


def run(name: str, compute_s: list[float], link: Link) -> tuple[list[float], list[Sent]]:
    sent: list[Sent] = []

    def body(transport: SimulatedTransport) -> float:
        buffer = torch.ones(64)
        for _ in range(2):
            transport.charge(compute_s[transport.rank])
            choose(name, transport).all_reduce(buffer)
        return transport.now()

    return simulate(len(compute_s), body, link, sent=sent), sent


@given(names, times, links)
def test_messages_are_posted_in_the_order_of_time(
    name: str, compute_s: list[float], link: Link
) -> None:
    ended, sent = run(name, compute_s, link)
    posted = [s.posted_s for s in sent]
    assert posted == sorted(posted)
    assert all(s.posted_s + s.size_bytes * link.s_per_byte <= s.left_s + 1e-9 for s in sent)
    assert all(s.arrived_s == s.left_s + link.latency_s for s in sent)
    assert max(ended) >= 2 * max(compute_s) - 1e-9


@given(names, times, links)
def test_the_same_times_give_the_same_run(name: str, compute_s: list[float], link: Link) -> None:
    assert run(name, compute_s, link) == run(name, compute_s, link)


@given(names, times, links, st.floats(1.0, 4.0))
def test_all_times_scale_together(
    name: str, compute_s: list[float], link: Link, factor: float
) -> None:
    slower = Link(factor * link.latency_s, factor * link.s_per_byte)
    ended, _ = run(name, compute_s, link)
    later, _ = run(name, [factor * t for t in compute_s], slower)
    assert later == pytest.approx([factor * t for t in ended])
