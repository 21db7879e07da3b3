"""What can be said about Ray without Ray: addresses, seats, lines, lost ranks."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import paceline
from paceline.errors import BadRequest
from paceline.launch import ray as launcher
from paceline.launch.ray import Heard, lost_ranks
from paceline.launch.ray_desk import Desk
from paceline.launch.ray_rank import Lines
from paceline.launch.seat import RAY_RUN, RAY_WORKER, find
from paceline.launch.signals import Ending
from paceline.ray.session import check_address, not_connected
from paceline.request.config import Config
from paceline.request.prepare import prepare

SEAT = {
    "RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4711",
}  # fmt: skip


def test_without_ray_a_sentence_says_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    for start in (paceline.ray_train, lambda **o: paceline.train(launcher="ray", **o)):
        with pytest.raises(BadRequest, match=r"pip install 'paceline\[ray\]'"):
            start(data="fashion-mini", model="mlp:hidden=8", workers=2, progress=False)


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("somewhere", "write host:port"),
        ("a:b", "write host:port"),
        ("ray://head:10001", "must run on a node of the cluster"),
        ("127.0.0.1:1", "no Ray cluster answers there"),
        ("127.0.0.1:123456", "no Ray cluster answers there"),
    ],
)
def test_addresses_that_cannot_be_used(address: str, why: str) -> None:
    with pytest.raises(BadRequest, match=why):
        check_address(address)


def test_addresses_that_ray_itself_looks_up() -> None:
    check_address("auto")
    check_address("local")


def test_ray_says_that_there_is_no_cluster_or_why_it_cannot_be_used() -> None:
    assert "no node of a running Ray cluster" in str(not_connected("auto", ConnectionError("?")))
    other = not_connected("10.0.0.1:6379", RuntimeError("Version mismatch: 3.11 and 3.12\nmore"))
    assert "master=10.0.0.1:6379 cannot be used: Version mismatch: 3.11 and 3.12." in str(other)
    assert "could not be started here" in str(not_connected("local", OSError("no memory")))


def test_the_seat_of_a_worker_of_ray_train() -> None:
    seat = find({**SEAT, RAY_WORKER: "17", RAY_RUN: "ray-1"})
    assert seat is not None
    assert (seat.launcher, seat.rank, seat.size, seat.agent) == ("ray", 1, 3, "ray-1")
    assert seat.store_exists  # MASTER_PORT is taken: no second store is opened there
    assert not seat.meets_on_loopback
    under_torchrun = find({**SEAT, RAY_WORKER: "17", "TORCHELASTIC_RUN_ID": "none"})
    assert under_torchrun is not None
    assert under_torchrun.launcher == "torchrun"


def test_lost_ranks_are_named_and_those_that_noticed_are_not() -> None:
    dead = RuntimeError("The actor died unexpectedly before finishing this task.\n pid: 7")
    assert lost_ranks({0: RuntimeError("rank 1 is gone"), 1: dead}) == (
        "Ray lost rank 1 (its process ended)"
    )
    node = RuntimeError("The actor died because its node has died. Node Id: 8")
    assert lost_ranks({0: node, 2: node}) == (
        "Ray lost rank 0 (its node is gone), rank 2 (its node is gone)"
    )
    away = RuntimeError("A worker health check failed.\nThe actor 8 is unavailable: its rpc failed")
    assert lost_ranks({1: away}) == "Ray lost rank 1 (it or its node no longer answers)"
    noticed = RuntimeError("worker 0: no answer from rank 1\nmore")
    assert lost_ranks({0: noticed}) == "Ray lost a rank: worker 0: no answer from rank 1"


class Local:
    """A desk in this process, called as an actor is."""

    def __init__(self) -> None:
        self.desk = Desk()
        self.tell = self

    def remote(self, *given: Any) -> None:
        self.desk.tell(*given)


def test_whole_lines_of_a_rank_reach_the_driver_without_control_characters() -> None:
    local, shown = Local(), []
    lines = Lines(local)
    lines.write("step 1")
    assert local.desk.take() == []
    lines.write("  loss 2\nnext \x1b[31m")
    lines.end()
    heard = Heard()
    for told in local.desk.take():
        heard.take(*told, lambda kind, content: shown.append((kind, content["text"])))
    assert shown == [("line", "step 1  loss 2"), ("line", "next \ufffd[31m")]


def test_the_failure_of_rank_0_is_the_one_that_is_raised() -> None:
    heard = Heard()
    for rank, words in ((2, "rank 2: its own"), (0, "worker 1: nan")):
        content = {"rank": rank, "error": {"error": "RunFailed", "arguments": [words]}}
        heard.take("failed", content, lambda kind, told: None)
    assert str(heard.failure) == "worker 1: nan"


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"launcher": "spark"}, "ray_train has Ray for a launcher"),
        ({"max_failures": -1}, "0 or more"),
        ({"callbacks": [paceline.Callback()]}, "launcher=ray"),
        ({"nosuch": 1}, "unknown option"),
    ],
)
def test_ray_train_refuses(wrong: dict[str, Any], why: str) -> None:
    with pytest.raises(BadRequest, match=why):
        paceline.ray_train(data="fashion-mini", model="mlp:hidden=8", **wrong)


def test_a_master_needs_a_cluster() -> None:
    with pytest.raises(BadRequest, match="launcher=spark or launcher=ray"):
        paceline.train(data="fashion-mini", master="10.0.0.1:6379")


def test_a_desk_that_is_busy_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that comes late is awaited: what it hands over is no longer at the desk."""

    class Late(Exception):
        pass

    record = ("record", {"status": "completed"})
    answers: list[Any] = [Late(), Late(), [record], []]

    def get(answer: Any, timeout: float) -> Any:
        asked.append(answer)
        if isinstance(found := answers.pop(0), Exception):
            raise found
        return found

    asked: list[Any] = []
    numbers = iter(range(100))
    desk = SimpleNamespace(take=SimpleNamespace(remote=lambda: next(numbers)))
    errors = SimpleNamespace(RayError=Late, GetTimeoutError=Late)
    session: Any = SimpleNamespace(
        ray=SimpleNamespace(get=get, exceptions=errors, kill=lambda actor: None)
    )
    waiting: Any = SimpleNamespace(look=lambda begun: None)
    monkeypatch.setattr(launcher, "TAKE_S", 0.001)
    heard = Heard()
    hearing = launcher._Hearing(session, desk, heard, lambda kind, content: None, waiting, Ending())
    hearing._over.set()
    hearing.run()
    assert heard.record == {"status": "completed"}
    assert asked == [0, 0, 0]


@pytest.mark.parametrize("transport", ["simulated", "inproc"])
@pytest.mark.parametrize("name", ["ray", "spark"])
def test_ranks_of_a_cluster_are_no_threads_of_one_process(name: str, transport: str) -> None:
    asked = {"data": "fashion-mini", "workers": 2, "launcher": name, "transport": transport}
    with pytest.raises(BadRequest, match="has all ranks in one"):
        prepare(Config.make(asked), lambda _: Path("out"))
