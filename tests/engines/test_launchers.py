"""torchrun and mpirun with a loop of a user's own. tests/multiprocess has the rest of them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from paceline.transport.mpi.transport import MpiTransport, mpirun
from tests.engines.engine import used
from tests.engines.slurm import record_of

LOOP = str(Path(__file__).with_name("own_loop.py"))
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))


def command(launcher: str) -> list[str]:
    if launcher == "torchrun":
        return [TORCHRUN, "--standalone", "--nproc-per-node", "3"]
    if (missing := MpiTransport.missing()) is not None:
        pytest.skip(f"mpirun is not here: {missing}")
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return [str(mpirun()), *root, "--oversubscribe", "-n", "3", sys.executable]


@pytest.mark.parametrize("launcher", ["torchrun", "mpirun"])
def test_a_loop_of_ones_own(tmp_path: Path, launcher: str) -> None:
    used("launchers", f"torchrun of torch {torch.__version__}, mpirun")
    done = subprocess.run(
        [*command(launcher), LOOP, "run"], capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n"))[1:] == [f"rank {rank}" for rank in range(3)]
    record = record_of(tmp_path / "run")
    assert (record["status"], record["result"]["steps"]) == ("completed", 8)
    assert len(record["workers"]) == 3
