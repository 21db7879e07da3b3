"""A switch that queues, and cores that ranks share: clocks by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.codecs.feedback import build_codec
from paceline.planning.engine import Engine, Post, Program, Spend, Take, Until
from paceline.planning.fit import Line
from paceline.planning.programs import Costs, Lineup
from paceline.planning.queues import SOCKET_BYTES, Cores, Queues
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


def test_replies_take_turns_in_pieces() -> None:
    # Pieces of 400 bytes: replies end with the pieces 7, 8 and 9 of 9.
    applied = 1 + 3 * 1.2 + 0.1
    found = clocks(lineup("ps", 3, 1, piece_bytes=400), one_second)
    assert found == pytest.approx([applied + 0.4 * n + 0.1 for n in (7, 8, 9)])


@pytest.mark.parametrize(("strategy", "servers"), [("ps", 1), ("allreduce:collective=tree", 0)])
def test_pieces_are_no_further_messages(strategy: str, servers: int) -> None:
    """What is counted, and the processor time of handling it, are those of whole messages."""

    def made(piece_bytes: int | None) -> tuple[float, list[int], float]:
        costs = Costs(moved_s_per_message=0.5)
        asked = lineup(strategy, 3, servers, piece_bytes=piece_bytes, costs=costs)
        posts = asked._in_turns([(1, 1200), (2, 1000)])
        engine = Engine(Network(tuple(range(3 + servers)), LINK), queues=True)
        engine.run(asked.programs(one_second, 1))
        return engine.messages, engine.posted_bytes, sum(post.handling_s for post in posts)

    (messages, sent, handling_s), (other, other_sent, other_s) = made(None), made(400)
    assert (other, other_s) == (pytest.approx(messages), pytest.approx(handling_s))
    assert (sent, handling_s) == (other_sent, pytest.approx(1.0))


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
        left = yield Post(1, SOCKET_BYTES + 1000)
        yield Until(left)

    def takes() -> Program:
        yield Take(0)

    found = Engine(Network((0, 1), LINK), queues=True).run([sends(), takes()])
    assert found == pytest.approx([1.0, (SOCKET_BYTES + 1000) * 1e-3 + 0.1])


@given(
    st.lists(st.tuples(st.floats(0, 5), st.integers(0, 5000)), min_size=1, max_size=6),
    st.sampled_from([0.0, 300.0, 2000.0]),
)
def test_one_connection_alone_is_as_in_virtual_time(
    messages: list[tuple[float, int]], burst: float
) -> None:
    """Both models agree where no port is shared, with the bursts of a token bucket."""
    network = Network((0, 1), Link(0.1, 1e-3, burst))
    traffic, queues, now = Traffic(network), Queues(network), 0.0
    for pause, size in messages:
        now += pause
        _, arrived = traffic.post(now, 0, 1, size)
        begins, left = queues.leave(now, 0, 1, size)
        passed = queues.enter(begins, 0, 1, size)
        assert max(left, passed) + 0.1 == pytest.approx(arrived)


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
