"""The board: keys and values for ranks that know the run's secret, and a notice for all others."""

import errno
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from functools import partial

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.errors import PeerSlow, TransportError
from paceline.launch.apart import listen_for
from paceline.launch.board import Hosted, listen_here
from paceline.launch.start import begin
from paceline.registry import transports
from paceline.transport.base import Rendezvous, Waits
from paceline.transport.board import wire
from paceline.transport.board.client import Board

pytestmark = pytest.mark.processes  # some of them fork
SECRET = b"k" * 32


@pytest.fixture
def board() -> Iterator[Hosted]:
    hosted = Hosted(*listen_here(), 60.0, SECRET)
    yield hosted
    hosted.close()


def rank(board: Hosted, number: int = 0, **more: object) -> Board:
    return Board(board.address, SECRET, number, **more)  # type: ignore[arg-type]


def until(true: object, what: str) -> None:
    end = time.monotonic() + 20
    while not true():  # type: ignore[operator]
        assert time.monotonic() < end, what
        time.sleep(0.005)


def told(board: Hosted) -> list[str]:
    found: list[str] = []
    until(lambda: found.extend(board.notices()) or found, "a notice")
    return found


def plain(board: Hosted) -> socket.socket:
    """A connection of a program that knows the protocol and has read the greeting."""
    line = wire.reach(board.address, 5.0, 60.0)
    assert wire.read_exactly(line, len(wire.GREETING)) == wire.GREETING
    return line


def closed(line: socket.socket) -> bool:
    try:
        return not line.recv(1 << 16)
    except ConnectionError:
        return True


def test_it_is_a_store(board: Hosted) -> None:
    one, other = rank(board, 0), rank(board, 1)
    one.set("a", b"\x00\xff")
    assert other.get("a") == b"\x00\xff"
    assert other.check(["a"])
    assert not other.check(["a", "b"])
    assert [one.add("n", 2), other.add("n", 3), int(one.get("n"))] == [2, 5, 5]
    assert one.compare_set("t", "", "first") == b"first"
    assert other.compare_set("t", "", "second") == b"first"
    assert other.compare_set("t", "first", "") == b""
    assert other.compare_set("u", "x", "y") == b"x"
    assert one.delete_key("a")
    assert not one.delete_key("a")
    assert other.num_keys() == 2
    below = one.under("below")
    below.set("a", "1")
    assert other.get("below/a") == b"1"


def test_a_key_is_waited_for(board: Hosted) -> None:
    one, other = rank(board, 0), rank(board, 1)
    found: list[bytes] = []
    waiter = threading.Thread(target=lambda: found.append(other.get("late")))
    waiter.start()
    other.set("meanwhile", "another thread has a connection of its own")
    one.set("late", "here")
    waiter.join(20)
    assert found == [b"here"]
    with pytest.raises(TransportError, match="never was not on the board within"):
        one.wait(["late", "never"], timedelta(seconds=0.05))


KEYS, VALUES = st.sampled_from("abc"), st.binary(max_size=20)
STEPS = st.one_of(
    st.tuples(st.just("set"), KEYS, VALUES),
    st.tuples(st.just("get"), KEYS, st.none()),
    st.tuples(st.just("delete"), KEYS, st.none()),
    st.tuples(st.just("swap"), KEYS, st.sampled_from(["", "x", "y"])),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1), STEPS), max_size=12))
def test_it_remembers_what_a_dictionary_would(
    board: Hosted, made: list[tuple[int, tuple[str, str, bytes]]]
) -> None:
    """Whichever rank asks."""
    prefix, known = secrets.token_hex(4), dict[str, bytes]()
    ranks = [rank(board, number, wait_s=0.0).under(prefix) for number in range(2)]
    for who, (what, key, value) in made:
        if what == "set":
            ranks[who].set(key, value)
            known[key] = value
        elif what == "delete":
            assert ranks[who].delete_key(key) == (known.pop(key, None) is not None)
        elif what == "swap":
            expected = str(value)
            if known.get(key, b"") == expected.encode():
                known[key] = b"new"
            found = ranks[who].compare_set(key, expected, "new")
            assert found == known.get(key, expected.encode())
        elif key in known:
            assert ranks[who].get(key) == known[key]
        else:
            with pytest.raises(TransportError):
                ranks[who].get(key)


# --- which rank is gone


def test_a_rank_whose_connection_ends_without_a_goodbye_is_gone(board: Hosted) -> None:
    here = rank(board, 0, alive=True)
    if (child := os.fork()) == 0:
        rank(board, 1, alive=True)
        os._exit(0)
    os.waitpid(child, 0)
    until(here.gone, "gone")
    assert here.gone() == {1: "its process has ended"}
    rank(board, 2, alive=True).close()
    again = rank(board, 1, alive=True)  # a launcher has started it again
    assert here.gone() == {}
    again.close()
    here.close()
    assert rank(board, 3).gone() == {}


def test_a_rank_that_fails_leaves_without_a_goodbye(board: Hosted) -> None:
    """So the others know who left first: a server leaves when it has lost a worker."""

    class Connected:
        def __init__(self, number: int) -> None:
            self.store = rank(board, number, alive=True)

        def close(self) -> None:
            self.store.close()

    def fails(_: object) -> None:
        raise MemoryError

    begin(iter([partial(Connected, 1)]), lambda _: None)
    for number in (3, 2):
        with pytest.raises(MemoryError):
            begin(iter([partial(Connected, number)]), fails)
        until(partial(lambda n: n in rank(board).gone(), number), "the board's notice")
    assert list(rank(board).gone()) == [3, 2]


def test_a_loaders_process_does_not_hold_its_ranks_connection(board: Hosted) -> None:
    """A rank forks processes that load data. They may live a moment longer than the rank."""
    watching, (over, end) = rank(board, 0), os.pipe()
    if (child := os.fork()) == 0:
        os.close(end)
        rank(board, 1, alive=True)
        if os.fork() == 0:
            os.read(over, 1)  # until the test closes its end
        os._exit(0)
    os.waitpid(child, 0)
    until(watching.gone, "gone")
    assert list(watching.gone()) == [1]
    os.close(over)
    os.close(end)


def test_a_link_that_comes_back_is_waited_for(
    board: Hosted, monkeypatch: pytest.MonkeyPatch
) -> None:
    reach, away = wire.reach, [errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETUNREACH]

    def with_a_hole(*args: object) -> socket.socket:
        if away:
            raise OSError(number := away.pop(), os.strerror(number))
        return reach(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(wire, "reach", with_a_hole)
    rank(board).set("here", "yes")
    assert not away
    away += [errno.ENETUNREACH] * 1000
    with pytest.raises(TransportError, match=r"no board .* answers at .*unreachable"):
        rank(board, lost_s=0.5).check(["here"])
    known = rank(board)
    away.clear()
    assert known.check(["here"])
    away[:] = [errno.ENETUNREACH] * 2  # a rank that was connected before is cut off: no more tries
    with ThreadPoolExecutor(1) as other, pytest.raises(TransportError, match="unreachable"):
        other.submit(known.check, ["here"]).result()  # each thread connects
    assert len(away) == 1
    away[:] = [errno.ECONNREFUSED] * 2  # the host is there, and no board
    with pytest.raises(TransportError, match="refused"):
        rank(board).check(["here"])
    assert len(away) == 1


def test_what_is_asked_after_the_boards_end_is_an_error(board: Hosted) -> None:
    one = rank(board, 0, alive=True)
    one.set("a", "1")
    board.close()
    with pytest.raises(TransportError, match="the board of this run does not answer"):
        one.get("a")
    with pytest.raises(TransportError, match="no board of this run answers"):
        rank(board, 1).get("a")


# --- strangers


@pytest.mark.parametrize("secret", [b"", b"wrong", SECRET[:-1], SECRET + b"k"])
def test_without_the_secret_nothing_is_read_or_written(board: Hosted, secret: bytes) -> None:
    with pytest.raises(TransportError, match="does not accept this rank's secret"):
        Board(board.address, secret, 0).set("a", "evil")
    assert rank(board).num_keys() == 0
    [notice] = told(board)
    assert "does not know this run's secret has tried to join this run" in notice


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 9,
        b"\x00" * 200,
        wire.HEAD.pack(1 << 30) + b"x" * 100,
        wire.HEAD.pack(2) + b"x" * (wire.NONCE_BYTES + wire.MAC_BYTES) + b"{}",
    ],
)
def test_nonsense_is_turned_away(board: Hosted, sent: bytes) -> None:
    line = plain(board)
    wire.read_exactly(line, wire.NONCE_BYTES)
    line.sendall(sent)
    assert closed(line)
    line.close()
    assert rank(board).num_keys() == 0


def test_what_a_rank_has_sent_cannot_be_sent_again(board: Hosted) -> None:
    """A stranger that has recorded a whole connection replays it, and a message within one."""
    recorded: list[bytes] = []
    own = rank(board)
    own.set("n", "0")
    line = own._lines._own.line._socket
    sealed = own._lines._own.line._sealed
    message = sealed.seal({"do": "add", "key": "n", "value": 1})
    line.sendall(message)
    head = wire.read_exactly(line, wire.HEAD.size + wire.MAC_BYTES)
    wire.read_exactly(line, wire.HEAD.unpack_from(head)[0])
    line.sendall(message)  # the same bytes once more
    assert closed(line)
    assert rank(board, 1).get("n") == b"1"

    first = plain(board)
    of_board, of_rank = wire.read_exactly(first, wire.NONCE_BYTES), wire.nonce()
    recorded.append(wire.hello(SECRET, of_board, of_rank, {"rank": 1, "alive": True}))
    first.sendall(recorded[0])
    wire.read_exactly(first, wire.MAC_BYTES)
    replay = plain(board)
    wire.read_exactly(replay, wire.NONCE_BYTES)
    replay.sendall(recorded[0])
    assert closed(replay)
    for one in (first, replay):
        one.close()


def test_a_changed_message_ends_its_connection(board: Hosted) -> None:
    own = rank(board, 1, alive=True)
    own.set("a", "1")
    line = own._lines._own.line
    message = bytearray(line._sealed.seal({"do": "set", "key": "a", "value": wire.text("2")}))
    message[-3] ^= 1
    line._socket.sendall(bytes(message))
    assert closed(line._socket)
    assert rank(board).get("a") == b"1"


def test_a_flood_of_strangers_keeps_no_rank_out(board: Hosted) -> None:
    own = rank(board)
    own.set("a", "1")
    lines = [wire.reach(board.address, 5.0, 60.0) for _ in range(300)]
    assert own.get("a") == b"1"
    assert rank(board, 1).get("a") == b"1", "a rank that comes later gets in"
    for line in lines:
        line.close()
    assert own.get("a") == b"1"
    notices = told(board)
    assert len(notices) == 1, "however many there are"


def test_a_rank_tells_nothing_to_a_board_that_does_not_know_the_secret() -> None:
    listening, address = listen_here()

    def pretend() -> None:
        line = listening.accept()[0]
        line.sendall(wire.GREETING + b"n" * wire.NONCE_BYTES)
        line.recv(1 << 12)
        line.sendall(b"m" * wire.MAC_BYTES)
        line.close()

    thread = threading.Thread(target=pretend)
    thread.start()
    with pytest.raises(TransportError, match="it does not know this run's secret"):
        Board(address, SECRET, 0).get("a")
    thread.join()
    listening.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_of_this_host_is_turned_away_at_once(board: Hosted) -> None:
    if (child := os.fork()) == 0:
        os.setuid(65534)
        line = wire.reach(board.address, 5.0, 60.0)
        os._exit(0 if closed(line) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    [notice] = told(board)
    assert notice == "another user of this host has tried to join this run and was turned away"


def test_the_secret_is_in_no_text(board: Hosted) -> None:
    from paceline.launch.board import rendezvous_for
    from paceline.transport.base import WAITS

    found = rendezvous_for(board, None, 0, 2, WAITS)
    assert SECRET.hex() not in repr(found)
    assert repr(SECRET)[2:-1] not in repr(found)


@pytest.mark.timeout(25)  # gloo itself would wait for 30 s more
@pytest.mark.parametrize("ended", [None, frozenset])
def test_a_rank_that_does_not_connect_is_given_up(board: Hosted, ended: object) -> None:
    """gloo waits for its address on the board, where closing a connection does not free it."""
    waits = Waits(0.1, give_up_s=0.5)
    said: list[str] = []
    meeting = Rendezvous(0, 2, board.address, SECRET, waits, watched=True, say=said.append)
    with pytest.raises(PeerSlow) as told:
        transports.entry("gloo").make.connect(replace(meeting, ended=ended))
    assert told.value.rank == 1
    assert "waited" in said[0]


@pytest.mark.parametrize(
    ("host", "resolved", "address"),
    [
        ("127.0.0.3", "127.0.0.3", "127.0.0.3"),
        ("localhost", "127.0.0.1", "127.0.0.1"),
        ("this-host", "127.0.1.1", "0.0.0.0"),  # other hosts may resolve it to another one
    ],
)
def test_only_a_name_that_others_may_know_as_another_address_needs_all_addresses(
    host: str, resolved: str, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = (socket.AF_INET, socket.SOCK_STREAM, 6, "", (resolved, 0))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [entry])
    opened: list[object] = []
    real = socket.create_server

    def open_on_loopback(where: tuple[str, int], **more: int) -> socket.socket:
        opened.append(where[0])
        return real(("127.0.0.1", 0), **more)

    monkeypatch.setattr(socket, "create_server", open_on_loopback)
    listening, _ = listen_for(host)
    listening.close()
    assert opened == [address]
