"""Slurm for real: three nodes, trained on, broken and resumed on. slurm.py starts the cluster."""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.commands import PACELINE, ROOT, run
from tests.engines.engine import same_weights, until
from tests.engines.slurm import NODES, Cluster, Job, none_left, record_of

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

RING = "allreduce:collective=ring"  # the same bits, whoever starts the ranks
OPTIONS = {
    "data": "synthetic:shape=1x8x8,samples=600",
    "model": "mlp:hidden=16",
    "strategy": RING,
    "batch_size": 8,
    "steps": 12,
    "threads": 1,
    "memory_format": "contiguous",
    "sample_every_s": 0,
}
# Long enough to be struck in the middle: worker 0 sleeps after each step.
LONG = {"steps": 240, "checkpoint_every": 10, "faults": "slow:rank=0,factor=150"}
LOOP = Path(__file__).with_name("own_loop.py")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    yield made
    made.end()


@pytest.fixture(autouse=True)
def _nothing_is_left(cluster: Cluster) -> Iterator[None]:
    """After each test no process of a job is left, and all nodes are free."""
    yield
    for name, node in cluster.nodes.items():
        if not node.init:
            cluster.start_again(name)
    # A job that is completing (CG) is over.
    queue = ["squeue", "-h", "-t", "PENDING,RUNNING", "-o", "%i"]
    end = time.monotonic() + 15
    while (queued := cluster.run(*queue).stdout.split()) and time.monotonic() < end:
        time.sleep(0.5)
    for number in queued:
        cluster.run("scancel", number)
    none_left(cluster)
    cluster.wait_idle()
    assert not queued, f"jobs were left: {queued}"


def train(**options: Any) -> list[str]:
    """`paceline train` with its flags."""
    given = {**OPTIONS, **options}
    flags = (f"--{name.replace('_', '-')}={value}" for name, value in given.items())
    return ["paceline", "train", *flags]


def locally(out: Path, **options: Any) -> Path:
    """The same run by Paceline's own launcher, without Slurm."""
    words = train(**{"workers": 3, "transport": "gloo", **options}, out=out)
    done = run([PACELINE, *words[1:]], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out


def uninterrupted(out: Path) -> Path:
    """The long run without Slurm, and without an interruption."""
    return locally(out, steps=LONG["steps"])


def batch(cluster: Cluster, folder: Path, *command: str, nodes: int = 3, **wishes: Any) -> Path:
    """Let `paceline launch --slurm` write a batch script."""
    asked = {"nodes": nodes, **wishes}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in asked.items()]
    words = ["paceline", "launch", "--slurm", "job.sh", *flags, "--", *command]
    done = cluster.run(*words, folder=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("Next: sbatch job.sh\n")
    return folder / "job.sh"


def plain(text: str) -> bool:
    """Whether text has no control characters, as those of a live bar."""
    return all(character.isprintable() or character == "\n" for character in text)


def checkpoints(out: Path) -> list[Path]:
    return sorted(p for p in out.glob("checkpoints/step-*") if (p / "checkpoint.json").exists())


def running(job: Job, out: Path) -> None:
    """Wait until the job trains and has written a checkpoint."""
    job.wait("RUNNING")
    until("a checkpoint is written", lambda: checkpoints(out), 120)


# --- training


def test_all_reduce_on_three_nodes(cluster: Cluster, tmp_path: Path) -> None:
    out = tmp_path / "run"
    step = cluster.srun(tmp_path, "-N3", "-n3", *train(out=out))
    assert step.wait() == 0, step.said()
    record = record_of(out)
    assert record["status"] == "completed"
    assert [worker["host"] for worker in record["workers"]] == list(NODES)
    about = record["environment"]["slurm"]
    assert (about["nodes"], about["partition"], about["requeued"]) == (list(NODES), "p", 0)
    assert about["job"] > 0
    assert record["config"]["launcher"] == "srun"
    assert plain(step.said())
    assert not list(out.glob(".board*"))  # the file with the secret
    assert same_weights(out, locally(tmp_path / "local"))
    done = run([PACELINE, "report", str(out)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    page = (out / "report.html").read_text()
    assert f"job {about['job']}, nodes n1 n2 n3, partition p" in page


def test_a_parameter_server(cluster: Cluster, tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = train(out=out, strategy="ps:consistency=async")
    step = cluster.srun(tmp_path, "-N3", "-n4", *words)
    assert step.wait() == 0, step.said()
    roles = [worker["role"] for worker in record_of(out)["workers"]]
    assert roles == ["worker"] * 3 + ["server"]
    assert record_of(out)["status"] == "completed"


def test_a_loop_of_ones_own(cluster: Cluster, tmp_path: Path) -> None:
    step = cluster.srun(tmp_path, "-N3", "-n3", "python", str(LOOP), "run")
    assert step.wait() == 0, step.said()
    assert sorted(step.said().splitlines()) == [f"rank {rank}" for rank in range(3)]
    record = record_of(tmp_path / "run")
    assert (record["status"], record["result"]["steps"]) == ("completed", 8)
    assert [worker["host"] for worker in record["workers"]] == list(NODES)
    assert record["environment"]["slurm"]["nodes"] == list(NODES)


def test_the_written_script(cluster: Cluster, tmp_path: Path) -> None:
    script = batch(cluster, tmp_path, *train(out="run")[1:], time="5")
    job = cluster.sbatch(tmp_path, script)
    assert job.wait("COMPLETED", "FAILED") == "COMPLETED", job.said()
    record = record_of(tmp_path / "run")
    assert record["status"] == "completed"
    assert record["environment"]["slurm"]["job"] == job.number
    assert plain(job.said())
    assert "record: run/run.json" in job.said()
    assert same_weights(tmp_path / "run", locally(tmp_path / "local"))


def test_the_example_of_deploy(cluster: Cluster, tmp_path: Path) -> None:
    """The file as it is, on nodes that have Paceline where it says."""
    home = Path(cluster.env["HOME"])
    (home / "paceline").symlink_to(sys.prefix)
    for node in cluster.nodes.values():
        for command in (
            ["mount", "-t", "tmpfs", "none", "/opt"],
            ["mkdir", "/opt/paceline"],
            ["mount", "--bind", sys.prefix, "/opt/paceline"],
        ):
            assert node.run(command, os.environ).returncode == 0
    job = cluster.sbatch(tmp_path, ROOT / "deploy" / "slurm" / "train.sh")
    assert job.wait("COMPLETED", "FAILED") == "COMPLETED", job.said()
    record = record_of(tmp_path / "runs" / "slurm")
    assert (record["status"], len(record["workers"])) == ("completed", 4)
    assert record["environment"]["slurm"]["partition"] == "short"
    assert (tmp_path / f"fashion-{job.number}.out").is_file()


def test_two_jobs_at_once_on_one_node(cluster: Cluster, tmp_path: Path) -> None:
    outs = [tmp_path / "one", tmp_path / "two"]
    where = ["-N1", "-n2", "-w", "n1"]
    steps = [
        cluster.srun(tmp_path, *where, *train(out=out, steps=100), log=f"{out.name}.log")
        for out in outs
    ]
    assert [step.wait() for step in steps] == [0, 0], [step.said() for step in steps]
    first, second = (record_of(out)["environment"]["slurm"] for out in outs)
    assert first["nodes"] == second["nodes"] == ["n1"]
    assert first["job"] != second["job"]
    assert same_weights(*outs)


# --- what goes wrong


def test_a_rank_that_fails(cluster: Cluster, tmp_path: Path) -> None:
    words = train(out="run", faults="die:rank=1,step=5")
    job = cluster.sbatch(tmp_path, batch(cluster, tmp_path, *words[1:], time="5"))
    assert job.wait("COMPLETED", "FAILED") == "FAILED"
    record = record_of(tmp_path / "run")
    assert record["status"] in ("failed", "interrupted")
    assert "rank 1 is gone" in job.said()
    assert "Traceback" not in job.said()


def test_a_rank_is_killed_and_the_job_submitted_again(cluster: Cluster, tmp_path: Path) -> None:
    """Slurm does not requeue a job that fails: the same script goes on when it is queued again."""
    out = tmp_path / "run"
    script = batch(cluster, tmp_path, *train(**LONG, out="run")[1:], time="9")
    job = cluster.sbatch(tmp_path, script)
    running(job, out)
    [rank] = [p for p, line in cluster.nodes["n2"].processes().items() if "paceline train" in line]
    os.kill(rank, signal.SIGKILL)
    assert job.wait("COMPLETED", "FAILED") == "FAILED"
    assert "rank 1 is gone" in job.said()
    none_left(cluster)
    job = cluster.sbatch(tmp_path, script)
    assert job.wait("COMPLETED", "FAILED", deadline_s=240) == "COMPLETED", job.said()
    assert "going on from step" in job.said()
    assert same_weights(out, uninterrupted(tmp_path / "local"))


@pytest.mark.parametrize(("name", "rank"), [("n3", 2), ("n1", 0)], ids=["last", "first"])
def test_a_node_is_killed_and_the_job_goes_on(
    cluster: Cluster, tmp_path: Path, name: str, rank: int
) -> None:
    """Slurm itself queues the job again. n1 is the node of the batch script and of rank 0."""
    out = tmp_path / "run"
    words = train(**LONG, out="run")
    job = cluster.sbatch(tmp_path, batch(cluster, tmp_path, *words[1:], time="9"))
    running(job, out)
    cluster.kill(name)
    until("the job is requeued", lambda: job.show("Restarts") == "1", 120)
    assert f"rank {rank} is gone" in record_of(out)["error"]
    cluster.start_again(name)
    # Not released early: Slurm's last word about the first start may reach the node only now.
    ended = job.wait("COMPLETED", "FAILED", deadline_s=300, release=False)
    assert ended == "COMPLETED", job.said()
    record = record_of(out)
    assert record["status"] == "completed"
    assert record["environment"]["slurm"]["requeued"] == 1
    assert same_weights(out, uninterrupted(tmp_path / "local"))


def test_scancel(cluster: Cluster, tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = train(**LONG, out="run")
    job = cluster.sbatch(tmp_path, batch(cluster, tmp_path, *words[1:], time="9"))
    running(job, out)
    before = checkpoints(out)
    assert cluster.run("scancel", str(job.number)).returncode == 0
    job.wait("CANCELLED")
    until("the record is written", (out / "run.json").exists, 60)
    record = record_of(out)
    assert record["status"] == "interrupted"
    last = json.loads((checkpoints(out)[-1] / "checkpoint.json").read_text())
    assert last["step"] == record["result"]["steps"]  # it was saved when the signal came
    assert len(checkpoints(out)) >= len(before)


@pytest.mark.parametrize(
    "signals", [(signal.SIGINT, signal.SIGINT), (signal.SIGKILL,)], ids=["ctrl-c", "killed"]
)
def test_srun_is_ended(
    cluster: Cluster, tmp_path: Path, signals: tuple[signal.Signals, ...]
) -> None:
    """srun takes its ranks with it: Slurm kills them at once. The same command goes on."""
    out = tmp_path / "run"
    words = ["-N3", "-n3", *train(**LONG, out=out, resume="auto")]
    step = cluster.srun(tmp_path, *words)
    until("a checkpoint is written", lambda: checkpoints(out), 120)
    for number in signals:
        step.signal(number)
    assert step.wait() != 0
    none_left(cluster)
    step = cluster.srun(tmp_path, *words)
    assert step.wait() == 0, step.said()
    assert "going on from step" in step.said()
    assert same_weights(out, uninterrupted(tmp_path / "local"))


# --- queued again, and going on


def test_scontrol_requeue(cluster: Cluster, tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = train(**LONG, out="run")
    job = cluster.sbatch(tmp_path, batch(cluster, tmp_path, *words[1:], time="9"))
    running(job, out)
    assert cluster.run("scontrol", "requeue", str(job.number)).returncode == 0
    until("the job is requeued", lambda: job.show("Restarts") == "1", 60)
    assert job.wait("COMPLETED", "FAILED", deadline_s=240) == "COMPLETED", job.said()
    record = record_of(out)
    assert record["status"] == "completed"
    assert record["environment"]["slurm"]["requeued"] == 1
    assert same_weights(out, uninterrupted(tmp_path / "local"))


def test_the_signal_before_the_time_limit(cluster: Cluster, tmp_path: Path) -> None:
    """Every rank saves and exits with 75; the script puts the job into the queue again."""
    out = tmp_path / "run"
    words = train(**{**LONG, "faults": "slow:rank=0,factor=900"}, out="run")
    job = cluster.sbatch(tmp_path, batch(cluster, tmp_path, *words[1:], time="2"))
    running(job, out)
    until("the job is requeued", lambda: job.show("Restarts") == "1", 180)
    stopped = record_of(out)
    assert stopped["status"] == "interrupted"
    last = json.loads((checkpoints(out)[-1] / "checkpoint.json").read_text())
    assert last["step"] == stopped["result"]["steps"]
    assert job.wait("COMPLETED", "FAILED", deadline_s=300) == "COMPLETED", job.said()
    assert record_of(out)["status"] == "completed"
    assert same_weights(out, uninterrupted(tmp_path / "local"))


# --- bad input, and strangers


def one_sentence(text: str, *parts: str) -> None:
    """The output has one line of Paceline, which says all that; no traceback."""
    said = [line for line in text.splitlines() if line.startswith("paceline: ")]
    assert len(said) == 1, text
    assert all(part in said[0] for part in parts), said[0]
    assert "Traceback" not in text


def test_a_partition_that_does_not_exist(cluster: Cluster, tmp_path: Path) -> None:
    words = ["paceline", "launch", "--slurm", "job.sh", "--partition", "nosuch", "--"]
    done = cluster.run(*words, *train()[1:], folder=tmp_path)
    assert done.returncode == 2
    one_sentence(
        done.stderr, "--partition nosuch: this cluster has no such partition; it has p, short"
    )
    assert not (tmp_path / "job.sh").exists()


def test_no_slurm_on_the_path(cluster: Cluster, tmp_path: Path) -> None:
    env = {**cluster.env, "PATH": str(Path(sys.executable).parent)}
    words = ["paceline", "launch", "--slurm", "job.sh", "--", *train()[1:], "--strategy=serial"]
    done = cluster.run(*words, folder=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    assert "Slurm is not on the PATH of this machine" in done.stdout
    done = cluster.run(*train(launcher="srun"), folder=tmp_path, env=env)
    assert done.returncode == 2
    one_sentence(done.stderr, "start the ranks with it", "srun -n 3")


def test_a_folder_that_the_nodes_do_not_share(cluster: Cluster, tmp_path: Path) -> None:
    apart = tmp_path / "apart"
    apart.mkdir()
    node = cluster.nodes["n2"]
    assert node.run(["mount", "-t", "tmpfs", "none", str(apart)], os.environ).returncode == 0
    try:
        step = cluster.srun(tmp_path, "-N3", "-n3", *train(out=apart / "run"))
        assert step.wait(60) == 2, step.said()
    finally:
        node.run(["umount", str(apart)], os.environ)
    one_sentence(step.said(), f"do not share {apart / 'run'}", "n2 does not see what n1", "--out")


def test_a_stranger_is_no_rank(cluster: Cluster, tmp_path: Path) -> None:
    """A process on another node that knows the board's address, but not the run's secret."""
    out = tmp_path / "run"
    # Rank 2 comes late, so that the file with the address is there for a while.
    late = ["sh", "-c", 'test "$SLURM_PROCID" = 2 && sleep 3; exec "$@"', "sh"]
    step = cluster.srun(tmp_path, "-N3", "-n3", *late, *train(out=out))
    until("rank 0 has begun", lambda: list(out.glob(".board-slurm-*[0-9]")), 60, 0.01)
    [handed] = out.glob(".board-slurm-*[0-9]")
    assert handed.stat().st_mode & 0o777 == 0o600
    address, _ = json.loads(handed.read_text())
    assert address.startswith("tcp:10.177.0.1:")  # not on all interfaces
    code = (
        "import sys; from paceline.transport.board.client import Board;"
        "Board(sys.argv[1], b'x' * 32, 2).set('paceline/1/here/2', '{}')"
    )
    done = cluster.nodes["n3"].run([sys.executable, "-c", code, address], cluster.env)
    assert done.returncode != 0
    assert "TransportError" in done.stderr
    assert step.wait() == 0, step.said()
    assert "that does not know this run's secret" in step.said()
    assert record_of(out)["status"] == "completed"
    assert [worker["host"] for worker in record_of(out)["workers"]] == list(NODES)
