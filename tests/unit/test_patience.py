"""Slow is not an error: notices that name the right rank, ever more rarely; what ends a wait."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from paceline.errors import PeerLost, PeerSlow, TransportError
from paceline.transport import patience as patience_module
from paceline.transport.patience import UNWATCHED_S, Patience
from paceline.transport.waits import Posted, duration, listed, slow_ranks, who_waits


class FakeStore:
    """A key-value store in this process, with ranks whose end it has noticed."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.lost: dict[int, str] = {}
        self.asked = 0

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def compare_set(self, key: str, expected: str, wanted: str) -> bytes:
        if self.values.get(key, b"") == expected.encode():
            self.set(key, wanted)
        return self.values[key]

    def gone(self) -> dict[int, str]:
        self.asked += 1
        return self.lost


class Clock:
    """Time that passes only when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(patience_module, "time", made)
    return made


def make(store: FakeStore, rank: int = 0, size: int = 3, **options: Any) -> Patience:
    defaults: dict[str, Any] = {"deadline_s": 30.0, "connect": lambda: store, "watched": True}
    made = Patience(rank, size, **{**defaults, **options})
    made.name = lambda other: f"worker {other}"
    return made


def waits(look: Any, clock: Clock, seconds: float, each: float = 1.0) -> None:
    until = clock.now + seconds
    while clock.now < until:
        clock.now += each
        look()


def test_a_notice_comes_after_the_deadline_and_then_ever_more_rarely(clock: Clock) -> None:
    store, said = FakeStore(), []
    patience = make(store)
    patience.say = said.append
    patience.describe = lambda ranks: {1: "computing step 17, model.py:41"}
    store.set("waits/2", Posted((1,)).plain())
    with patience.waiting("a message", 1) as look:
        waits(look, clock, 29)
        assert said == []
        waits(look, clock, 600)
    assert [text.split(" for ")[0].split("waited ")[1] for text in said] == [
        "31 s",
        "61 s",
        "121 s",
        "241 s",
        "8 min",
    ]
    assert said[0] == (
        "workers 0 and 2 have waited 31 s for worker 1 (a message): computing step 17, model.py:41;"
        " the run waits on (--give-up-s S ends it)"
    )
    assert store.values["waits/0"] == b""
    assert store.values["teller"] == b""


def test_a_rank_that_is_cut_off_from_the_board_ends_its_wait(clock: Clock) -> None:
    store = FakeStore()
    patience = make(store, lost_s=60.0)

    def unreachable() -> dict[int, str]:
        raise TransportError("no board of this run answers: Network is unreachable")

    with patience.waiting("all to come together", gives_up=False) as look:
        waits(look, clock, 100)
        store.gone = unreachable
        waits(look, clock, 50)
        store.gone = dict  # the link came back
        waits(look, clock, 100)
        store.gone = unreachable
        with pytest.raises(TransportError, match="it is cut off from the run: no board"):
            waits(look, clock, 70)


def test_one_rank_alone_waits_for_no_other(clock: Clock) -> None:
    """Its process was stopped inside an exchange with itself."""
    store, said = FakeStore(), []
    patience = make(store, size=1, give_up_s=10.0)
    patience.say = said.append
    with patience.waiting("an exchange") as look:
        waits(look, clock, 600)
    assert said == []
    assert store.values == {}


def test_one_rank_tells_for_all_and_another_one_when_the_teller_has_ended(clock: Clock) -> None:
    store, said = FakeStore(), []
    first, second = make(store, 0), make(store, 2)
    first.say = lambda text: said.append((0, text))
    second.say = lambda text: said.append((2, text))
    with second.waiting("a message", 1) as look_2:
        with first.waiting("a message", 1) as look:
            for _ in range(40):
                waits(look, clock, 1)
                look_2()
        assert [rank for rank, _ in said] == [0]
        store.set("teller", "0")  # rank 0 was killed while it waited
        waits(look_2, clock, 60)
    assert [rank for rank, _ in said] == [0, 2]


def test_a_suspended_rank_does_not_count_the_time_in_which_it_stood_still(clock: Clock) -> None:
    store, said = FakeStore(), []
    patience = make(store, give_up_s=60.0)
    patience.say = said.append
    with patience.waiting("a message", 1) as look:
        waits(look, clock, 10)
        clock.now += 3600  # Ctrl-Z, `scontrol suspend`
        waits(look, clock, 10)
        assert said == []
        with pytest.raises(PeerSlow):
            waits(look, clock, 60)


@pytest.mark.parametrize(
    ("options", "limit_s"),
    [
        ({}, float("inf")),
        ({"give_up_s": 90.0}, 90.0),
        ({"watched": False}, UNWATCHED_S),
        ({"watched": False, "give_up_s": 90.0}, 90.0),
    ],
)
def test_a_wait_ends_when_the_user_says_so_or_where_nothing_tells_that_a_rank_lives(
    clock: Clock, options: dict[str, Any], limit_s: float
) -> None:
    store = FakeStore()
    store.set("waits/2", Posted((1,)).plain())  # rank 0 waits for 2, which waits for 1
    with make(store, **options).waiting("a message", 2) as look:
        waits(look, clock, min(limit_s, 7200) - 2)
        if limit_s == float("inf"):
            return
        with pytest.raises(PeerSlow, match="no answer from rank 1 within") as raised:
            waits(look, clock, 10)
    assert (raised.value.rank, raised.value.waited_s) == (1, limit_s)


def test_waits_without_a_limit_of_their_own_end_only_by_the_users(clock: Clock) -> None:
    with make(FakeStore(), watched=False).waiting("all", 1, gives_up=False) as look:
        waits(look, clock, 2 * UNWATCHED_S, 4.0)
    mine = make(FakeStore(), give_up_s=9.0)
    with mine.waiting("all", 1, gives_up=False) as look, pytest.raises(PeerSlow):
        waits(look, clock, 20)
    with make(FakeStore(), give_up_s=9.0).waiting("requests", 1, idle=True) as look:
        waits(look, clock, 100)


def test_a_rank_that_the_store_knows_to_be_gone_ends_the_wait_at_once(clock: Clock) -> None:
    store = FakeStore()
    with make(store).waiting("a message", 2) as look:
        waits(look, clock, 10, 0.1)
        assert store.asked <= 11, "about once a second"
        store.lost = {1: "its host has not answered for 60 s"}
        with pytest.raises(PeerLost, match="rank 1 is gone: its host") as raised:
            waits(look, clock, 2)
    assert raised.value.rank == 1


def test_a_tolerant_rank_minds_only_the_loss_of_those_that_it_waits_for(clock: Clock) -> None:
    store = FakeStore()
    store.lost = {1: "its host has not answered for 60 s"}
    patience = make(store)
    patience.tolerant = True
    with patience.waiting("a message", 2) as look:
        waits(look, clock, 10)
    with patience.waiting("all to come together", [1, 2]) as look, pytest.raises(PeerLost):
        waits(look, clock, 10)


def test_the_others_blame_the_slow_rank_too_when_one_has_given_it_up(clock: Clock) -> None:
    store = FakeStore()
    first, second = make(store, 0, give_up_s=60.0), make(store, 2, give_up_s=60.0)
    with second.waiting("a message", 0) as look_2:
        waits(look_2, clock, 2)
        with first.waiting("a message", 1) as look, pytest.raises(PeerSlow):
            waits(look, clock, 100)
        closed = PeerLost(0, "its connection closed")
        blamed = second.blame(closed)
        with pytest.raises(PeerSlow, match="no answer from rank 1"):
            waits(look_2, clock, 100)  # rank 0, for which it waits, has left
    assert isinstance(blamed, PeerSlow)
    assert blamed.rank == 1
    assert make(FakeStore()).blame(closed) is closed


@pytest.mark.usefixtures("clock")
def test_a_rank_that_left_because_of_another_is_not_blamed() -> None:
    """Rank 1 is killed while rank 0 computes; when rank 0 comes to exchange, rank 2 has left."""
    store = FakeStore()
    store.lost = {1: "its process has ended"}
    blamed = make(store, 2).blame(PeerLost(1, "its connection closed"))
    assert isinstance(blamed, PeerLost)
    assert blamed.rank == 1
    store.lost = {1: "its process has ended", 2: "its process has ended"}
    blamed = make(store, 0).blame(PeerLost(2, "its connection closed"))
    assert str(blamed) == "rank 1 is gone: its process has ended"
    unknown = make(store, 3, size=4).blame(PeerLost(None, "its connection closed"))
    assert str(unknown) == "rank 1 is gone: its process has ended"


def test_a_rank_that_waits_for_one_that_left_blames_the_first(clock: Clock) -> None:
    """Rank 0 waits for rank 2 already, and hears of both ends at once."""
    store = FakeStore()
    with make(store).waiting("a message", 2) as look:
        waits(look, clock, 2)
        store.lost = {1: "its process has ended"}
        with make(store, 2).waiting("a message", 1) as look_2, pytest.raises(PeerLost):
            waits(look_2, clock, 3)
        store.lost = {1: "its process has ended", 2: "its process has ended"}
        with pytest.raises(PeerLost, match="rank 1 is gone: its process has ended"):
            waits(look, clock, 3)


@pytest.mark.usefixtures("clock")
def test_the_cause_is_followed_over_several_ranks() -> None:
    """Each of four ranks notices only that its neighbour has left."""
    store = FakeStore()
    blamed = [make(store, rank, size=4).blame(PeerLost(rank + 1, "closed")) for rank in (2, 1, 0)]
    assert [str(one) for one in blamed] == ["rank 3 is gone: closed"] * 3


@pytest.mark.usefixtures("clock")
def test_ranks_that_blame_each_other_do_not_send_the_others_in_a_circle() -> None:
    """A connection was cut between ranks 0 and 1."""
    store = FakeStore()
    for rank, other in ((0, 1), (1, 0)):
        blamed = make(store, rank).blame(PeerLost(other, "its connection closed"))
        assert isinstance(blamed, PeerLost)
        assert blamed.rank == other
    store.lost = {1: "its process has ended", 0: "its process has ended"}
    blamed = make(store, 2).blame(PeerLost(0, "its connection closed"))
    assert isinstance(blamed, PeerLost)
    assert blamed.rank == 0


def test_a_blocked_call_is_aborted_and_the_verdict_says_why() -> None:
    store, freed = FakeStore(), threading.Event()
    patience = make(store, deadline_s=0.05, give_up_s=0.2)
    store.set("waits/2", Posted((1,)).plain())
    wait = patience.enter("an all-reduce", [1, 2], freed.set)
    try:
        assert freed.wait(30)
    finally:
        patience.leave(wait)
        patience.close()
    assert isinstance(patience.verdict, PeerSlow)
    assert patience.verdict.rank == 1
    assert patience._watcher is None or not patience._watcher.is_alive()


def test_a_loss_frees_a_blocked_call_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience_module, "ASK_S", 0.01)
    store, freed = FakeStore(), threading.Event()
    patience = make(store, deadline_s=0.05)
    wait = patience.enter("a message", 1, freed.set)
    store.lost = {2: "killed"}
    try:
        assert freed.wait(30)
    finally:
        patience.leave(wait)
        patience.close()
    assert isinstance(patience.verdict, PeerLost)
    assert patience.verdict.rank == 2


def test_a_store_that_fails_ends_no_wait(clock: Clock) -> None:
    class Broken(FakeStore):
        def set(self, key: str, value: str) -> None:
            raise RuntimeError("Broken pipe")

    patience = make(Broken())
    with patience.waiting("a message", 1) as look:
        waits(look, clock, 100)
    assert patience.verdict is None

    def refuse() -> Any:
        raise TransportError("no store answers")

    with make(FakeStore(), connect=refuse).waiting("a message", 1) as look:
        waits(look, clock, 100)


def test_what_a_stranger_has_posted_is_left_out(clock: Clock) -> None:
    store, said = FakeStore(), []
    for rank, text in enumerate(("[]", '{"peers": "all"}', '{"peers": [1.5]}', "x", "{}")):
        store.set(f"waits/{rank + 1}", text)
    patience = make(store, size=6)
    patience.say = said.append
    with patience.waiting("a barrier") as look:
        waits(look, clock, 40)
    assert "waited 31 s for workers 1, 2, 3 and 4 (a barrier)" in said[0]


@pytest.mark.parametrize(
    ("waiting", "slow"),
    [
        ({0: (1,)}, [1]),
        ({0: (2,), 2: (1,)}, [1]),  # a ring
        ({0: (3,), 2: (3,), 3: (0, 1, 2)}, [1]),  # a server
        ({0: (), 2: ()}, [1, 3]),  # a barrier
        ({0: (1,), 1: (0,)}, []),  # each other
        ({0: (1,), 2: (3,)}, [1]),  # two pairs of gossip
    ],
)
def test_the_slow_rank_is_found_through_those_that_wait_themselves(
    waiting: dict[int, tuple[int, ...]], slow: list[int]
) -> None:
    posted = {rank: Posted(peers) for rank, peers in waiting.items()}
    assert slow_ranks(posted, 0, 4) == slow
    assert 3 not in who_waits(posted, [1], 4) or 3 in waiting


def test_words() -> None:
    assert listed(["worker 1"]) == "worker 1"
    assert listed(["worker 0", "worker 1", "worker 4"]) == "workers 0, 1 and 4"
    assert listed(["worker 0", "the server (rank 3)"]) == "worker 0 and the server (rank 3)"
    servers = ["the server (rank 3)", "the server (rank 4)"]
    assert listed(["worker 0", "worker 2", *servers]) == (
        "workers 0 and 2, the server (rank 3) and the server (rank 4)"
    )
    assert [duration(s) for s in (0.44, 30, 720, 9000)] == ["0.4 s", "30 s", "12 min", "2.5 h"]


def test_no_wait_costs_nothing_until_it_is_long() -> None:
    def refuse() -> Any:
        raise AssertionError("the store was asked in a short wait")

    patience = make(FakeStore(), connect=refuse)
    began = time.monotonic()
    with patience.waiting("a message", 1) as look:
        for _ in range(100):
            look()
    assert time.monotonic() - began < patience.post_s
