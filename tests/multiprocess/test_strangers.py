"""Strangers who reach this machine or the user's files can do nothing to a run.

The numbers are those of issue 15.
"""

import json
import os
import pickle
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.commands import PACELINE, Popen, run
from tests.conftest import make_pairs
from torch import Tensor, nn

import paceline
from paceline.common.cores import cores
from paceline.common.sealing import seal, unseal
from paceline.doctor.machine import _gloo
from paceline.errors import (
    BY_NAME,
    BadRequest,
    DataCorrupt,
    PacelineError,
    PeerLost,
    RunFailed,
    TransportError,
    UnknownName,
    WorkerFailed,
    from_plain,
    to_plain,
)
from paceline.launch.board import Hosted, listen_here
from paceline.launch.joined import Meeting
from paceline.launch.present import Present
from paceline.launch.script import launch
from paceline.launch.seat import Seat, find
from paceline.launch.secret import secret_of
from paceline.transport.board.client import Board
from paceline.transport.mpi.transport import MpiTransport

BIN = Path(sys.executable).parent


class Evil:
    """Would leave a file if it were unpickled."""

    def __reduce__(self) -> Any:
        return (open, ("ran-by-pickle", "w"))


# --- 1: nothing unpickles what a stranger can write


@pytest.mark.parametrize(
    "error",
    [
        BadRequest("lr=-1: it must be 0 or more"),
        UnknownName("model", "cnm", ["cnn", "mlp"], "Your own: package.module:factory."),
        PeerLost(2, "its connection closed"),
        WorkerFailed(1, "ValueError: x", "Traceback ..."),
        DataCorrupt("a file"),
    ],
)
def test_01_errors_travel_as_names_and_arguments(error: PacelineError) -> None:
    again = from_plain(json.loads(json.dumps(to_plain(error))))
    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))


def test_01_an_error_that_is_not_ours_travels_as_the_nearest_that_is() -> None:
    class OfAPlugin(RunFailed):
        pass

    again = from_plain(to_plain(OfAPlugin("no luck")))
    assert (type(again), str(again)) == (RunFailed, "no luck")
    changed = PeerLost(1)
    changed.args = ("worker 0: rank 1 is gone",)
    assert str(from_plain(to_plain(changed))) == "worker 0: rank 1 is gone"


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda x: st.lists(x, max_size=3),
)


@given(st.sampled_from([*BY_NAME, "eval", "__import__"]), ANYTHING)
def test_01_whatever_a_stranger_writes_becomes_an_error_of_ours(name: str, arguments: Any) -> None:
    assert isinstance(from_plain({"error": name, "arguments": arguments}), PacelineError)
    assert isinstance(from_plain(arguments), PacelineError)
    with pytest.raises((TypeError, ValueError)):
        Present.read(arguments)


@pytest.mark.parametrize(
    "content", [pickle.dumps(Evil()).hex(), json.dumps({"ticket": 1}), "[]", "7"]
)
def test_01_what_is_no_rank_on_the_board_is_refused(content: str, tmp_path: Path) -> None:
    """Even a rank of the run, which knows its secret, can make another one run nothing."""
    board = Hosted(*listen_here(), 60.0)
    Board(board.address, board.secret, 1).set("paceline/1/here/1", content)
    with pytest.raises(TransportError, match="was not written by a rank of this run"):
        Meeting(seats_at(board)[0])
    board.close()
    assert not (tmp_path / "ran-by-pickle").exists()


def test_01_a_record_of_a_stranger_executes_nothing(tmp_path: Path) -> None:
    """attack.md 1.1: the key that every rank but 0 reads at the end, written at any time."""
    board = Hosted(*listen_here(), 60.0)
    seats = seats_at(board)
    found: dict[int, Any] = {}
    threads = [
        threading.Thread(target=lambda r=r: found.update({r: Meeting(seats[r])}), daemon=True)
        for r in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    found[1]._store.set("recorded", pickle.dumps(Evil()).hex())
    with pytest.raises(TransportError, match="was not written by a rank"):
        found[1].recorded()
    board.close()
    assert not (tmp_path / "ran-by-pickle").exists()


def seats_at(board: Hosted) -> list[Seat]:
    """Two ranks of a launcher that hosts the board."""
    return [
        Seat("torchrun", rank, 2, rank, 2, secret=board.secret, board=board.address)
        for rank in range(2)
    ]


def test_01_a_servers_model_is_opened_only_with_the_runs_secret() -> None:
    sealed = seal(b"s" * 32, b"content")
    assert unseal(b"s" * 32, sealed) == b"content"
    for secret, what in (
        (b"t" * 32, sealed),
        (b"", sealed),
        (b"s" * 32, sealed[:-1] + b"x"),
        (b"s" * 32, b"short"),
    ):
        with pytest.raises(TransportError, match="secret"):
            unseal(secret, what)


def test_01_a_secret_comes_by_environment_or_from_a_file_of_the_user(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("0123456789abcdef0123\n")
    path.chmod(0o644)
    with pytest.raises(BadRequest, match="chmod 600"):
        secret_of({"PACELINE_SECRET_FILE": str(path)})
    path.chmod(0o600)
    assert secret_of({"PACELINE_SECRET_FILE": str(path)}) == b"0123456789abcdef0123"
    assert secret_of({"PACELINE_SECRET": "ab" * 32}) == b"\xab" * 32
    assert secret_of({}) == b""
    path.write_text("short")
    with pytest.raises(BadRequest, match="16 or more"):
        secret_of({"PACELINE_SECRET_FILE": str(path)})


SERVED = """
import sys, torch, paceline
from torch import nn
def make():
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)
pace = paceline.join("ps", build=make if "build" in sys.argv else None)
inputs = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))
model, optimizer, batches = pace.prepare(*make(), (inputs, torch.arange(64) % 3), batch_size=4)
for x, y in batches:
    pace.step(nn.functional.cross_entropy(model(x), y))
pace.finish()
print("weights", float(model.weight.sum()), flush=True)
"""


@pytest.mark.slow
def test_01_a_server_gets_the_model_under_torchrun_too(tmp_path: Path) -> None:
    """On one host rank 0 hands the run's secret over in a file that only this user can read."""
    (tmp_path / "served.py").write_text(SERVED)
    torchrun = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2", "served.py"]
    said = [
        subprocess.run(
            [*torchrun, *more], capture_output=True, text=True, timeout=100, check=True
        ).stdout
        for more in ([], ["build"])
    ]
    launched = run(
        [PACELINE, "launch", "-n", "2", "served.py"],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert "weights" in launched.stdout
    assert said == [launched.stdout] * 2


def test_01_ranks_on_several_hosts_do_not_meet_without_a_secret(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As torchrun starts them, unless the user names a file or says --insecure."""
    seat = Seat("torchrun", 0, 2, 0, 1, "127.0.0.1", 1, True)
    monkeypatch.setattr("paceline.launch.join.find_seat", lambda: seat)
    with pytest.raises(BadRequest, match=r"hands over no secret .* PACELINE_SECRET_FILE"):
        paceline.join("allreduce", transport="gloo")


# --- 2: nothing listens beyond loopback when all ranks are on one host


def listening(process: psutil.Process) -> dict[str, set[str]]:
    """Return the addresses that a process and its children listen on, by program."""
    found: dict[str, set[str]] = {}
    for one in [process, *process.children(recursive=True)]:
        try:
            for connection in one.net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN:
                    found.setdefault(one.name(), set()).add(connection.laddr.ip)
        except psutil.Error:
            continue
    return found


class Spy(nn.Linear):
    """Writes down, in its sixth step, what all processes of the run listen on."""

    def __init__(self) -> None:
        super().__init__(6, 3)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        if self.training and self.calls == 6:
            seen = listening(psutil.Process(int(os.environ["SPIED_ON"])))
            Path(f"ports-{os.getpid()}").write_text(
                json.dumps({name: sorted(where) for name, where in seen.items()})
            )
        return super().forward(x)


def spied(folder: Path) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    assert list(folder.glob("ports-*")), "a rank has looked"
    for path in folder.glob("ports-*"):
        for name, where in json.loads(path.read_text()).items():
            found.setdefault(name, set()).update(where)
    return found


@pytest.mark.parametrize(
    ("strategy", "transport"),
    [("allreduce", "shm"), ("ddp", "gloo"), ("ps", "gloo"), ("ddp", "shm")],
)
def test_02_a_local_run_listens_on_loopback_only(
    strategy: str, transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPIED_ON", str(os.getpid()))
    paceline.train(
        model=Spy, data=(make_pairs(80), None), strategy=strategy, transport=transport,
        workers=2, steps=8, batch_size=4, threads=1, progress=False, out="run",
    )  # fmt: skip
    over_network = {"127.0.0.1"} if "gloo" in transport or strategy == "ddp" else set()
    assert set().union(*spied(tmp_path).values()) == over_network


@pytest.mark.slow
@pytest.mark.skipif(not MpiTransport.available(), reason="no MPI here")
def test_02_ranks_over_mpi_listen_on_loopback_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mpirun's own ports are Open MPI's: it cannot be told to keep them to loopback
    (docs/clusters.md says so).
    """
    monkeypatch.setenv("SPIED_ON", str(os.getpid()))
    paceline.train(
        model=Spy, data=(make_pairs(80), None), transport="mpi",
        workers=2, steps=8, batch_size=4, threads=1, progress=False, out="run",
    )  # fmt: skip
    assert set().union(
        *(where for name, where in spied(tmp_path).items() if name != "prterun")
    ) <= {"127.0.0.1"}


@pytest.mark.slow  # the trials of tests/faults look at such a loop, too
def test_02_a_loop_under_paceline_launch_listens_on_loopback_only(tmp_path: Path) -> None:
    look = """
import json, os, psutil
family = [psutil.Process(os.getppid()), *psutil.Process(os.getppid()).children()]
open_ones = [(one.name(), c) for one in family for c in one.net_connections("inet")]
found = [(name, c.laddr.ip) for name, c in open_ones if c.status == psutil.CONN_LISTEN]
by_name = {name: [ip for n, ip in found if n == name] for name, _ in found}
open(f"ports-{os.getpid()}", "w").write(json.dumps(by_name))
"""
    (tmp_path / "loop.py").write_text(
        SERVED.replace('join("ps"', 'join("ps", transport="gloo"').replace(
            "pace.finish()", look + "pace.finish()"
        )
    )
    run([PACELINE, "launch", "-n", "2", "loop.py"], check=True)
    assert set().union(*spied(tmp_path).values()) == {"127.0.0.1"}


def test_02_ranks_of_a_launcher_on_one_host_listen_on_no_network() -> None:
    before = listening(psutil.Process())
    Meeting(Seat("srun", 0, 1, 0, 1, socket.gethostname(), key="slurm-7.0.0"))
    assert listening(psutil.Process()) == before
    told = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "node7", "MASTER_PORT": "1"}
    unknown, known = find(told), find({**told, "LOCAL_WORLD_SIZE": "2"})
    assert unknown is not None
    assert known is not None
    assert not unknown.meets_on_loopback, "nothing says that all ranks are here"
    assert known.meets_on_loopback


@pytest.mark.native_threads
def test_02_doctor_listens_on_loopback_only() -> None:
    seen: list[dict[str, set[str]]] = []
    real, done = threading.Event(), threading.Event()

    def look() -> None:
        real.set()
        while not done.is_set():
            seen.append(listening(psutil.Process()))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    real.wait()
    assert _gloo().ok
    done.set()
    thread.join()
    assert set().union(*(a for s in seen for a in s.values())) <= {"127.0.0.1"}


# --- 3: a launcher that is killed leaves no rank behind; a run's folder is not a program


def test_03_ranks_end_with_their_launcher(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(
        "import os, signal\nos.write(1, b'%d\\n' % os.getpid())\nsignal.pause()\n"
    )
    with Popen(
        [PACELINE, "launch", "-n", "2", "loop.py"], stdout=subprocess.PIPE, text=True
    ) as launcher:
        assert launcher.stdout is not None
        ranks = [psutil.Process(int(launcher.stdout.readline())) for _ in range(2)]
        launcher.kill()
    _, alive = psutil.wait_procs(ranks, timeout=30)
    for rank in alive:
        rank.kill()
    assert not alive


def test_03_resuming_a_folder_does_not_run_the_plugins_that_it_names(tmp_path: Path) -> None:
    plugin = tmp_path / "plugin.py"
    plugin.write_text("from pathlib import Path\nPath('plugin-ran').touch()\n")
    options: dict[str, Any] = {
        "data": "synthetic:samples=40,shape=6",
        "model": "mlp:hidden=4",
        "transport": "inproc",
        "progress": False,
    }
    paceline.train(**options, steps=4, checkpoint_every=2, out="run", plugin=str(plugin))
    (tmp_path / "plugin-ran").unlink()
    sys.modules.pop("paceline_plugin_plugin")
    with pytest.raises(BadRequest, match=f'run only when you name it again: plugin="{plugin}"'):
        paceline.train(resume="run", steps=6, progress=False)
    assert not (tmp_path / "plugin-ran").exists()
    assert paceline.train(resume="run", steps=6, plugin=str(plugin), progress=False).steps == 6
    assert (tmp_path / "plugin-ran").exists()


def test_08_a_loop_under_paceline_launch_keeps_its_number_of_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "loop.py").write_text("import os; print(os.environ['OMP_NUM_THREADS'])\n")

    def threads(given: int | None = None) -> str:
        launch("loop.py", [], 1, given)
        return capfd.readouterr().out.strip()

    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert threads() == "7"
    assert threads(3) == "3"
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert threads() == str(cores())
