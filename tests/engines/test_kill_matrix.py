"""The rows of the kill matrix (docs/clusters.md) for torchrun and mpirun: a rank, the launcher.

The other engines have theirs in their own files; test_kubernetes.py kills a node under torchrun.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from paceline.transport.mpi.transport import MpiTransport, mpirun
from paceline.transport.status.line import FOLDER, read_line
from tests.commands import PACELINE, run
from tests.engines.engine import same_weights, until, used
from tests.engines.test_ray import SLOW

pytestmark = [pytest.mark.engines, pytest.mark.timeout(420)]
RANKS, STEPS = 3, 80


def launcher(name: str) -> list[str]:
    used("kill_matrix", f"torchrun of torch {torch.__version__}, mpirun of Open MPI 5")
    if name == "torchrun":
        torchrun = str(Path(sys.executable).with_name("torchrun"))
        return [torchrun, "--standalone", "--nproc-per-node", str(RANKS)]
    if (missing := MpiTransport.missing()) is not None:
        pytest.skip(f"mpirun is not here: {missing}")
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return [str(mpirun()), *root, "--oversubscribe", "-n", str(RANKS)]


def train(out: str, *more: str) -> list[str]:
    Path("slow_net.py").write_text(SLOW)
    words = ["train", "--data", "fashion-mini", "--model", "slow_net:net", "--threads", "1"]
    words += ["--strategy", "allreduce:collective=ring", "--memory-format", "contiguous"]
    words += ["--overlap", "off", "--transport", "gloo", "--checkpoint-every", "10"]
    return [str(PACELINE), *words, "--steps", str(STEPS), "--out", out, *more]


def pid_of(rank: int) -> int:
    seen = read_line(Path("run") / FOLDER / f"rank-{rank}")
    assert seen is not None
    return seen.pid


def whole() -> list[Path]:
    return sorted(Path("run").glob("checkpoints/step-*/checkpoint.json"))


@contextmanager
def started(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    with open("said", "wb") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said, start_new_session=True)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        process.wait(30)


def in_the_middle(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Wait for a checkpoint; returns the ranks."""
    until("a checkpoint", lambda: whole() or process.poll() is not None, 150)
    assert process.poll() is None, Path("said").read_text()
    return [psutil.Process(pid_of(rank)) for rank in range(RANKS)]


def all_end(ranks: list[psutil.Process]) -> None:
    def left() -> list[int]:
        return [p.pid for p in ranks if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]

    until("the end of all ranks", lambda: not left(), 60)
    own = str(Path.cwd())
    boards = [
        p.pid for p in psutil.process_iter(["cmdline"])
        if "paceline.transport.board.server" in " ".join(p.info["cmdline"] or ())
        and _folder(p) == own
    ]  # fmt: skip
    assert not boards


def _folder(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return str(process.cwd())
    return ""


def goes_on(name: str) -> None:
    """The same line goes on, to the weights of an undisturbed run."""
    done = subprocess.run(
        [*launcher(name), *train("run", "--resume", "auto")],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "going on from step" in done.stderr
    reference = run([*train("here"), "--workers", str(RANKS)], capture_output=True, text=True)
    assert reference.returncode == 0, reference.stderr
    assert same_weights(Path("run"), Path("here"))


def record() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path("run/run.json").read_text())
    return found


@pytest.mark.parametrize("name", ["torchrun", "mpirun"])
def test_a_rank_is_killed(name: str) -> None:
    with started([*launcher(name), *train("run", "--resume", "auto")]) as process:
        ranks = in_the_middle(process)
        ranks[1].kill()
        assert process.wait(120) != 0
    all_end(ranks)
    said = Path("said").read_text()
    # mpirun names the rank itself, and may end rank 0 before it can.
    named = "rank 1 is gone" in said or "rank 1 with PID" in " ".join(said.split())
    assert named or "local_rank: 1" in said, said
    goes_on(name)


@pytest.mark.parametrize("name", ["torchrun", "mpirun"])
def test_the_launcher_is_killed(name: str) -> None:
    """Nothing but the kernel can tell the ranks: they leave with a checkpoint, as if asked to."""
    with started([*launcher(name), *train("run", "--resume", "auto")]) as process:
        ranks = in_the_middle(process)
        process.kill()
        process.wait(30)
        all_end(ranks)
    found = record()
    assert found["status"] == "interrupted"
    assert found["result"]["steps"] < STEPS
    goes_on(name)


def test_mpirun_is_asked_to_end() -> None:
    """On SIGTERM mpirun kills its ranks. The last checkpoint is what is left, and is enough."""
    with started([*launcher("mpirun"), *train("run", "--resume", "auto")]) as process:
        ranks = in_the_middle(process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) != 0
    all_end(ranks)
    goes_on("mpirun")
