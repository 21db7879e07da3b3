"""A switch that queues, and cores that ranks share: clocks by hand."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.codecs.feedback import build_codec
from paceline.planning.engine import Engine, Flush, Post, Program, Spend, Take
from paceline.planning.fit import Line
from paceline.planning.programs import Costs, Lineup
from paceline.planning.queues import PIECE_BYTES, SOCKET_BYTES, Cores, Leaving, Queues
from paceline.registry import strategies
from paceline.transport.virtual import Link, Network, Traffic
from paceline.types import Layout, Slot

LINK = Link(latency_s=0.1, s_per_byte=1e-3)  # 300 numbers, 1,200 bytes, take 1.2 s


def lineup(strategy: str, workers: int, servers: int = 0, **more: object) -> Lineup:
    layout = Layout((Slot("w", (300,), (1,), 0, 300, 0),))
    made = strategies.build(strategy)
    return Lineup(made, build_codec("none"), layout, workers, servers, **more)  # type: ignore[arg-type]


def clocks(asked: Lineup, compute: Callable[[int, int], float], **more: object) -> list[float]:
    network = Network(tuple(range(asked.workers + asked.servers)), LINK)
    engine = Engine(network, queues=True, **more)  # type: ignore[arg-type]
    return engine.run(asked.programs(compute, 1))[: asked.workers]


def one_second(worker: int, step: int) -> float:
    return 1.0


def test_pushes_leave_at_once_and_wait_at_the_servers_port() -> None:
    # All three pushes have passed the server's port at 1 + 3.6 s; the note of a push comes first.
    # The replies leave the server one after the other.
    applied = 1 + 3 * 1.2 + 0.1
    found = clocks(lineup("ps", 3, 1), one_second)
    assert found == pytest.approx([applied + 1.2 * n + 0.1 for n in (1, 2, 3)])


class InTurn(random.Random):
    """Takes the first, always."""

    def choice(self, seq: Any) -> Any:
        return seq[0]


def test_replies_take_turns_in_pieces() -> None:
    """Pieces of 400 bytes: one first piece of each reply, then the other six in random order."""
    applied = 1 + 3 * 1.2 + 0.1
    ends = set()
    for seed in range(20):
        found = clocks(lineup("ps", 3, 1), one_second, piece_bytes=400, seed=seed)
        pieces = sorted(round((end - applied - 0.1) / 0.4, 6) for end in found)
        assert pieces[-1] == 9
        assert 5 <= pieces[0] <= 7
        assert all(piece == round(piece) for piece in pieces)
        ends.add(tuple(pieces))
        assert found == clocks(lineup("ps", 3, 1), one_second, piece_bytes=400, seed=seed)
    assert len(ends) > 1


def test_messages_of_later_rounds_take_turns_with_earlier_ones() -> None:
    """The root of a tree of 3 goes on when its socket has the first message, and sends the second.

    So both of its children have the sum nearly at the same time.
    """

    def ends(piece_bytes: int | None) -> list[float]:
        asked = lineup("allreduce:collective=tree", 3)
        return clocks(asked, one_second, piece_bytes=piece_bytes)

    summed = 1 + 2 * 1.2 + 0.1  # both children's messages pass the root's port
    assert ends(None)[1:] == pytest.approx([summed + 2 * 1.2 + 0.1, summed + 1.2 + 0.1])
    last = summed + 6 * 0.4 + 0.1
    assert max(ends(400)) == pytest.approx(last)
    assert min(ends(400)[1:]) > last - 3 * 0.4


def test_one_piece_after_the_other_by_hand() -> None:
    """Two messages of 1,000 and 500 bytes to rank 1, one of 700 to rank 2, in pieces of 400."""
    queues = Queues(Network((0, 1, 2), LINK), 400, InTurn())
    first = queues.post(0.0, Leaving(0, 1, 1000))
    assert first is not None
    assert (first.size_bytes, first.begins_s, first.ends_s, first.last) == (400, 0.0, 0.4, False)
    assert queues.post(0.1, Leaving(0, 2, 700)) is None
    assert queues.post(0.2, Leaving(0, 1, 500)) is None
    way, seen = queues.way_out(0, 1), []
    while (piece := queues.leave(0.4, way)) is not None:
        seen.append((piece.message.target, piece.size_bytes, round(piece.ends_s, 6), piece.last))
    assert seen == [
        (2, 400, 0.8, False),
        (1, 400, 1.2, False),
        (2, 300, 1.5, True),
        (1, 200, 1.7, True),
        (1, 400, 2.1, False),
        (1, 100, 2.2, True),
    ]
    later = queues.post(5.0, Leaving(0, 1, 100))
    assert later is not None
    assert (later.begins_s, later.last) == (5.0, True)


@pytest.mark.parametrize(("strategy", "servers"), [("ps", 1), ("allreduce:collective=tree", 0)])
def test_pieces_are_no_further_messages(strategy: str, servers: int) -> None:
    """What is counted, and the processor time of handling it, are those of whole messages."""

    def made(piece_bytes: int | None) -> tuple[int, list[int], float]:
        asked = lineup(strategy, 3, servers, costs=Costs(moved_s_per_message=0.5))
        network = Network(tuple(range(3 + servers)), LINK)
        engine = Engine(network, queues=True, piece_bytes=piece_bytes, cores=1)
        engine.run(asked.programs(one_second, 1))
        return engine.messages, engine.posted_bytes, engine.handled_s

    whole, pieces = made(None), made(400)
    assert whole == (pieces[0], pieces[1], pytest.approx(pieces[2]))
    # Three notes to a server and three back are handled, too, and are not messages of the payload.
    assert whole[2] == pytest.approx(0.5 * (whole[0] + (6 if servers else 0)))


def test_a_sender_goes_on_while_its_message_waits_at_a_port() -> None:
    """Ranks 0 and 1 send to rank 2, and rank 1 then to rank 3, whose port is free.

    In `virtual.py` the second message of rank 1 waits until its first is through.
    """

    def sends(*targets: int) -> Program:
        for target in targets:
            yield Post(target, 1000)

    def takes(*sources: int) -> Program:
        for source in sources:
            yield Take(source)

    def ends(queues: bool) -> list[float]:
        programs = [sends(2), sends(2, 3), takes(0, 1), takes(1)]
        return Engine(Network((0, 1, 2, 3), LINK), queues).run(programs)[2:]

    assert ends(queues=True) == pytest.approx([2.1, 2.1])
    assert ends(queues=False) == pytest.approx([2.1, 3.1])


def test_a_sender_waits_for_what_its_socket_does_not_hold() -> None:
    def sends() -> Program:
        sent = yield Post(1, SOCKET_BYTES + 1000)
        yield Flush([sent])

    def takes() -> Program:
        yield Take(0)

    def ends(piece_bytes: int | None) -> list[float]:
        network = Network((0, 1), LINK)
        engine = Engine(network, queues=True, piece_bytes=piece_bytes)
        return engine.run([sends(), takes()])

    all_s = (SOCKET_BYTES + 1000) * 1e-3 + 0.1
    assert ends(None) == pytest.approx([1.0, all_s])
    # In pieces it is known after the piece with which the rest fits.
    assert ends(PIECE_BYTES) == pytest.approx([(SOCKET_BYTES + 1000) * 1e-3 / 32, all_s], 1e-4)


@given(
    st.lists(st.tuples(st.floats(0, 5), st.integers(0, 5000)), min_size=1, max_size=6),
    st.sampled_from([0.0, 300.0, 2000.0]),
)
def test_one_connection_alone_is_as_in_virtual_time(
    messages: list[tuple[float, int]], burst: float
) -> None:
    """Both models agree where no port is shared, with the bursts of a token bucket."""
    network = Network((0, 1), Link(0.1, 1e-3, burst))
    traffic, queues, now = Traffic(network), Queues(network, None), 0.0
    for pause, size in messages:
        now += pause
        _, arrived = traffic.post(now, 0, 1, size)
        piece = queues.post(now, Leaving(0, 1, size))
        assert piece is not None
        passed = queues.enter(piece.begins_s, 0, 1, size)
        assert max(piece.ends_s, passed) + 0.1 == pytest.approx(arrived)


@given(
    st.lists(st.tuples(st.floats(0, 5), st.integers(1, 5000)), min_size=1, max_size=6),
    st.sampled_from([0.0, 300.0, 2000.0]),
)
def test_one_connection_alone_is_as_fast_in_pieces(
    messages: list[tuple[float, int]], burst: float
) -> None:
    network = Network((0, 1), Link(0.1, 1e-3, burst))

    def sends() -> Program:
        for pause, size in messages:
            yield Spend(pause)
            yield Post(1, size)

    def takes() -> Program:
        for _ in messages:
            yield Take(0)

    ends = [
        Engine(network, queues=True, piece_bytes=piece_bytes).run([sends(), takes()])[1]
        for piece_bytes in (None, 400)
    ]
    assert ends[1] == pytest.approx(ends[0])


@pytest.mark.parametrize("piece_bytes", [None, 400])
def test_a_message_takes_its_own_bytes_of_the_way_too(piece_bytes: int | None) -> None:
    """Two messages of 1,000 bytes, each with 100 of a protocol."""

    def sends() -> Program:
        yield Post(1, 1000)
        yield Post(1, 1000)

    def takes() -> Program:
        yield Take(0)
        yield Take(0)

    network = Network((0, 1), Link(0.1, 1e-3, message_bytes=100))
    engine = Engine(network, queues=True, piece_bytes=piece_bytes)
    assert engine.run([sends(), takes()])[1] == pytest.approx(2 * 1.1 + 0.1)
    assert engine.posted_bytes == [2000, 0]


@pytest.mark.parametrize("strategy", ["allreduce:collective=ring", "stepwise", "gossip"])
def test_rings_are_as_in_virtual_time(strategy: str) -> None:
    asked = lineup(strategy, 4)
    network = Network((0, 1, 2, 3), LINK)
    plain = Engine(network).run(asked.programs(one_second, 1))
    assert clocks(asked, one_second) == pytest.approx(plain)


# --- cores


def test_work_waits_for_the_first_free_core() -> None:
    cores = Cores(2)
    assert [cores.take(0.0, 1.0), cores.take(0.0, 3.0), cores.take(0.5, 1.0)] == [1.0, 3.0, 2.0]
    assert cores.take(5.0, 1.0) == 6.0


def test_what_ranks_do_beside_computing_shares_the_cores() -> None:
    """Three workers sleep for 1 s and then need a core for 1 s; there are two."""
    network = Network((0, 1, 2), Link())

    def program() -> Program:
        yield Spend(1.0, shared=False)
        yield Spend(1.0)

    assert Engine(network, queues=True, cores=2).run([program() for _ in range(3)]) == [2, 2, 3]
    assert Engine(network, queues=True).run([program() for _ in range(3)]) == [2, 2, 2]


def test_messages_wait_for_a_core_that_handles_them() -> None:
    """8 messages of 10 bytes, each with 0.05 s of processor time, which a free core hides.

    They arrive within 0.18 s at 8 ranks. One core needs 8 * 0.05 s for them, from 0.06 s on.
    """

    def sends() -> Program:
        for target in range(1, 9):
            yield Post(target, 10, 0.05)

    def takes() -> Program:
        yield Take(0)

    def last(cores: int | None) -> float:
        engine = Engine(Network(tuple(range(9)), LINK), queues=True, cores=cores)
        return max(engine.run([sends(), *(takes() for _ in range(8))]))

    assert last(None) == last(8) == pytest.approx(0.18)
    assert last(1) == pytest.approx(0.06 + 8 * 0.05)


def test_a_steps_other_work_counts_where_cores_are_shared() -> None:
    asked = lineup("local-sgd:every=8,collective=ring", 3, costs=Costs(beside_s=0.5))
    assert clocks(asked, one_second, cores=1) == pytest.approx([1.5, 2.0, 2.5])


def test_a_hop_codec_takes_its_fixed_seconds_for_each_chunk() -> None:
    """A ring of 3 has 4 rounds: in each a worker packs one chunk and unpacks another."""
    layout = Layout((Slot("w", (300,), (1,), 0, 300, 0),))
    made = strategies.build("allreduce:collective=ring")

    def end(costs: Costs) -> float:
        asked = Lineup(made, build_codec("int8"), layout, 3, costs=costs)
        return max(clocks(asked, one_second))

    fixed = Costs(encode=Line(0.25, 0.0), decode=Line(0.5, 0.0))
    assert end(fixed) == pytest.approx(end(Costs()) + 4 * (0.25 + 0.5))
