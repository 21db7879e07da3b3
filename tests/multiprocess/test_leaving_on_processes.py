"""Runs of real processes that are asked to leave: by a signal to their launcher or to their ranks,
or because their time is over. They write a checkpoint, and the same command line goes on.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.commands import PACELINE, Popen
from tests.commands import run as run_command
from tests.small import identical

from paceline.launch.signals import ending, relaying
from paceline.record.checkpoint import load_weights
from paceline.transport.mpi.transport import MpiTransport, mpirun

BIN = Path(sys.executable).parent
TRAIN = ["train", "--data", "synthetic:samples=200,shape=6", "--model", "mlp:hidden=4", "--out"]
# The launcher begins the table once it has heard that the ranks are ready and can leave.
ENDLESS = ["--epochs", "1000000", "--resume", "auto", "--quiet", "--callbacks", "csv"]
AFTER = 5  # steps that a run goes on after it has left
MPI = pytest.mark.skipif(not MpiTransport.available(), reason="no MPI here")


def steps_of(out: Path) -> int:
    events = out / "events" / "worker-0.jsonl"
    return events.read_text().count('"kind": "step"') if events.exists() else 0


def until(true: Callable[[], bool], process: subprocess.Popen[Any], said: Path) -> None:
    limit = time.monotonic() + 90
    while not true():
        assert process.poll() is None, said.read_text()
        assert time.monotonic() < limit, said.read_text()
        time.sleep(0.02)


def left(
    command: list[str],
    tell: Callable[[psutil.Process], None],
    started: Callable[..., subprocess.Popen[Any]] = Popen,
) -> tuple[int, str]:
    """Start an endless run, ask it to leave after some steps; return exit code and output."""
    said, out = Path("said"), Path("run")
    table = out / "metrics.csv" if "csv" in command else out
    with open(said, "w") as file:
        process = started(command, stdout=file, stderr=file, start_new_session=True)
    try:
        before = steps_of(out)
        until(lambda: steps_of(out) > before + 12 and table.exists(), process, said)
        family = psutil.Process(process.pid).children(recursive=True)
        tell(psutil.Process(process.pid))
        code = process.wait(90)
        assert psutil.wait_procs(family, timeout=20)[1] == [], "no process is left"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return code, said.read_text()


def to_the_launcher(number: signal.Signals) -> Callable[[psutil.Process], None]:
    return lambda process: process.send_signal(number)


def to_all_ranks(number: signal.Signals) -> Callable[[psutil.Process], None]:
    """As srun does: the ranks are the processes that run `paceline`, and start none themselves."""

    def tell(process: psutil.Process) -> None:
        for one in process.children(recursive=True):
            if "train" in one.cmdline() and "mpirun" not in one.cmdline()[0]:
                one.send_signal(number)

    return tell


def record() -> dict[str, Any]:
    return dict(json.loads(Path("run/run.json").read_text()))


def checkpoint_step(reason: str, said: str) -> int:
    """The step after which the run has left, as it says itself."""
    found = record()
    assert found["status"] == "interrupted", said
    assert found["error"].startswith(reason), found["error"]
    assert f"paceline: {found['error']}" in said
    assert "Traceback" not in said
    step = int(found["error"].rpartition(" ")[2])
    assert max(Path("run/checkpoints").glob("step-*")).name == f"step-{step:08d}"
    return step


def goes_on(step: int, options: list[str], exact: bool) -> None:
    """The run goes on for some steps, to the weights of one that was never stopped."""
    ends = ["--steps", str(step + AFTER), "--quiet"]
    for out, more in (("run", ["--resume", "auto"]), ("unbroken", [])):
        done = run_command(
            [str(PACELINE), *TRAIN, out, *options, *ends, *more], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        if not exact:
            break
    found = record()
    assert (found["status"], found["result"]["steps"]) == ("completed", step + AFTER)
    if exact:
        one, other = (load_weights(Path(f"{out}/model.safetensors")) for out in ("run", "unbroken"))
        assert identical(one, other)


@pytest.mark.parametrize(
    ("number", "more", "exact"),
    [
        (signal.SIGTERM, ["--transport", "shm"], True),
        (signal.SIGUSR1, ["--strategy", "ps:consistency=async"], False),
        *(
            pytest.param(*values, marks=pytest.mark.slow)
            for values in (
                (signal.SIGUSR1, ["--strategy", "local-sgd:every=8", "--transport", "gloo"], True),
                (signal.SIGTERM, ["--strategy", "gossip"], True),
                (signal.SIGTERM, ["--strategy", "gossip:mode=async"], False),
                (signal.SIGTERM, ["--strategy", "ps", "--transport", "gloo"], True),
                (signal.SIGTERM, ["--strategy", "ps:consistency=ssp,staleness=2"], False),
                (signal.SIGTERM, ["--strategy", "psgd"], True),
                (signal.SIGUSR1, ["--strategy", "hogwild"], False),
                (signal.SIGUSR1, ["--strategy", "ddp"], False),
            )
        ),
        pytest.param(signal.SIGTERM, ["--transport", "mpi"], True, marks=[pytest.mark.slow, MPI]),
    ],
)
def test_a_signal_to_the_launcher(number: signal.Signals, more: list[str], exact: bool) -> None:
    more = [*more, "--workers", "2", "--memory-format", "contiguous"]
    code, said = left([str(PACELINE), *TRAIN, "run", *ENDLESS, *more], to_the_launcher(number))
    assert code == (143 if number is signal.SIGTERM else 75)
    step = checkpoint_step(f"interrupted by {number.name} after a checkpoint at step ", said)
    goes_on(step, more, exact)


@pytest.mark.slow
def test_when_its_time_is_over() -> None:
    more = ["--workers", "2", "--max-time", "8s"]
    code, said = left([str(PACELINE), *TRAIN, "run", *ENDLESS, *more], lambda process: None)
    assert code == 75
    step = checkpoint_step("--max-time 8s is over: the run has left a checkpoint at step ", said)
    goes_on(step, ["--workers", "2"], exact=True)


API = """
import torch, paceline
from torch import nn
data = (torch.randn(64, 6), torch.arange(64) % 3)
paceline.train(model=lambda: nn.Linear(6, 3), data=data, workers=2, epochs=10**6, batch_size=4,
               threads=2, progress=False, out="run")
"""


@pytest.mark.slow
def test_from_a_program_that_cannot_fork() -> None:
    """Two threads per worker: the ranks are started from a fresh process."""
    Path("program.py").write_text(API)
    code, said = left([sys.executable, "program.py"], to_the_launcher(signal.SIGTERM))
    assert code != 0
    assert "Interrupted: interrupted by SIGTERM after a checkpoint at step " in said
    assert record()["status"] == "interrupted"


def under_torchrun() -> list[str]:
    return [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "3", str(PACELINE)]


def under_mpirun() -> list[str]:
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return [str(mpirun()), *root, "--oversubscribe", "-n", "3", str(PACELINE)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "tell", "code", "reason"),
    [
        # torchrun has an exit code of its own; on SIGTERM it signals its ranks
        (under_torchrun, to_the_launcher(signal.SIGTERM), 1, "interrupted by SIGTERM"),
        (under_torchrun, to_all_ranks(signal.SIGUSR1), 1, "interrupted by SIGUSR1"),
        pytest.param(
            *(under_mpirun, to_the_launcher(signal.SIGUSR1), 75, "interrupted by SIGUSR1"),
            marks=MPI,
        ),
    ],
)
@pytest.mark.parametrize("strategy", ["ps", "allreduce"])
def test_ranks_of_another_launcher(
    launcher: Callable[[], list[str]],
    tell: Callable[[psutil.Process], None],
    code: int,
    reason: str,
    strategy: str,
) -> None:
    more = ["--strategy", strategy, "--memory-format", "contiguous"]
    start = [*launcher(), *TRAIN, "run", *ENDLESS, *more]
    ended, said = left(start, tell, subprocess.Popen)
    assert ended == code, said
    found = record()
    assert found["error"].startswith(f"{reason} after a checkpoint at step "), said
    assert said.count(f"paceline: {found['error']}") == 1
    step = int(found["error"].rpartition(" ")[2])
    done = subprocess.run(
        [*launcher(), *TRAIN, "run", *more, "--resume", "auto", "--steps", str(step + AFTER)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"going on from step {step} of run" in done.stderr
    assert record()["status"] == "completed"
    # Started once more, it says that nothing is left to do.
    done = subprocess.run(
        [*launcher(), *TRAIN, "run", *more, "--resume", "auto"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("is complete already") == 1


# As srun: the tasks with its variables. The first that fails ends the others; the highest exit code
# counts.
SRUN = """
import os, signal, subprocess, sys
size, command = int(sys.argv[1]), sys.argv[2:]
names = {"SLURM_JOB_ID": "5", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": str(size),
         "SLURM_STEP_TASKS_PER_NODE": str(size), "SLURM_STEP_NODELIST": "localhost",
         "SLURM_NODEID": "0"}
tasks = [subprocess.Popen(command, env={**os.environ, **names, "SLURM_PROCID": str(rank),
                                        "SLURM_LOCALID": str(rank)}) for rank in range(size)]
left, codes = {task.pid: task for task in tasks}, []
while left:
    pid, status = os.wait()
    code = os.waitstatus_to_exitcode(status)
    codes.append(code if code >= 0 else 128 - code)
    left.pop(pid).returncode = code
    for task in left.values() if code else ():
        task.kill()
sys.exit(max(codes))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGUSR1, 75), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("strategy", ["ps", "allreduce", "ps:consistency=async"])
def test_tasks_of_srun(number: signal.Signals, code: int, strategy: str) -> None:
    """All tasks get the signal, servers too. None is ended by srun, whose exit code is theirs."""
    Path("srun.py").write_text(SRUN)
    more = ["--strategy", strategy]
    start = [sys.executable, "srun.py", "3", str(PACELINE), *TRAIN, "run", *ENDLESS, *more]
    ended, said = left(start, to_all_ranks(number), subprocess.Popen)
    assert ended == code, said
    checkpoint_step(f"interrupted by {number.name} after a checkpoint at step ", said)


# --- the signals


def test_a_request_is_passed_on_once_the_ranks_can_leave() -> None:
    heard: list[int] = []
    with ending() as end, relaying(heard.append):
        signal.raise_signal(signal.SIGUSR1)
        assert heard == []
        end.can_leave()
        assert heard == [signal.SIGUSR1]
        signal.raise_signal(signal.SIGTERM)
        assert heard == [signal.SIGUSR1, signal.SIGTERM]
        assert end.heard is None
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        assert end.heard is signal.SIGTERM
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_sigterm_interrupts_before_the_ranks_can_leave_and_after_they_have() -> None:
    for ready in (False, True):
        with ending() as end:
            if ready:
                end.can_leave()
                end.cannot_leave()
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGTERM)
            assert end.heard is signal.SIGTERM


def _wait() -> None:
    limit = time.monotonic() + 20
    while time.monotonic() < limit:
        time.sleep(0.01)


def test_ranks_that_do_not_leave_in_time_are_interrupted() -> None:
    with ending() as end:
        end.can_leave(0.05)
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            _wait()
        assert end.reason == "interrupted by SIGTERM"


def test_a_checkpoint_takes_as_long_as_it_takes() -> None:
    with ending() as end:
        end.can_leave(0.2)
        signal.raise_signal(signal.SIGTERM)
        end.is_leaving()
        time.sleep(0.4)
        assert end.heard is None


def test_a_programs_own_handlers_stay() -> None:
    mine: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: mine.append(number))
    try:
        with ending() as end:
            end.can_leave()
            signal.raise_signal(signal.SIGUSR1)
        assert (mine, end.wish) == ([signal.SIGUSR1], None)
    finally:
        signal.signal(signal.SIGUSR1, before)
