"""`paceline train` inside torchrun, mpirun and srun becomes one rank and starts no others.

test_same_weights.py checks that the weights are the same under all of them.
"""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from tests import commands
from tests.commands import PACELINE, SMALL_TRAIN
from tests.conftest import make_pairs, small_net

import paceline
from paceline.api import make_job
from paceline.errors import BadRequest
from paceline.launch import joined
from paceline.launch.addresses import address_towards, reachable
from paceline.launch.board import Hosted, board_for, listen_here, rendezvous_for
from paceline.launch.folder import claim
from paceline.launch.joined import Meeting
from paceline.launch.seat import Seat, find, first_host, tasks_on_node
from paceline.privacy.ledger import LedgerEntry, write_entries
from paceline.record import checkpoint
from paceline.record.machine import cores
from paceline.transport.base import WAITS
from paceline.transport.board.client import Board
from paceline.transport.c10d.gloo import GlooTransport
from paceline.transport.mpi.transport import MpiTransport, mpirun

BIN = Path(sys.executable).parent
TRAIN = [*SMALL_TRAIN, "--memory-format", "contiguous"]
MPI = pytest.mark.skipif(not MpiTransport.available(), reason="no MPI here")


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, **environment},
        check=False,
    )


def under_mpirun(size: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return run(
        str(mpirun()),
        *root,
        "--oversubscribe",
        "-n",
        str(size),
        str(PACELINE),
        *TRAIN,
        *arguments,
    )


@pytest.mark.slow
@MPI
def test_a_number_of_workers_that_contradicts_the_launcher(tmp_path: Path) -> None:
    done = under_mpirun(2, "--workers", "3", "--out", "run")
    assert done.returncode == 2
    assert done.stderr.count("workers=3, but mpirun has started 2 processes") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_rank_dies_under_torchrun(tmp_path: Path) -> None:
    torchrun = [
        str(BIN / "torchrun"),
        "--standalone",
        "--nproc-per-node",
        "2",
        str(PACELINE),
    ]
    done = run(*torchrun, *TRAIN, "--out", "run", "--faults", "die:rank=1,step=3")
    assert done.returncode != 0
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    # torchrun may end rank 0 before rank 0 notices that rank 1 is gone.
    by_torchrun = record["status"] == "interrupted" and "ended by torchrun" in record["error"]
    assert by_torchrun or (record["status"] == "failed" and "rank 1 is gone" in record["error"])
    assert done.stderr.count("paceline: ") == 1


def slurm(rank: int, size: int = 2) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "5",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_STEP_TASKS_PER_NODE": str(size),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
    }


def test_a_study_is_not_run_by_every_rank() -> None:
    told = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    done = commands.run(
        [PACELINE, "study", "--short", "--out", "s"],
        capture_output=True,
        text=True,
        env={**os.environ, **told},
    )
    assert done.returncode == 2
    assert "starts its own workers" in done.stderr


def test_seats() -> None:
    assert find({}) is None
    # a batch script is no task
    assert find({"SLURM_JOB_ID": "5", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}) is None
    seat = find(
        {
            "OMPI_COMM_WORLD_RANK": "3",
            "OMPI_COMM_WORLD_SIZE": "8",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
        }
    )
    assert seat is not None
    assert (seat.launcher, seat.rank, seat.size, seat.local_size) == ("mpirun", 3, 8, 4)
    assert seat.fit({})["transport"] == "gloo"  # two hosts
    seat = find(
        slurm(1)
        | {
            "SLURM_STEP_NODELIST": "node[07-09,12],other",
            "SLURM_STEP_TASKS_PER_NODE": "4(x2),3",
        }
    )
    assert seat is not None
    assert (seat.launcher, seat.host, seat.local_size) == ("srun", "node07", 4)
    with pytest.raises(BadRequest, match=r"inside mpirun, but the variables .* are incomplete"):
        find({"OMPI_COMM_WORLD_RANK": "3"})
    with pytest.raises(BadRequest, match="leave workers out"):
        Seat("mpirun", 0, 4, 0, 4).fit({"workers": 3})
    assert Seat("mpirun", 0, 4, 0, 4).fit({"workers": 3, "servers": 1})["workers"] == 3
    # one rank is a server
    assert Seat("mpirun", 0, 4, 0, 4).fit({"workers": 3, "strategy": "ps"})["workers"] == 3
    with pytest.raises(BadRequest, match="1 would be server"):
        Seat("mpirun", 0, 1, 0, 1).fit({"strategy": "ps"})
    # the options of a run that is resumed
    saved = {"workers": 8, "threads": 2, "transport": "shm", "strategy": "allreduce", "lr": 0.5}
    assert Seat("mpirun", 0, 4, 0, 2).fit({"lr": 0.1}, saved) == {
        "workers": 4, "threads": max(1, cores() // 2), "transport": "gloo",
        "strategy": "allreduce", "lr": 0.1, "launcher": "mpirun",
    }  # fmt: skip


def test_the_agent_of_torchrun_stays_the_same_when_it_starts_ranks_again() -> None:
    env = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "h",
        "MASTER_PORT": "1",
        "TORCHELASTIC_RUN_ID": "none",
    }
    first = find(
        env | {"TORCHELASTIC_ERROR_FILE": "/tmp/torchelastic_a/none_b/attempt_0/0/error.json"}
    )
    again = {
        "TORCHELASTIC_ERROR_FILE": "/tmp/torchelastic_a/none_b/attempt_1/0/error.json",
        "TORCHELASTIC_RESTART_COUNT": "1",
    }
    second, neither = find(env | again), find(env | {"TORCHELASTIC_ERROR_FILE": ""})
    assert first is not None
    assert second is not None
    assert neither is not None
    assert (first.agent, second.agent, neither.agent) == (
        "/tmp/torchelastic_a/none_b",
        "/tmp/torchelastic_a/none_b",
        "",
    )
    assert (first.restarts, second.restarts) == (0, 1)


# --- ranks that are started again, by a launcher whose store lives on


AGENTS: list["Agent"] = []


@pytest.fixture(autouse=True)
def no_agent_stays() -> Iterator[None]:
    yield
    while AGENTS:
        AGENTS.pop().board.close()


class Agent:
    """A launcher that hosts a board, with ranks as threads that meet there and call a function."""

    def __init__(self, name: str = "agent") -> None:
        self.name = name
        self.board = Hosted(*listen_here(), 60.0)
        AGENTS.append(self)
        self.store = Board(self.board.address, self.board.secret, 99)

    def start(
        self, rank: int, size: int, ask: Callable[[Meeting], Any], restarts: int = 0
    ) -> Future[Any]:
        seat = Seat(
            "torchrun",
            rank,
            size,
            rank,
            size,
            agent=self.name,
            restarts=restarts,
            secret=self.board.secret,
            board=self.board.address,
        )
        future: Future[Any] = Future()

        def body() -> None:
            try:
                future.set_result(ask(Meeting(seat)))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=body, daemon=True).start()
        return future

    def meet(self, size: int, ask: Callable[[Meeting], Any], restarts: int = 0) -> list[Any]:
        return [
            future.result(20)
            for future in [self.start(r, size, ask, restarts) for r in range(size)]
        ]


@pytest.fixture
def new_processes(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    return lambda: monkeypatch.setattr(joined, "THIS_PROCESS", uuid4().hex)


def number(meeting: Meeting) -> tuple[int, int]:
    return meeting.rendezvous.generation, len(meeting.present)


def test_every_meeting_has_a_number_of_its_own_whatever_the_store_remembers() -> None:
    agent = Agent()
    assert agent.meet(3, number) == [(1, 3)] * 3
    before = agent.store.get("paceline/1/here/1")
    early = agent.start(1, 2, number)  # finds only the meeting that is over
    until = time.monotonic() + 20
    while agent.store.get("paceline/1/here/1") == before and time.monotonic() < until:
        time.sleep(0.01)
    assert not early.done()
    assert agent.start(0, 2, number).result(20) == (2, 2)
    assert early.result(20) == (2, 2)


def test_ranks_that_are_started_again_go_on_with_their_own_run_only(
    tmp_path: Path, new_processes: Callable[[], None]
) -> None:
    agent, out = Agent(), tmp_path / "run"
    options = {"out": str(out), "lr": 0.1}
    go_on = {**options, "resume": str(out / "checkpoints" / "step-00000020")}

    def ask(meeting: Meeting) -> tuple[dict[str, Any], list[str]]:
        return meeting.going_on(options).applied(options), meeting.notices

    def mark(meeting: Meeting) -> None:
        if meeting.leads:
            meeting.mark(out)

    for step, workers in ((10, 2), (20, 2), (30, 0)):  # the last was rescued by one worker, alone
        said = {"step": step, "workers": workers, "train_s": 0.0, "optimizer": "SGD", "samples": 1}
        (out / "checkpoints" / f"step-000000{step}").mkdir(parents=True)
        (out / "checkpoints" / f"step-000000{step}" / "checkpoint.json").write_text(
            json.dumps(said)
        )
    assert agent.meet(2, ask, restarts=1) == [(options, [])] * 2  # no mark says whose run it is
    agent.meet(2, mark)
    # In the same processes this is a second run, not the same one again.
    assert agent.meet(2, ask) == [(options, [])] * 2
    new_processes()
    assert Agent("another").meet(2, ask, restarts=1) == [(options, [])] * 2
    # No restart is counted, as when a host has joined.
    (first, notices), (second, silence) = agent.meet(2, ask)
    assert first == second == go_on
    assert len(notices) == 1
    assert "going on from" in notices[0]
    assert silence == []
    other = Agent("another")
    other.name = "agent"  # another store, and another number of ranks
    assert [found for found, _ in other.meet(3, ask)] == [go_on] * 3


def test_what_one_worker_rescues_does_not_replace_what_all_have_made(tmp_path: Path) -> None:
    whole = tmp_path / "step-00000020"
    (whole / "worker-1.pt").mkdir(parents=True)
    assert checkpoint.save(tmp_path, 20, 0, {}, {}, {"workers": 0}, lambda: None) == whole
    assert [p.name for p in whole.iterdir()] == ["worker-1.pt"]


def test_a_restart_without_a_folder_says_what_would_help() -> None:
    agent = Agent()
    assert agent.meet(1, lambda m: (m.going_on({}), m.notices)) == [({}, [])]
    [(options, notices)] = agent.meet(1, lambda m: (m.going_on({}), m.notices), restarts=1)
    assert options == {}
    assert "--out and --checkpoint-every" in notices[0]


def test_every_worker_knows_the_hosts_of_all_workers(tmp_path: Path) -> None:
    def ask(meeting: Meeting) -> tuple[str, ...]:
        options = {"data": (make_pairs(60), None), "model": small_net, "workers": 2}
        job = make_job({**options, "transport": "gloo", "out": str(tmp_path / "run")})
        return meeting.claim(job, claim).hosts

    assert Agent().meet(3, ask) == [(socket.gethostname(),) * 2] * 3  # the third serves


def test_beginning_again_is_a_session_of_its_own_unless_that_would_spend_a_budget_twice(
    tmp_path: Path,
) -> None:
    out = tmp_path / "run"
    options = {
        "data": (make_pairs(60), make_pairs(20, seed=1)),
        "model": small_net,
        "transport": "inproc",
        "steps": 2,
    }
    options["out"] = str(out)
    paceline.train(**options, progress=False)
    job = make_job(options)
    with pytest.raises(BadRequest, match="holds a run already"):
        claim(job)
    assert claim(job, restarted=lambda out: True).number == 1
    job = replace(job, protection=object())  # type: ignore[arg-type]
    write_entries(
        out / "privacy" / "worker-0.json", [LedgerEntry(session=0, noise=1.0, rate=0.1, steps=2)]
    )
    with pytest.raises(BadRequest, match="started again before its first checkpoint"):
        claim(job, restarted=lambda out: True)


def test_what_a_transport_puts_into_the_store_is_of_one_meeting_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    board = board_for(None, 60.0)
    monkeypatch.setattr(GlooTransport, "make_group", lambda self, store: None)
    first, second = (
        GlooTransport.connect(replace(rendezvous_for(board, None, 0, 1, WAITS), generation=number))
        for number in (1, 2)
    )
    first.store.set("ddp", "here")  # PyTorch's DDP meets there
    assert not second.store.check(["ddp"])
    board.close()


def test_the_address_that_others_can_reach() -> None:
    assert address_towards("127.0.0.1", 1) == "127.0.0.1"
    assert address_towards("no such host.", 1) == "no such host."
    assert reachable("127.0.0.1", ["127.0.0.1", "127.0.0.1"]) == "127.0.0.1"
    assert reachable("10.0.0.7", ["127.0.0.1", "10.0.0.7"]) == "10.0.0.7"


def test_slurm_shorthand() -> None:
    assert [first_host(n) for n in ("a", "a,b", "n[1-3]", "n[07,9]", "gpu-n03.x")] == [
        "a",
        "a",
        "n1",
        "n07",
        "gpu-n03.x",
    ]
    assert [tasks_on_node("4(x2),3", n) for n in range(3)] == [4, 4, 3]
