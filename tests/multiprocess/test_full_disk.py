"""When the disk becomes full or read-only during a run, or memory is exhausted, the user gets one
sentence, a record that says so where one can be written, and no half-written file.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.commands import run

# In a mount namespace of its own, which ends with the process. What the run has left is copied out
# of it.
ON_A_SMALL_DISK = """
import ctypes, os, shutil, subprocess, sys
from paceline.cli.main import main
if ctypes.CDLL(None, use_errno=True).unshare(0x00020000) != 0:  # CLONE_NEWNS
    raise OSError(ctypes.get_errno(), "unshare")
subprocess.run(["mount", "--make-rprivate", "/"], check=True)
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=" + sys.argv[1], "none", "disk"], check=True)
for folder in filter(None, os.environ.get("MOUNTED", "").split()):  # disks of their own inside
    os.makedirs(folder)
    subprocess.run(["mount", "-t", "tmpfs", "none", folder], check=True)
sys.argv = ["paceline", *sys.argv[2:]]
sys.path.insert(0, ".")
try:
    main()
finally:
    shutil.copytree("disk", "left", dirs_exist_ok=True)
"""


def lacking() -> str | None:
    if os.geteuid() != 0:
        return "mounting a small disk needs root"
    try:
        tried = subprocess.run(
            ["unshare", "-m", "mount", "-t", "tmpfs", "none", "/mnt"],
            check=False,
            capture_output=True,
            text=True,
        )
    except OSError as error:
        return f"a mount namespace needs unshare: {error}"
    return f"no disk can be mounted here: {tried.stderr.strip()}" if tried.returncode else None


needs_a_disk = pytest.mark.skipif(lacking() is not None, reason=str(lacking()))


def train(
    size: str, *options: str, steps: str = "100000", mounted: str = "", quiet: bool = True
) -> subprocess.CompletedProcess[str]:
    Path("disk").mkdir()
    Path("left").mkdir()
    lasts = ["--batch-size", "8", "--steps", steps, "--epochs", "100000"]
    given = ["--data", "synthetic:samples=64", "--threads", "1", "--out", "disk/run"]
    given += ["--quiet"] if quiet else []
    return run(
        [sys.executable, "-c", ON_A_SMALL_DISK, size, "train", *given, *lasts, *options],
        capture_output=True,
        text=True,
        env={**os.environ, "MOUNTED": mounted},
    )


def failed_with(said: str) -> str:
    """Check the only line of output against the record; return it."""
    assert len(said.splitlines()) == 1, said
    record = json.loads(Path("left/run/run.json").read_text())
    assert (record["status"], record["error"]) == ("failed", said.removeprefix("paceline: "))
    assert {path.name for path in Path("left").rglob(".*")} <= {".lock"}
    return said


@needs_a_disk
@pytest.mark.parametrize("size", ["300k", "1500k"])
@pytest.mark.parametrize("how", ["serial", "allreduce"])
def test_a_disk_that_is_too_small_for_a_checkpoint(size: str, how: str) -> None:
    hidden = {"300k": "mlp:hidden=8", "1500k": "mlp:hidden=256"}[size]
    workers = "2" if how == "allreduce" else "1"
    done = train(
        size, "--model", hidden, "--strategy", how, "--workers", workers, "--checkpoint-every", "5"
    )
    said = done.stderr.strip()
    assert done.returncode == 1, said
    assert len(said.splitlines()) == 1, said
    assert said.startswith("paceline: "), said
    assert "No space left on device (free space on that disk, or" in said, said
    assert "the checkpoint at step" in said, said
    record = json.loads(Path("left/run/run.json").read_text())
    assert (record["status"], record["error"]) == ("failed", said.removeprefix("paceline: "))
    assert record["result"]["steps"] > 0
    assert {path.name for path in Path("left").rglob(".*")} <= {".lock"}, (
        "neither a half-written checkpoint nor the reserve stays"
    )


@needs_a_disk
def test_a_disk_that_is_too_small_for_the_events() -> None:
    done = train("300k", "--model", "mlp:hidden=8")
    said = done.stderr.strip()
    assert (done.returncode, len(said.splitlines())) == (1, 1), said
    assert "the events cannot be written to " in said
    assert "No space left on device" in said
    assert json.loads(Path("left/run/run.json").read_text())["status"] == "failed"
    assert {path.name for path in Path("left").rglob(".*")} <= {".lock"}


@needs_a_disk
def test_a_disk_that_is_too_small_for_the_weights() -> None:
    done = train("1500k", "--model", "mlp:hidden=512", steps="3")
    assert "model.safetensors cannot be written: No space left" in failed_with(done.stderr.strip())


@needs_a_disk
def test_a_disk_that_is_too_small_for_the_ledger() -> None:
    """The block that a worker reserves is larger than the disk has room for."""
    done = train(
        "290k", "--model", "mlp:hidden=8", "--privacy", "noise=1.0,delta=1e-5", steps="20000"
    )
    assert "No space left on device" in failed_with(done.stderr.strip())


@pytest.mark.slow
@needs_a_disk
def test_a_disk_that_is_too_small_for_the_timeline() -> None:
    """A missing timeline does not make a run fail: a notice says that it is missing."""
    quietly = ("--evaluate-every", "100000", "--sample-every-s", "0")
    done = train("1600k", "--model", "mlp:hidden=8", *quietly, steps="3000", quiet=False)
    assert done.returncode == 0, done.stderr
    assert not Path("left/run/trace.json").exists()
    assert "trace.json cannot be written: No space left on device" in done.stderr
    assert json.loads(Path("left/run/run.json").read_text())["status"] == "completed"
    assert {path.name for path in Path("left").rglob(".*")} <= {".lock"}


TURNS_READ_ONLY = """
import subprocess
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.calls = nn.Linear(3072, 10), 0
    def forward(self, x):
        self.calls += 1
        if self.calls == 8:
            where = "disk/run/checkpoints"
            subprocess.run(["mount", "-o", "remount,ro", where], check=True)
        return self.inner(x.flatten(1))
"""


@needs_a_disk
def test_a_disk_that_becomes_read_only() -> None:
    Path("turns.py").write_text(TURNS_READ_ONLY)
    mounted = "disk/run/checkpoints"
    done = train("8m", "--model", "turns:Net", "--checkpoint-every", "5", mounted=mounted)
    said = failed_with(done.stderr.strip())
    assert "the checkpoint at step 10 cannot be written to disk/run/checkpoints: Read-only" in said
    assert [path.name for path in Path("left/run/checkpoints").iterdir()] == ["step-00000005"]


# --- memory

LIMITED = """
import resource, sys
from paceline.cli.main import main
import torch, paceline.api
sys.path.insert(0, ".")
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
limit = used + int(sys.argv[1]) * 10**6
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
sys.argv = ["paceline", *sys.argv[2:]]
main()
"""
GREEDY = """
import torch
from torch import nn
class InARank(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.calls = nn.Linear(6, 10), 0
    def forward(self, x):
        self.calls += 1
        if self.calls > 5:
            self.kept = torch.ones(10**9)
        return self.inner(x)
class InPython(InARank):
    def forward(self, x):
        self.calls += 1
        if self.calls > 5:
            self.kept = bytearray(4 * 10**9)
        return self.inner(x)
class InTheLauncher(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 10**9)
"""


@pytest.mark.parametrize(
    ("model", "strategy", "said_by", "code"),
    [
        ("InARank", "allreduce", "worker ", 1),
        pytest.param("InPython", "allreduce", "worker ", 1, marks=pytest.mark.slow),
        pytest.param(
            "InTheLauncher", "serial", "model greedy:InTheLauncher ", 2, marks=pytest.mark.slow
        ),
    ],
)
def test_a_memory_limit(model: str, strategy: str, said_by: str, code: int) -> None:
    Path("greedy.py").write_text(GREEDY)
    given = ["--data", "synthetic:samples=64,shape=6", "--model", f"greedy:{model}", "--quiet"]
    given += ["--strategy", strategy, "--epochs", "100", "--batch-size", "8", "--out", "run"]
    given += ["--workers", "2" if strategy == "allreduce" else "1", "--transport", "shm"]
    done = run(
        [sys.executable, "-c", LIMITED, "2000", "train", *given], capture_output=True, text=True
    )
    said = done.stderr.strip()
    assert (done.returncode, len(said.splitlines())) == (code, 1), said
    assert said.startswith(f"paceline: {said_by}"), said
    assert "out of memory" in said, said
    assert "use a smaller --batch-size, a smaller model or fewer --workers" in said, said
    if Path("run").exists():
        assert json.loads(Path("run/run.json").read_text())["status"] == "failed"
        assert {path.name for path in Path("run").rglob(".*")} <= {".lock"}
