"""The desk where the driver of a run on Spark asks its ranks to leave. No Spark runs here."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from paceline.errors import Interrupted, NotFinite, PeerLost, RunFailed, TransportError
from paceline.launch import spark_desk
from paceline.launch.signals import relaying
from paceline.launch.spark import _stay_on_loopback
from paceline.launch.spark_desk import Address, AtDesk, Desk, finished
from paceline.transport.board.client import Board


def eventually(look: Callable[[], Any]) -> None:
    until = time.monotonic() + 30
    while not look():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def desk(said: list[str]) -> Iterator[Desk]:
    with Desk("127.0.0.1", said.append) as open_desk:
        yield open_desk


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """The signals that this process gets from its own threads."""
    numbers: list[int] = []
    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, lambda got, frame: numbers.append(got))
    yield numbers
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_request_to_leave_reaches_the_ranks_once(desk: Desk, heard: list[int]) -> None:
    passed: list[int] = []
    assert not desk.begun()
    with relaying(passed.append), AtDesk(desk.address, 0) as rank:
        assert desk.begun()
        assert not rank.left(Interrupted("of another cause"))  # the driver has not asked
        desk.ask(signal.SIGUSR1)
        assert not finished(threading.Event(), desk, 0.01)  # it looks at least once
        eventually(lambda: passed)
        assert desk.left() is None
        assert rank.left(Interrupted("left at step 7", signal.SIGUSR1))
    assert passed == [signal.SIGUSR1]
    found = desk.left()
    assert found is not None
    assert (str(found), found.number, found.exit_code) == ("left at step 7", signal.SIGUSR1, 75)
    assert heard == []


def test_a_rank_leaves_because_another_has_heard_the_request_first(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spark_desk, "LOOK_S", 60.0)  # this rank itself does not look in time
    with AtDesk(desk.address, 0) as rank:
        assert not rank.left(Interrupted("of another cause"))
        desk.ask(signal.SIGUSR1)
        desk.look()
        assert rank.left(Interrupted("left at step 7", signal.SIGUSR1))
    found = desk.left()
    assert found is not None
    assert found.exit_code == 75


def test_a_stop_ends_the_ranks_at_once(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(spark_desk.os, "_exit", codes.append)
    with AtDesk(desk.address, 1):
        desk.stop()
        eventually(lambda: codes)
    assert set(codes) == {1}


def test_ranks_leave_when_the_driver_is_gone(heard: list[int], said: list[str]) -> None:
    with Desk("127.0.0.1", said.append) as desk:
        rank = AtDesk(desk.address, 0).__enter__()
    eventually(lambda: heard)
    assert heard == [signal.SIGTERM]
    assert not rank.failed(NotFinite("the driver does not hear it"))
    rank.__exit__()


def test_failures_are_told(desk: Desk) -> None:
    with AtDesk(desk.address, 0) as zero, AtDesk(desk.address, 2) as two:
        assert zero.failed(PeerLost(1, "its process ended"))
        assert two.failed(NotFinite("the loss is nan"))
    found = desk.failures(3)
    assert {rank: type(error) for rank, error in found.items()} == {0: PeerLost, 2: NotFinite}
    assert str(found[2]) == "the loss is nan"


def test_a_stranger_is_turned_away(desk: Desk, said: list[str]) -> None:
    with pytest.raises(TransportError, match="does not accept this rank's secret"):
        Board(desk.address.address, b"another secret", 0).set("stop", "now")
    eventually(lambda: desk.look() or said)
    assert "that does not know this run's secret has tried to join" in said[0]
    assert desk.address.secret.hex() not in repr(desk.address)


def test_a_desk_that_cannot_be_reached_costs_nothing_but_leaving() -> None:
    with AtDesk(Address("tcp:127.0.0.1:1", b"x" * 32), 0) as rank:
        assert not rank.left(KeyboardInterrupt())
        assert not rank.failed(NotFinite("said in another way"))


def test_an_address_that_is_not_of_this_host(said: list[str]) -> None:
    with pytest.raises(RunFailed, match=r"cannot listen on 192\.0\.2\.7 \(spark\.driver\.host\)"):
        Desk("192.0.2.7", said.append).__enter__()


def test_waiting_has_a_deadline(desk: Desk) -> None:
    over = threading.Event()
    assert not finished(over, desk, 0.05)
    over.set()
    assert finished(over, desk, 10.0)


@pytest.mark.parametrize(("driver", "meets_at"), [("127.0.0.1", "127.0.0.1"), ("10.1.2.3", "vm")])
def test_ranks_of_a_driver_on_loopback_meet_there(
    driver: str, meets_at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun names their machine, and its name may be loopback only on this machine."""
    monkeypatch.setenv("MASTER_ADDR", "vm")
    _stay_on_loopback(Address(f"tcp:{driver}:1234", b""))
    assert os.environ["MASTER_ADDR"] == meets_at
