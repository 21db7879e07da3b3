"""The same `paceline train` line under mpirun, torchrun and srun: the same weights as when Paceline
starts the workers itself; and under torchrun also when ranks are killed, or come and go, on the
way.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.commands import Popen, free_job, free_port
from tests.conftest import identical, weights_distance
from torch import Tensor

import paceline
from paceline.common.links import Links
from paceline.record.reader import read_events
from paceline.registry import Spec, strategies
from paceline.testbed import build
from paceline.transport.mpi.transport import MpiTransport, mpirun

BIN = Path(sys.executable).parent
PACELINE, TORCHRUN = str(BIN / "paceline"), str(BIN / "torchrun")
OPTIONS = {
    "data": "synthetic:shape=1x8x8,samples=600",
    "model": "mlp:hidden=16",
    "batch_size": 8,
    "steps": 12,
    "threads": 1,
    "memory_format": "contiguous",
    "sample_every_s": 0,
}
RANKS = 3
RING = "allreduce:collective=ring"
DEADLINE_S = 200.0

Weights = dict[str, Tensor]
Start = tuple[list[str], dict[str, str]]  # a command, and what is added to its environment


def line(**options: object) -> list[str]:
    """The flags of `paceline train`."""
    return ["train", *(f"--{k.replace('_', '-')}={v}" for k, v in {**OPTIONS, **options}.items())]


def locally(out: Path, **options: object) -> paceline.Run:
    """By Paceline's own launcher."""
    return paceline.train(**{**OPTIONS, **options}, out=str(out), progress=False)


# --- the launchers: what is started, with which variables


def with_mpirun(size: int, *program: str) -> list[Start]:
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return [([str(mpirun()), *root, "--oversubscribe", "-n", str(size), *program], {})]


def with_torchrun(size: int, *program: str) -> list[Start]:
    return [([TORCHRUN, "--standalone", "--nproc-per-node", str(size), *program], {})]


def with_srun(size: int, *program: str) -> list[Start]:
    """There is no Slurm here: processes with the variables that srun sets."""
    step = {
        "SLURM_JOB_ID": str(free_job(1)),
        "SLURM_STEP_ID": "1",
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_STEP_TASKS_PER_NODE": str(size),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NODEID": "0",
    }
    return [
        ([sys.executable, *program], {**step, "SLURM_PROCID": str(r), "SLURM_LOCALID": str(r)})
        for r in range(size)
    ]


LAUNCHERS = [
    pytest.param(
        with_mpirun,
        "mpi",
        id="mpirun",
        marks=[
            pytest.mark.skipif(not MpiTransport.available(), reason="no MPI here"),
            pytest.mark.slow,  # tests/multiprocess/test_mpi.py trains over MPI in `make test`
        ],
    ),
    pytest.param(with_torchrun, "auto", id="torchrun", marks=pytest.mark.slow),
    pytest.param(with_srun, "gloo", id="srun"),
]
Launcher = Callable[..., list[Start]]


@contextmanager
def started(
    command: list[str], log: Path, first: Callable[[], None] | None = None, **environment: str
) -> Iterator[subprocess.Popen[bytes]]:
    """A process, ended with all that it has started."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    with log.open("wb") as file:
        streams: dict[str, Any] = {"stdout": file, "stderr": subprocess.STDOUT, "env": env}
        process = (
            Popen(command, **streams)
            if command[0] == sys.executable and first is None
            else subprocess.Popen(command, preexec_fn=first, **streams)  # noqa: PLW1509
        )
        try:
            yield process
        finally:
            family = (
                psutil.Process(process.pid).children(recursive=True)
                if process.poll() is None
                else []
            )
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            for member in family:
                if member.is_running():
                    member.kill()


def finished(process: subprocess.Popen[bytes], log: Path) -> str:
    """What it said; it must end well, and in time."""
    try:
        code = process.wait(DEADLINE_S)
    except subprocess.TimeoutExpired:
        pytest.fail(f"not over after {DEADLINE_S:g} s: {log.read_text()}")
    assert code == 0, log.read_text()
    return log.read_text()


def run_all(starts: list[Start]) -> list[str]:
    with ExitStack() as stack:
        logs = [Path(f"log-{number}") for number in range(len(starts))]
        running = [
            stack.enter_context(started(c, log, **e))
            for (c, e), log in zip(starts, logs, strict=True)
        ]
        return [finished(process, log) for process, log in zip(running, logs, strict=True)]


def until(condition: Callable[[], Any], process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.02)


def sessions(out: Path) -> list[int]:
    """The steps from which the run began, and was begun again."""
    file = out / "events" / "worker-0.jsonl"
    return (
        [e["from_step"] for e in read_events(file) if e["kind"] == "start"]
        if file.is_file()
        else []
    )


def record_of(out: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((out / "run.json").read_text())
    return record


# --- every launcher


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    return locally(tmp_path_factory.mktemp("local") / "run", strategy=RING, workers=RANKS).weights


@pytest.mark.parametrize(("launcher", "transport"), LAUNCHERS)
def test_the_ring_is_the_same_bit_for_bit(
    launcher: Launcher, transport: str, ring: Weights
) -> None:
    said = run_all(
        launcher(RANKS, PACELINE, *line(strategy=RING, transport=transport, out="run"), "--json")
    )
    record = record_of(Path("run"))
    assert (record["status"], record["config"]["workers"]) == ("completed", RANKS)
    assert [w["rank"] for w in record["workers"]] == list(range(RANKS))
    # all on one host
    assert record["config"]["transport"] == ("shm" if transport == "auto" else transport)
    assert '"status": "completed"' in said[0]
    assert not any(said[1:])  # rank 0 speaks
    assert identical(paceline.Run.open("run").weights, ring)


SYNCHRONOUS = [
    *(n for n in strategies.names() if n not in ("serial", "hogwild")),
    *(f"allreduce:collective={c}" for c in ("native", "tree", "halving-doubling", "star")),
    "allreduce:exchange=weights",
    "ps:exchange=weights",
]
ALL_OF_THEM = """
import json, sys
from paceline.cli.main import cli
for out, line in json.loads(sys.argv[1]).items():
    cli.main([*line, "--out", out, "--quiet"], standalone_mode=False)
"""


@pytest.fixture(scope="module")
def by_strategy(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Weights]:
    """As many workers as there are ranks that do not serve."""
    out = tmp_path_factory.mktemp("local")
    return {
        s: locally(out / s, strategy=s, workers=RANKS - (Spec.of(s).name == "ps")).weights
        for s in SYNCHRONOUS
    }


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("launcher", "transport"), LAUNCHERS)
def test_every_synchronous_strategy(
    launcher: Launcher, transport: str, by_strategy: dict[str, Weights]
) -> None:
    """One run after the other in the same processes: starting them takes the time."""
    Path("script.py").write_text(ALL_OF_THEM)
    program = ["script.py"] if launcher is not with_mpirun else [sys.executable, "script.py"]
    lines = {s: line(strategy=s, transport=transport) for s in SYNCHRONOUS}
    run_all(launcher(RANKS, *program, json.dumps(lines)))
    assert {s: record_of(Path(s))["status"] for s in SYNCHRONOUS} == dict.fromkeys(
        SYNCHRONOUS, "completed"
    )
    distances = {
        s: weights_distance(paceline.Run.open(s).weights, by_strategy[s]) for s in SYNCHRONOUS
    }
    assert {s: d for s, d in distances.items() if d > 1e-5} == {}


# --- torchrun: several hosts, ranks that die, hosts that come and go

GATE = """
import time
from dataclasses import dataclass
from pathlib import Path
from paceline.faults.base import Fault
from paceline.registry import faults

@faults.register("gate")
@dataclass
class Gate(Fault):
    rank: int = 0
    step: int = 1
    file: str = ""

    def before_step(self, step, transport):
        while (transport.rank, step) == (self.rank, self.step) and not Path(self.file).exists():
            time.sleep(0.01)
"""
LONG = {"strategy": RING, "steps": 60, "checkpoint_every": 20}


@pytest.fixture
def gate() -> Callable[..., list[str]]:
    """Flags by which a rank waits before a step for a file: the others wait for it in their
    exchange meanwhile.
    """
    Path("gate.py").write_text(GATE)
    return lambda **options: [
        "--plugin",
        "gate.py",
        "--faults",
        "gate:" + ",".join(f"{k}={v}" for k, v in options.items()),
    ]


def kill_rank(rank: int, *agents: subprocess.Popen[bytes]) -> None:
    for agent in agents:
        for child in psutil.Process(agent.pid).children():
            if child.environ().get("RANK") == str(rank):
                child.send_signal(signal.SIGKILL)
                return
    pytest.fail(f"there is no rank {rank}")


def check(out: Path, reference: paceline.Run, began: list[int]) -> None:
    run = paceline.Run.open(out)
    assert (run.record["status"], run.record["error"]) == ("completed", None)
    assert (run.steps, run.samples) == (reference.steps, reference.samples)
    assert sessions(out) == began
    assert identical(run.weights, reference.weights)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> paceline.Run:
    return locally(tmp_path_factory.mktemp("local") / "run", **LONG, workers=RANKS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("transport", "victim"), [("gloo", 1), ("gloo", 0), ("shm", 2), ("shm", 0)]
)
def test_torchrun_starts_the_ranks_again(
    transport: str, victim: int, undisturbed: paceline.Run, gate: Callable[..., list[str]]
) -> None:
    out, log = Path("run"), Path("log")
    [(command, _)] = with_torchrun(RANKS, PACELINE, *line(**LONG, transport=transport, out=out))
    command[1:1] = ["--max-restarts", "2"]
    with started([*command, *gate(rank=victim, step=31, file="open")], log) as torchrun:
        until((out / "checkpoints" / "step-00000020").is_dir, torchrun, log)
        kill_rank(victim, torchrun)
        Path("open").touch()
        said = finished(torchrun, log)
    assert said.count("going on from run/checkpoints/step-00000020") == 1
    check(out, undisturbed, [0, 20])


@pytest.mark.slow
def test_a_lost_server_is_started_again(tmp_path: Path, gate: Callable[..., list[str]]) -> None:
    """From the last checkpoint that has what it remembered, not from the weights that worker 0 has
    rescued.
    """
    reference = locally(tmp_path / "local", **{**LONG, "strategy": "ps", "workers": 2})
    out, log = Path("run"), Path("log")
    [(command, _)] = with_torchrun(
        RANKS, PACELINE, *line(**{**LONG, "strategy": "ps"}, transport="gloo", out=out)
    )
    command[1:1] = ["--max-restarts", "2"]
    with started([*command, *gate(rank=1, step=31, file="open")], log) as torchrun:
        until((out / "checkpoints" / "step-00000020").is_dir, torchrun, log)
        kill_rank(2, torchrun)
        Path("open").touch()
        finished(torchrun, log)
    check(out, reference, [0, 20])


@pytest.mark.slow
def test_a_resumed_run_is_started_again(
    tmp_path: Path, undisturbed: paceline.Run, gate: Callable[..., list[str]]
) -> None:
    """Not from where it was told to go on, but from where it has come to since."""
    out, log = Path("new"), Path("log")
    locally(tmp_path / "old", **{**LONG, "steps": 30}, workers=RANKS)
    [(command, _)] = with_torchrun(
        RANKS, PACELINE, "train", "--resume", "old", "--steps", "60", "--out", str(out)
    )
    command[1:1] = ["--max-restarts", "2"]
    with started([*command, *gate(rank=1, step=51, file="open")], log) as torchrun:
        until((out / "checkpoints" / "step-00000040").is_dir, torchrun, log)
        kill_rank(1, torchrun)
        Path("open").touch()
        finished(torchrun, log)
    check(out, undisturbed, [0, 20, 40])
    assert sessions(Path("old")) == [0]


@pytest.mark.slow
def test_started_again_before_the_first_checkpoint(
    undisturbed: paceline.Run, gate: Callable[..., list[str]]
) -> None:
    """In its own folder it begins again; a folder of another run is refused every time."""
    out, log = Path("run"), Path("log")
    [(command, _)] = with_torchrun(RANKS, PACELINE, *line(**LONG, transport="gloo", out=out))
    command[1:1] = ["--max-restarts", "1"]
    with started([*command, *gate(rank=1, step=11, file="open")], log) as torchrun:
        until(lambda: sessions(out), torchrun, log)
        kill_rank(1, torchrun)
        Path("open").touch()
        said = finished(torchrun, log)
    assert "no new checkpoint yet" in said
    check(out, undisturbed, [0, 0])
    with started(command, log) as torchrun:
        assert torchrun.wait(DEADLINE_S) != 0
    # again when torchrun has started the ranks again
    assert log.read_text().count("out=run holds a run already") == 2
    check(out, undisturbed, [0, 0])


def agent(nodes: str, port: int, *program: str) -> list[str]:
    meeting = [
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        f"127.0.0.1:{port}",
        "--rdzv-conf",
        "last_call_timeout=2",
    ]
    return [
        TORCHRUN,
        "--nnodes",
        nodes,
        "--nproc-per-node",
        "1",
        "--max-restarts",
        "2",
        *meeting,
        *program,
    ]


@pytest.fixture
def secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks on several hosts meet only with a secret, which torchrun does not hand over."""
    file = tmp_path / "secret"
    file.touch(mode=0o600)
    file.write_text("0123456789abcdef" * 4)
    monkeypatch.setenv("PACELINE_SECRET_FILE", str(file))


@pytest.mark.usefixtures("secret")
@pytest.mark.slow
@pytest.mark.parametrize("dies", [False, True])
def test_torchrun_on_several_nodes(
    dies: bool, tmp_path: Path, gate: Callable[..., list[str]]
) -> None:
    """Two agents, as on two hosts. When a rank dies each counts its own restarts, and they do not
    count the same.
    """
    reference = locally(tmp_path / "local", **LONG, workers=2)
    out, logs = Path("run"), [Path("log-a"), Path("log-b")]
    command = agent(
        "2", free_port(), PACELINE, *line(**LONG, out=out), *gate(rank=1, step=31, file="open")
    )
    with started(command, logs[0]) as one, started(command, logs[1]) as two:
        if dies:
            until((out / "checkpoints" / "step-00000020").is_dir, one, logs[0])
            kill_rank(1, one, two)
        Path("open").touch()
        for process, log in zip((one, two), logs, strict=True):
            finished(process, log)
    assert record_of(out)["config"]["transport"] == "gloo"
    check(out, reference, [0, 20] if dies else [0])


@pytest.mark.usefixtures("secret")
@pytest.mark.slow
@pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))
def test_torchrun_on_hosts_of_their_own(tmp_path: Path) -> None:
    """Each rank listens at its own address, not at the one where they meet."""
    reference = locally(tmp_path / "local", strategy=RING, workers=2)
    logs = [Path("log-a"), Path("log-b")]
    with build.lasting(2, Links.read("unlimited")) as bed, ExitStack() as stack:
        agents = []
        for host, log in enumerate(logs):
            meeting = [
                "--rdzv-backend",
                "c10d",
                "--rdzv-endpoint",
                f"{bed.address(0)}:29500",
                "--local-addr",
                bed.address(host),
            ]
            command = [
                TORCHRUN,
                "--nnodes",
                "2",
                "--nproc-per-node",
                "1",
                *meeting,
                PACELINE,
                *line(strategy=RING, out="run"),
            ]
            agents.append(stack.enter_context(started(command, log, partial(bed.enter, host))))
        for process, log in zip(agents, logs, strict=True):
            finished(process, log)
    assert [w["host"] for w in record_of(Path("run"))["workers"]] == ["host-0", "host-1"]
    check(Path("run"), reference, [0])


@pytest.mark.usefixtures("secret")
@pytest.mark.slow
@pytest.mark.timeout(250)
def test_a_node_comes_and_goes(gate: Callable[..., list[str]]) -> None:
    """One worker, then two, then one again: one run, one record. What was done since a checkpoint
    is done again.
    """
    out, logs = Path("run"), [Path("log-a"), Path("log-b")]
    gates = [*gate(rank=0, step=31, file="two"), *gate(rank=0, step=51, file="one")]
    command = agent("1:2", free_port(), PACELINE, *line(**LONG, out=out, deadline_s=60), *gates)
    # torch 2.13: a node that comes later waits for its store in vain
    apart = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with started(command, logs[0], **apart) as stays:
        until((out / "checkpoints" / "step-00000020").is_dir, stays, logs[0])
        with started(command, logs[1], **apart) as goes:
            until((out / "events" / "worker-1.jsonl").is_file, goes, logs[1])
            Path("two").touch()
            until((out / "checkpoints" / "step-00000040").is_dir, goes, logs[1])
        Path("one").touch()
        finished(stays, logs[0])
    record = record_of(out)
    assert (record["status"], record["result"]["steps"], record["config"]["workers"]) == (
        "completed",
        60,
        1,
    )
    assert record["result"]["samples"] == 8 * (20 + 2 * 20 + 20)
    assert sessions(out) == [0, 20, 40]
