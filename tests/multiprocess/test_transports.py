"""The contract of transports on real processes: equal results, order, groups, deaths, deadlines."""

import faulthandler
import os
import pickle
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.small import shared_files

from paceline.codecs.feedback import build_codec
from paceline.collectives.base import choose
from paceline.collectives.operations import Operations
from paceline.common.seeding import generator
from paceline.errors import PeerLost, PeerSlow, TransportError
from paceline.launch.board import board_for, rendezvous_for
from paceline.registry import codecs, collectives, transports
from paceline.transport.base import Rendezvous, Transport, Waits
from paceline.transport.inproc import Hub
from paceline.types import Layout, Slot

PROCESSES = [
    e.name
    for e in transports
    if e.make.traits.runs_as == "processes" and e.make.available() and e.name != "mpi"
]
HANGS_S = 200
EACH = pytest.mark.parametrize("name", PROCESSES)
QUICK = (("gloo", "native"), ("shm", "ring"))


def on_processes(
    name: str,
    size: int,
    body: Callable[[Transport], Any],
    deadline_s: float = 20.0,
    end_together: bool = True,
    give_up_s: float | None = None,
    watched: bool = False,
) -> list[Any]:
    """Run `body(transport)` in `size` forked processes.

    Returns what each process returned or raised, or the signal that ended it.
    """
    children = []
    for _ in range(size):
        from_parent, to_child = os.pipe()
        from_child, to_parent = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                # a rank that hangs ends with its stack on stderr
                faulthandler.dump_traceback_later(HANGS_S, exit=True)
                given: Rendezvous = pickle.loads(os.read(from_parent, 4096))
                torch.set_num_threads(1)
                transport = transports.entry(name).make.connect(given)
                result = body(transport)
                if end_together:
                    transport.barrier()
            except BaseException as error:
                result = error
            finally:
                with os.fdopen(to_parent, "wb") as pipe:
                    pipe.write(pickle.dumps(result))
                os._exit(0)
        os.close(from_parent)
        os.close(to_parent)
        children.append((pid, to_child, from_child))
    board = board_for(None, 60.0)
    results = []
    for rank, (_, to_child, _) in enumerate(children):
        given = rendezvous_for(board, None, rank, size, Waits(deadline_s, give_up_s))
        os.write(to_child, pickle.dumps(replace(given, watched=watched)))
        os.close(to_child)
    for pid, _, from_child in children:
        with os.fdopen(from_child, "rb") as pipe:
            content = pipe.read()
        _, status = os.waitpid(pid, 0)
        results.append(pickle.loads(content) if content else signal.Signals(status).name)
    board.close()
    return results


@EACH
@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_reduce_and_broadcast_of_every_size(name: str, size: int) -> None:
    lengths = [0, 1, 5, 8191, 8193, 300_001]

    def body(transport: Transport) -> list[list[float]]:
        found = []
        for length in lengths:
            for place in ("shared", "own"):
                make = (
                    transport.allocate
                    if place == "shared"
                    else (lambda n, dtype, device: torch.zeros(n, dtype=dtype))
                )
                for op, expected in (("sum", size * (size + 1) / 2), ("max", size), ("min", 1)):
                    tensor = make(length, torch.float32, torch.device("cpu"))
                    tensor.fill_(transport.rank + 1)
                    transport.all_reduce(tensor, op)
                    found.append([length, *(tensor - expected).unique().tolist()])
                tensor = make(length, torch.int64, torch.device("cpu")).fill_(transport.rank * 7)
                transport.broadcast(tensor, root=size - 1)
                found.append([length, *(tensor - 7 * (size - 1)).unique().tolist()])
        return found

    for result in on_processes(name, size, body):
        assert not isinstance(result, BaseException), result
        assert all(row == ([row[0], 0.0] if row[0] else [0]) for row in result)


@EACH
def test_many_calls_in_a_row(name: str) -> None:
    """Small and large, shared and not, back to back: no rank overtakes another."""

    def body(transport: Transport) -> float:
        large = transport.allocate(50_000, torch.float64, torch.device("cpu"))
        small, wrong = torch.zeros(3, dtype=torch.float64), 0.0
        for i in range(150):
            small.fill_(transport.rank + i)
            transport.all_reduce(small)
            wrong += abs(float(small[1]) - (3 + 3 * i))
            if i % 3 == 0:
                large.fill_(transport.rank * i)
                transport.all_reduce(large)
                wrong += float((large - 3 * i).abs().max())
        return wrong

    assert on_processes(name, 3, body) == [0.0] * 3


@EACH
def test_messages_keep_their_order_and_cross_each_other(name: str) -> None:
    """Both ranks send several megabytes before either receives: neither may block for ever."""

    def body(transport: Transport) -> list[float]:
        other = 1 - transport.rank
        out = [
            torch.full((n,), float(transport.rank * 10 + i))
            for i, n in enumerate((3, 700_000, 0, 5, 1_000_001))
        ]
        into = [torch.empty_like(t) for t in out]
        works = [transport.isend(t, other) for t in out] + [transport.irecv(t, other) for t in into]
        for work in works:
            work.wait()
        return [float(t.double().mean()) if t.numel() else -1.0 for t in into]

    assert on_processes(name, 2, body) == [
        [10.0, 11.0, -1.0, 13.0, 14.0],
        [0.0, 1.0, -1.0, 3.0, 4.0],
    ]


@EACH
@pytest.mark.parametrize("collective", collectives.names())
def test_collectives_give_the_same_everywhere(name: str, collective: str) -> None:
    inputs = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0))

    def body(transport: Transport) -> list[float]:
        buffer = inputs[transport.rank].clone()
        collectives.build(collective, transport=transport).all_reduce(buffer)
        return buffer.tolist()

    results = on_processes(name, 3, body)
    assert results[0] == results[1] == results[2]
    torch.testing.assert_close(
        torch.tensor(results[0]).double(), inputs.double().sum(0), rtol=1e-5, atol=1e-5
    )


@EACH
def test_groups(name: str) -> None:
    def body(transport: Transport) -> tuple[int, int, float]:
        group = transport.group([2, 0] if transport.rank != 1 else [1])
        value = torch.tensor([float(transport.rank + 1)])
        group.all_reduce(value)
        return group.rank, group.size, float(value)

    assert on_processes(name, 3, body) == [(1, 2, 4.0), (0, 1, 2.0), (0, 2, 4.0)]


@EACH
@pytest.mark.parametrize("collective", ["native", "ring", "tree"])
def test_a_killed_rank_is_lost_before_the_deadline(name: str, collective: str) -> None:
    def body(transport: Transport) -> str:
        reduce = collectives.build(collective, transport=transport)
        buffer = transport.allocate(200_000, torch.float32, torch.device("cpu"))
        try:
            for step in range(50):
                if (transport.rank, step) == (1, 5):
                    os.kill(os.getpid(), signal.SIGKILL)
                reduce.all_reduce(buffer)
        except PeerLost:
            transport.close()  # as a worker does: the others learn at once
            return "lost"
        return "no error"

    before = shared_files()
    found = on_processes(name, 3, body, deadline_s=3600, end_together=False)
    assert found == ["lost", "SIGKILL", "lost"]
    assert shared_files() <= before


@pytest.mark.parametrize("call", ["message", "collective"])
@EACH
@pytest.mark.sampled(2)
def test_a_wait_ends_after_give_up_s_and_names_the_slow_rank(name: str, call: str) -> None:
    """The call blocks inside gloo: a thread shuts its connections down. All name the same rank."""

    over = Path("over").absolute()

    def body(transport: Transport) -> Any:
        pair = transport.group([0, 2]) if transport.rank != 1 else None
        transport.barrier()
        if transport.rank == 1:
            wait_for(over)
            wait_for(over.with_name("over-too"))
            return ""
        try:
            if call == "collective":
                transport.all_reduce(torch.zeros(4))
            elif transport.rank == 2:
                transport.recv(torch.zeros(4), 1)
            else:  # it waits for rank 2, which waits for rank 1
                assert pair is not None
                pair.recv(torch.zeros(4), 1)
        except PeerSlow as error:
            return error.rank, error.waited_s, str(error)
        finally:
            over.with_name("over" if transport.rank else "over-too").touch()
            wait_for(over)  # a rank that leaves first is not taken for the slow one
            wait_for(over.with_name("over-too"))
        return "no error"

    found = on_processes(name, 3, body, deadline_s=0.4, end_together=False, give_up_s=1.5)
    for rank, waited_s, text in (found[0], found[2]):
        assert (rank, waited_s) == (1, 1.5), found
        assert "no answer from rank 1 within 1.5 s" in text
        assert "gone" not in text


def test_12_a_wait_for_a_process_that_lives_goes_on() -> None:
    """shm watches its peers' processes: after the deadline it reports the wait and goes on."""

    said = Path("said").absolute()

    def body(transport: Transport) -> tuple[float, list[str]]:
        told: list[str] = []

        def say(text: str) -> None:
            told.append(text)
            said.touch()

        transport.patience.say = say
        value = torch.zeros(4)
        if transport.rank == 1:
            wait_for(said)  # the other's deadline is over, and it waits on
            transport.send(value + 7, 0)
        else:
            transport.recv(value, 1)
        return float(value.sum()), told

    first, second = on_processes("shm", 2, body, deadline_s=0.3)
    assert first[0] == 28.0
    assert second[1] == []
    assert "rank 0 has waited" in first[1][0]
    assert "for rank 1 (a message)" in first[1][0]
    assert "the run waits on" in first[1][0]


def wait_for(file: Path) -> None:
    until = time.monotonic() + 60
    while not file.exists():
        assert time.monotonic() < until, file
        time.sleep(0.005)


def different(transport: Transport, what: str) -> torch.Tensor:
    odd = transport.rank == 1
    return {
        "length": lambda: torch.zeros(50_000 if odd else 10),
        "dtype": lambda: torch.zeros(10, dtype=torch.float64 if odd else torch.float32),
        "device": lambda: torch.zeros(10, device="meta" if odd else "cpu"),
        "layout": lambda: torch.zeros(10, 2).t() if odd else torch.zeros(2, 10),
        "all on a wrong device": lambda: torch.zeros(10, device="meta"),
        "nothing": lambda: torch.zeros(0 if odd else 10),
    }[what]()


@pytest.mark.parametrize(
    ("name", "collective"),
    [
        pytest.param(name, how, marks=[] if (name, how) in QUICK else [pytest.mark.slow])
        for name in PROCESSES
        for how in ("native", "ring")
    ],
)
def test_ranks_that_bring_different_things_are_told_so(name: str, collective: str) -> None:
    """All ranks raise an error at once that lists each rank's call. gloo would end the process."""
    for what in ("length", "dtype", "device", "layout", "all on a wrong device", "nothing"):

        def body(transport: Transport, what: str = what) -> str:
            try:
                collectives.build(collective, transport=transport).all_reduce(
                    different(transport, what)
                )
            except TransportError as error:
                return str(error)
            return "no error"

        for said in on_processes(name, 3, body, deadline_s=3600, end_together=False):
            assert "call different operations" in said or "meta" in said, (what, said)
            if what == "length":
                assert "rank 0" in said
                assert "10 float32" in said
                assert "50000 float32" in said


def test_shm_notices_a_message_of_another_length() -> None:
    def body(transport: Transport) -> str:
        if transport.rank == 0:
            transport.send(torch.zeros(4), 1)
            return ""
        try:
            transport.recv(torch.zeros(5), 0)
        except TransportError as error:
            return str(error)
        return "no error"

    assert "rank 0 sent 16 bytes; 20 were expected" in on_processes(
        "shm", 2, body, end_together=False
    )


def test_shm_asks_for_no_more_than_there_is() -> None:
    def body(transport: Transport) -> str:
        try:
            transport.allocate(1 << 50, torch.float32, torch.device("cpu"))
        except TransportError as error:
            return str(error)
        return "no error"

    (said,) = on_processes("shm", 1, body)
    assert "bytes of shared memory are not available" in said


@EACH
def test_operations_on_processes(name: str) -> None:
    def body(transport: Transport) -> list[list[float]]:
        do, me = Operations(transport), transport.rank
        found = [
            do.broadcast(torch.full((4,), float(me)), 2),
            do.all_to_all(torch.arange(3.0) + 10 * me),
        ]
        found += [do.all_gather(torch.full((3,), float(me))), do.reduce_scatter(torch.arange(3.0))]
        found.append(do.mean(torch.full((2,), 2.0 * me), weight=[1.0, 1.0, 2.0][me]))
        return [t.tolist() for t in found]

    for me, result in enumerate(on_processes(name, 3, body)):
        swapped = [float(me), 10.0 + me, 20.0 + me]
        assert result == [[2.0] * 4, swapped, [0.0, 1.0, 2.0], [3.0 * me], [2.5] * 2]


@EACH
def test_auto_measures_and_all_ranks_agree(name: str) -> None:
    def body(transport: Transport) -> dict[str, str]:
        auto = choose("auto", transport)
        for length in (100, 100_000):
            auto.prepare(transport.allocate(length, torch.float32, torch.device("cpu")))
        return auto.choices

    first, *others = on_processes(name, 3, body)
    assert set(first) == {"400", "400000"}
    assert all(o == first for o in others)


@pytest.mark.parametrize("size", [2, 5])
def test_shm_with_more_ranks_than_cores_does_not_stall(size: int) -> None:
    """Five ranks on few cores: a hundred exchanges come to their end, and each is right."""

    def body(transport: Transport) -> list[float]:
        buffer = transport.allocate(30_000, torch.float32, torch.device("cpu"))
        sums = []
        for number in range(100):
            buffer.fill_(transport.rank + number)
            transport.all_reduce(buffer)
            sums.append(float(buffer[-1]))
        return sums

    ranks = size * (size - 1) / 2
    expected = [ranks + size * number for number in range(100)]
    assert on_processes("shm", size, body) == [expected] * size


# --- codecs


@pytest.mark.parametrize("name", [*PROCESSES])
def test_every_codec_travels(name: str) -> None:
    """Three ranks, three steps: the same bits on all of them, and the in-process transport's
    result.
    """
    choices = [n for n in codecs.names() if n != "none"] + ["topk:warmup=2,ratio=0.1"]

    def body(transport: Transport) -> dict[str, torch.Tensor]:
        found = {}
        for choice in choices:
            codec, ring = build_codec(choice), choose("ring", transport)
            state = codec.start(LAYOUT, generator(0, "own", transport.rank), generator(0, "shared"))
            for step in range(3):
                buffer = torch.randn(LAYOUT.numel, generator=generator(step, transport.rank))
                codec.reduce(buffer, LAYOUT, ring, state)
            found[choice] = buffer
        return found

    there, here = on_processes(name, 3, body), Hub(3).run(body)
    for choice in choices:
        assert all(torch.equal(there[0][choice], there[rank][choice]) for rank in (1, 2)), choice
        assert torch.equal(there[0][choice], here[0][choice]), choice


@EACH
def test_hops_leave_collectives_alone(name: str) -> None:
    """After a schedule in which ranks receive differently often, an all-reduce still finds all
    ranks' memory.
    """

    def body(transport: Transport) -> float:
        codec = build_codec("int8")
        codec.reduce(torch.ones(LAYOUT.numel), LAYOUT, choose("tree", transport), {})
        buffer = torch.ones(20_000)
        transport.all_reduce(buffer)
        return float(buffer.sum())

    assert on_processes(name, 3, body) == [60_000.0] * 3


LAYOUT = Layout((Slot("a", (30, 40), (40, 1), 0, 1200, 0), Slot("b", (30,), (1,), 1200, 30, 0)))


def test_a_receive_that_was_given_up_is_never_filled() -> None:
    """The sender comes later, when the memory has another use."""

    def body(transport: Transport) -> Any:
        heard = transport.allocate(100_000, torch.float32, torch.device("cpu"))
        if transport.rank == 0:
            work: Any = transport.irecv(heard, 1)
            work.give_up()
            heard.fill_(7.0)
            transport.barrier()
            transport.barrier()
            with pytest.raises(TransportError, match="was given up"):
                transport.recv(heard, 1)
            return float(heard.min()), float(heard.max())
        transport.barrier()
        with pytest.raises(TransportError, match="given"):
            transport.send(torch.ones(100_000), 0)
        transport.barrier()
        return None

    assert on_processes("shm", 2, body)[0] == (7.0, 7.0)


@EACH
def test_a_rank_that_is_gone_from_a_group_has_its_number_in_the_world(name: str) -> None:
    def body(transport: Transport) -> Any:
        if transport.rank == 0:
            return None
        group = transport.group((1, 2))
        group.barrier()
        if transport.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            group.barrier()
        except PeerLost as lost:
            return lost.rank
        return "not noticed"

    assert on_processes(name, 3, body, deadline_s=5.0, end_together=False)[1] == 2


@pytest.mark.parametrize("shared", ["elsewhere", "on one rank only"])
def test_ranks_may_have_allocated_differently(shared: str) -> None:
    """Then an all-reduce cannot be made in place, and goes through copies."""

    def body(transport: Transport) -> tuple[float, float]:
        cpu = torch.device("cpu")
        if transport.rank == 0:
            transport.allocate(5, torch.float32, cpu)  # the others do not
        owned = shared == "elsewhere" or transport.rank == 0
        plain = torch.zeros(100_000)
        buffer = transport.allocate(100_000, torch.float32, cpu) if owned else plain
        transport.all_reduce(buffer.fill_(transport.rank + 1.0))
        return float(buffer.min()), float(buffer.max())

    assert on_processes("shm", 3, body) == [(6.0, 6.0)] * 3
