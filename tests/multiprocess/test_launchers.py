"""`paceline train` inside torchrun, mpirun and srun: it becomes one rank, spawns nothing, and leaves one record."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.errors import BadRequest
from paceline.launch.seat import Seat, find, first_host, tasks_on_node
from paceline.transport.mpi import MpiTransport, mpirun

BIN = Path(sys.executable).parent
TRAIN = ["train", "--data", "fashion-mini", "--model", "mlp:hidden=16", "--strategy", "allreduce", "--steps", "4"]
TRAIN += ["--memory-format", "contiguous"]
MPI = pytest.mark.skipif(not MpiTransport.available(), reason="no MPI here")


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env={**os.environ, **environment}, check=False)


def under_mpirun(size: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return run(str(mpirun()), *root, "--oversubscribe", "-n", str(size), str(BIN / "paceline"), *TRAIN, *arguments)


@MPI
def test_mpirun(tmp_path: Path) -> None:
    done = under_mpirun(3, "--transport", "mpi", "--out", "run", "--json")
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record == json.loads((tmp_path / "run" / "run.json").read_text())
    assert (record["status"], len(record["workers"]), record["config"]["transport"]) == ("completed", 3, "mpi")
    assert len({w["rank"] for w in record["workers"]}) == 3


@MPI
def test_a_number_of_workers_that_contradicts_the_launcher(tmp_path: Path) -> None:
    done = under_mpirun(2, "--workers", "3", "--out", "run")
    assert done.returncode == 2
    assert done.stderr.count("workers=3, but mpirun has started 2 processes") == 1
    assert not (tmp_path / "run").exists()


def test_torchrun(tmp_path: Path) -> None:
    torchrun = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2", str(BIN / "paceline")]
    done = run(*torchrun, *TRAIN, "--out", "run", "--faults", "die:rank=1,step=3")
    assert done.returncode != 0
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    by_torchrun = record["status"] == "interrupted" and "ended by torchrun" in record["error"]  # it may be quicker than rank 0
    assert by_torchrun or (record["status"] == "failed" and "rank 1 is gone" in record["error"])
    assert done.stderr.count("paceline: ") == 1

    done = run(*torchrun, *TRAIN, "--out", "again", "--json")
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert (record["status"], len(record["workers"]), record["config"]["workers"]) == ("completed", 2, 2)
    assert record["config"]["transport"] == "shm"  # all on one host


def slurm(rank: int, size: int = 2) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_STEP_TASKS_PER_NODE": str(size),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
    }


def test_srun_as_its_variables_tell(tmp_path: Path) -> None:
    """There is no Slurm here: two processes with the variables that srun sets."""
    command = [str(BIN / "paceline"), *TRAIN, "--transport", "gloo", "--out", "run"]
    ranks = [
        subprocess.Popen(command, env={**os.environ, **slurm(r)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for r in range(2)
    ]
    said = [r.communicate(timeout=100) for r in ranks]
    assert [r.returncode for r in ranks] == [0, 0], said
    assert said[1][0] == ""  # rank 0 speaks
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (record["status"], len(record["workers"])) == ("completed", 2)


def test_a_study_is_not_run_by_every_rank() -> None:
    done = run(str(BIN / "paceline"), "study", "--short", "--out", "s", RANK="0", WORLD_SIZE="2",
               MASTER_ADDR="127.0.0.1", MASTER_PORT="1")  # fmt: skip
    assert done.returncode == 2
    assert "starts its own workers" in done.stderr


def test_seats() -> None:
    assert find({}) is None
    assert find({"SLURM_JOB_ID": "5", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}) is None  # a batch script is no task
    seat = find({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"})
    assert seat is not None
    assert (seat.launcher, seat.rank, seat.size, seat.local_size) == ("mpirun", 3, 8, 4)
    assert seat.fit({})["transport"] == "gloo"  # two hosts
    seat = find(slurm(1) | {"SLURM_STEP_NODELIST": "node[07-09,12],other", "SLURM_STEP_TASKS_PER_NODE": "4(x2),3"})
    assert seat is not None
    assert (seat.launcher, seat.host, seat.local_size) == ("srun", "node07", 4)
    with pytest.raises(BadRequest, match="inside mpirun, but its variables are incomplete"):
        find({"OMPI_COMM_WORLD_RANK": "3"})
    with pytest.raises(BadRequest, match="leave it out"):
        Seat("mpirun", 0, 4, 0, 4).fit({"workers": 3})
    assert Seat("mpirun", 0, 4, 0, 4).fit({"workers": 3, "servers": 1})["workers"] == 3


def test_slurm_shorthand() -> None:
    assert [first_host(n) for n in ("a", "a,b", "n[1-3]", "n[07,9]", "gpu-n03.x")] == ["a", "a", "n1", "n07", "gpu-n03.x"]
    assert [tasks_on_node("4(x2),3", n) for n in range(3)] == [4, 4, 3]
