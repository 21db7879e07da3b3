"""Batch scripts for Slurm: what is written and refused; bash and a stand-in for srun run them."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.commands import SMALL_TRAIN, free_job

from paceline.cli.launch import launch
from paceline.errors import BadRequest, UnknownName, on_the_command_line
from paceline.launch import slurm_cluster
from paceline.launch.slurm import Allocation, batch_script
from paceline.launch.slurm_job import MOST_NODES, engine, hosts_of
from paceline.report.words import entries

ROOT = Path(__file__).parent.parent.parent

# As srun: one process per task, each with its variables; the first failure ends the others
# (--kill-on-bad-exit).
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do echo "$1" >> srun-options; shift; done
export SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=$SLURM_NTASKS SLURM_STEP_NODELIST=localhost
export SLURM_STEP_TASKS_PER_NODE=$SLURM_NTASKS SLURM_NODEID=0
for ((task = 0; task < SLURM_NTASKS; task++)); do
    SLURM_PROCID=$task SLURM_LOCALID=$task "$@" &
done
code=0
for ((task = 0; task < SLURM_NTASKS; task++)); do
    wait -n || { code=$?; kill $(jobs -p) 2> /dev/null; }
done
exit $code
"""


@pytest.fixture(autouse=True)
def _flags(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A batch script is asked for on a command line, so its errors speak of flags. A Slurm that
    this machine may have is not asked.
    """
    monkeypatch.setattr(slurm_cluster, "which", lambda name: None)
    with on_the_command_line():
        yield


def submit(script: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """As sbatch: reads the #SBATCH lines, and runs the script on the first node."""
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(.*)$", script.read_text(), re.MULTILINE))
    tools = folder / "tools"
    tools.mkdir(exist_ok=True)
    (tools / "srun").write_text(SRUN)
    (tools / "srun").chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tools}:{os.environ['PATH']}",
        "SLURM_JOB_ID": str(free_job(0)),
        "SLURM_JOB_NAME": asked["job-name"],
        "SLURM_NTASKS": str(int(asked["nodes"]) * int(asked["ntasks-per-node"])),
    }
    if "cpus-per-task" in asked:
        environment["SLURM_CPUS_PER_TASK"] = asked["cpus-per-task"]
    return subprocess.run(
        ["bash", script],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def call(*words: str) -> str:
    return (
        CliRunner()
        .invoke(launch, list(words), catch_exceptions=False, standalone_mode=False)
        .output
    )


# --- what is written


def test_a_script_for_a_training_run(tmp_path: Path) -> None:
    said = call(
        "--slurm",
        "job.sh",
        "--nodes",
        "2",
        "--tasks-per-node",
        "4",
        "--time",
        "1:30:00",
        "--",
        *SMALL_TRAIN,
    )
    assert said == (
        "job.sh: 2 nodes with 4 tasks each, a process for every task. Slurm is not on the PATH of"
        " this machine: on a machine of the cluster type sbatch job.sh\n"
    )
    assert (tmp_path / "job.sh").read_text() == (
        "#!/bin/bash\n"
        "#SBATCH --job-name=paceline\n"
        "#SBATCH --nodes=2\n"
        "#SBATCH --ntasks-per-node=4\n"
        "#SBATCH --time=1:30:00\n"
        "#SBATCH --output=%x-%j.out\n"
        "#SBATCH --open-mode=append\n"
        "#SBATCH --requeue\n"
        "#SBATCH --signal=USR1@120\n"
        "\n"
        "set -euo pipefail\n"
        f'export PATH={Path(sys.executable).parent}:"$PATH"\n'
        'export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"\n'
        "\n"
        "# One process per task; when one fails, the others are ended.\n"
        "code=0\n"
        'srun --kill-on-bad-exit=1 --cpus-per-task="$OMP_NUM_THREADS" '
        "paceline train --data fashion-mini --model mlp:hidden=16 --strategy allreduce --steps 4"
        ' --out "runs/$SLURM_JOB_NAME-$SLURM_JOB_ID" --resume auto --threads "$OMP_NUM_THREADS"'
        " || code=$?\n"
        "\n"
        "# 75: the run has left with a checkpoint before the time limit. The next start goes on.\n"
        'if [ "$code" -eq 75 ]; then\n'
        '    scontrol requeue "$SLURM_JOB_ID" && sleep 60\n'
        "fi\n"
        'exit "$code"\n'
    )
    assert [p.name for p in tmp_path.iterdir()] == ["job.sh"]


def test_a_persons_own_script_keeps_its_arguments(tmp_path: Path) -> None:
    (tmp_path / "my loop.py").touch()
    said = call(
        "--slurm",
        "-",
        "--cpus-per-task",
        "2",
        "--partition",
        "short",
        "my loop.py",
        "--nodes",
        "it's",
        "--force",
    )
    assert "#SBATCH --cpus-per-task=2\n#SBATCH --partition=short\n" in said
    assert "--nodes=1\n" in said
    assert said.endswith("""python 'my loop.py' --nodes 'it'"'"'s' --force\n""")


def test_the_lines_of_setup_come_before_the_run() -> None:
    said = call(
        "--slurm",
        "-",
        "--setup",
        "module load gcc\nmodule load x",
        "--setup",
        "source v/bin/activate",
        "--",
        "train",
    )
    lines = said.splitlines()
    where = lines.index("module load gcc")
    assert lines[where - 1 : where + 4] == [
        "set +u  # the lines of --setup", "module load gcc", "module load x",
        "source v/bin/activate", "set -u",
    ]  # fmt: skip
    assert where < next(i for i, line in enumerate(lines) if line.startswith("srun"))


@pytest.mark.parametrize("how", [["--threads", "2"], ["--set", "threads=2"], ["run.toml"]])
def test_threads_that_were_said_are_kept(tmp_path: Path, how: list[str]) -> None:
    (tmp_path / "run.toml").write_text("threads = 2\n")
    assert '"$OMP_NUM_THREADS"' not in started("train", *how)


def started(*words: str, limit: str = "60") -> str:
    """What srun starts, as the script has it."""
    said = call("--slurm", "-", "--time", limit, "--", *words)
    line = next(line for line in said.splitlines() if line.startswith("srun"))
    return line.partition(" paceline ")[2]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["--out", "a"], "train --out a --resume auto --threads"),
        (["--set", "out=a"], "train --set out=a --resume auto --threads"),
        (["--out", "a", "--resume", "auto"], "train --out a --resume auto --threads"),
        (["--resume", "runs/a"], "train --resume runs/a --threads"),
        ([], 'train --out "runs/$SLURM_JOB_NAME-$SLURM_JOB_ID" --resume auto --threads'),
    ],
)
def test_a_job_that_is_started_again_goes_on(given: list[str], expected: str) -> None:
    assert started("train", *given).startswith(expected)


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [
        ("60", 120), ("1:00:00", 120), ("2-12", 120), ("2-12:30", 120), ("0", 120), ("0:0", None),
        ("10", 120), ("5", 60), ("2:30", 30), ("0:01:00", 12), ("0-0:01", 12), ("0:03", 1),
    ],
)  # fmt: skip
def test_a_short_limit_leaves_less_time_before_it(limit: str, seconds: int | None) -> None:
    if seconds is None:
        with pytest.raises(BadRequest, match="is not a time limit"):
            Allocation(time=limit)
    else:
        assert f"#SBATCH --signal=USR1@{seconds}" in Allocation(time=limit).lines(leaves=True)


def test_a_script_of_ones_own_is_not_signalled(tmp_path: Path) -> None:
    """SIGUSR1 would kill a program that does not handle it."""
    (tmp_path / "loop.py").touch()
    assert "signal" not in call("--slurm", "-", "loop.py")


@pytest.mark.processes
@pytest.mark.parametrize("code", [0, 75, 143, 1])
def test_the_script_requeues_its_job_on_75_only(tmp_path: Path, code: int) -> None:
    call("--slurm", "job.sh", "--", "train")
    text = (tmp_path / "job.sh").read_text()
    (tmp_path / "job.sh").write_text(
        re.sub(r"export PATH=[^:]*:", f"export PATH={tmp_path}:", text)
    )
    ends, asks = f"exit {code}", 'echo "$@" > asked'
    for name, does in (("paceline", ends), ("scontrol", asks), ("sleep", "exit 0")):
        (tmp_path / name).write_text(f"#!/bin/bash\n{does}\n")
        (tmp_path / name).chmod(0o755)
    done = submit(tmp_path / "job.sh", tmp_path)
    assert done.returncode == code, done.stderr
    asked = tmp_path / "asked"
    assert asked.exists() is (code == 75)
    assert code != 75 or asked.read_text().startswith("requeue ")


@pytest.mark.processes
@pytest.mark.parametrize("words", [["paceline", *SMALL_TRAIN], SMALL_TRAIN])
def test_bash_understands_it(tmp_path: Path, words: list[str]) -> None:
    awkward = ["--out", "a 'b' $c `d` \"e\" \\ ; f"]
    call("--slurm", "job.sh", "--tasks-per-node", "2", "--setup", "true", "--", *words, *awkward)
    subprocess.run(["bash", "-n", "job.sh"], check=True)
    (tmp_path / "paceline").write_text(
        '#!/bin/bash\n[ "$SLURM_PROCID" = 0 ] && printf "%s\\n" "$@"\nexit 0\n'
    )
    (tmp_path / "paceline").chmod(0o755)
    text = (tmp_path / "job.sh").read_text()
    (tmp_path / "job.sh").write_text(
        re.sub(r"export PATH=[^:]*:", f"export PATH={tmp_path}:", text)
    )
    done = submit(tmp_path / "job.sh", tmp_path)
    added = ["--resume", "auto", "--threads", "1"]
    assert done.stdout.splitlines() == [*SMALL_TRAIN, *awkward, *added]
    assert (tmp_path / "srun-options").read_text().split() == [
        "--kill-on-bad-exit=1",
        "--cpus-per-task=1",
    ]


def test_the_example_is_what_the_command_writes() -> None:
    words = "train --model cnn --data fashion-mini --strategy allreduce --epochs 3 --out runs/slurm"
    made = batch_script(
        words.split(),
        Allocation(2, 2, 1, "0:30:00", "short", "fashion"),
        ["source ~/paceline/bin/activate"],
        "/opt/paceline/bin",
        {"out": "runs/slurm"},
    )
    assert (ROOT / "deploy" / "slurm" / "train.sh").read_text() == made


# --- what is refused


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--nodes", "0", "--", "train"], "--nodes 0: it must be 1 or more"),
        (["--tasks-per-node", "-1", "--", "train"], "--tasks-per-node -1: it must be 1 or more"),
        (["--cpus-per-task", "0", "--", "train"], "--cpus-per-task 0: it must be 1 or more"),
        (
            ["--time", "soon", "--", "train"],
            "--time 'soon' is not a time limit of Slurm: write minutes",
        ),
        (["--partition", "a b", "--", "train"], "--partition 'a b': it must be one word"),
        (
            ["--job-name", "a\n#SBATCH --nodes=9", "--", "train"],
            "--job-name 'a.*: it must be one word",
        ),
        (
            ["--nodes", "2", "--", *SMALL_TRAIN, "--workers", "3"],
            "--workers 3, but 2 nodes with 1 task each are 2 processes: leave",
        ),
        (
            [
                "--nodes",
                "2",
                "--tasks-per-node",
                "4",
                "--",
                "train",
                "--strategy",
                "ps",
                "--workers",
                "8",
            ],
            r"--workers 8, .* are 8 processes \(7 workers and 1 server\): leave --workers out",
        ),
        (["--", "train", "--strategy", "ps"], "serve"),
        (
            ["--nodes", "2", "--", "train", "--strategy", "serial"],
            "strategy serial runs 1 worker, and 2 nodes with 1 task each are 2",
        ),
        (["--nodes", "2", "--", *SMALL_TRAIN, "--lr", "fast"], "lr"),
        (["nosuch.py"], "nosuch.py is not a file: give your script, or train"),
        (["study", "--short"], "study is not a file"),
        (
            ["-n", "4", "--", "train"],
            "--ranks is for processes on this machine; with --slurm give --nodes",
        ),
        (
            ["--threads", "4", "--", "train"],
            "--threads is for processes on this machine; with --slurm give --cpus-per-task",
        ),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, words: list[str], sentence: str) -> None:
    with pytest.raises(BadRequest, match=sentence):
        call("--slurm", "job.sh", *words)
    assert not (tmp_path / "job.sh").exists()


def test_without_a_strategy_several_tasks_have_the_default_of_several_workers() -> None:
    script = call("--slurm", "-", "--nodes", "2", "--", "train", "--data", "fashion-mini")
    assert "paceline train --data fashion-mini --out " in script


def test_workers_that_agree_are_welcome() -> None:
    assert "--workers 2" in call(
        "--slurm", "-", "--nodes", "2", "--", *SMALL_TRAIN, "--workers", "2"
    )
    assert "--workers 7" in call(
        "--slurm", "-", "--nodes", "8", "--", "train", "--strategy", "ps", "--workers", "7"
    )


def test_an_unknown_name_is_refused_before_the_queue() -> None:
    with pytest.raises(UnknownName, match="Did you mean 'allreduce'"):
        call("--slurm", "-", "--nodes", "2", "--", "train", "--strategy", "alreduce")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("sinfo", "refused"),
    [
        ("echo short; echo long", True),
        ("echo short; echo nosuch", False),
        ("exit 1", False),  # no controller answers, so nothing is known
    ],
)
def test_a_partition_that_the_cluster_does_not_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sinfo: str, refused: bool
) -> None:
    monkeypatch.setattr(slurm_cluster, "which", lambda name: str(tmp_path / name))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "sinfo").write_text(f"#!/bin/sh\n{sinfo}\n")
    (tmp_path / "sinfo").chmod(0o755)
    words = ["--slurm", "job.sh", "--partition", "short,nosuch", "--", "train"]
    if refused:
        with pytest.raises(BadRequest, match=r"--partition nosuch: .* it has long, short"):
            call(*words)
        assert not (tmp_path / "job.sh").exists()
    else:
        assert call(*words).endswith("Next: sbatch job.sh\n")


# --- what a record says about the job


def test_the_record_names_job_nodes_and_partition() -> None:
    assert engine({}) == {}
    assert engine({"SLURM_JOB_ID": "5"}) == {
        "slurm": {"job": 5, "nodes": [], "partition": None, "requeued": 0}
    }
    told = {
        "SLURM_JOB_ID": "17",
        "SLURM_JOB_NODELIST": "n[1-3]",
        "SLURM_STEP_NODELIST": "n[1-2]",
        "SLURM_JOB_PARTITION": "short",
        "SLURM_RESTART_COUNT": "2",
    }
    assert engine(told) == {
        "slurm": {"job": 17, "nodes": ["n1", "n2"], "partition": "short", "requeued": 2}
    }
    assert entries(engine(told)["slurm"]) == "job 17, nodes n1 n2, partition short, requeued 2"


@pytest.mark.parametrize(
    ("nodes", "hosts"),
    [
        ("", []),
        ("localhost", ["localhost"]),
        ("node[08-10,12],other", ["node08", "node09", "node10", "node12", "other"]),
        ("r[1-2]n[1,3]-ib", ["r1n1-ib", "r1n3-ib", "r2n1-ib", "r2n3-ib"]),
    ],
)
def test_the_hosts_of_a_list(nodes: str, hosts: list[str]) -> None:
    assert hosts_of(nodes) == hosts


def test_a_list_of_a_million_nodes_is_cut_short() -> None:
    assert len(hosts_of("n[1-1000000]")) == MOST_NODES


def test_a_file_that_exists_is_kept(tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_text("mine")
    with pytest.raises(BadRequest, match=r"job.sh exists already: .* --force"):
        call("--slurm", "job.sh", "--", "train")
    assert (tmp_path / "job.sh").read_text() == "mine"
    call("--slurm", "job.sh", "--force", "--", "train")
    assert "srun" in (tmp_path / "job.sh").read_text()
    with pytest.raises(BadRequest, match="no such folder"):
        call("--slurm", "nowhere/job.sh", "--", "train")
    with pytest.raises(BadRequest, match="is a folder"):
        call("--slurm", str(tmp_path), "--", "train")


@pytest.mark.parametrize("option", ["--nodes", "--time", "--setup", "--partition"])
def test_options_of_slurm_need_slurm(option: str) -> None:
    with pytest.raises(BadRequest, match=f"{option} is for a batch script: add --slurm FILE"):
        call(option, "1", "train.py")


# --- a run


@pytest.mark.slow
@pytest.mark.processes
def test_three_tasks_train_together(tmp_path: Path) -> None:
    """There is no Slurm here: a stand-in for srun starts the tasks with the variables that srun
    sets.
    """
    call(
        "--slurm",
        "job.sh",
        "--tasks-per-node",
        "3",
        "--cpus-per-task",
        "1",
        "--",
        *SMALL_TRAIN,
        "--out",
        "run",
        "--json",
    )
    done = submit(tmp_path / "job.sh", tmp_path)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert (record["status"], len(record["workers"])) == ("completed", 3)
    assert record == json.loads((tmp_path / "run" / "run.json").read_text())
