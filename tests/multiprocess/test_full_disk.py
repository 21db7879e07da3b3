"""When the disk becomes full during a run, the user gets one sentence, a record that says so, and
no half-written checkpoint.
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
sys.argv = ["paceline", *sys.argv[2:]]
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


pytestmark = pytest.mark.skipif(lacking() is not None, reason=str(lacking()))


def train(size: str, *options: str) -> subprocess.CompletedProcess[str]:
    Path("disk").mkdir()
    Path("left").mkdir()
    lasts = ["--batch-size", "8", "--steps", "100000", "--epochs", "100000"]
    given = ["--data", "synthetic:samples=64", "--threads", "1", "--out", "disk/run", "--quiet"]
    return run(
        [sys.executable, "-c", ON_A_SMALL_DISK, size, "train", *given, *lasts, *options],
        capture_output=True,
        text=True,
    )


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
    assert said.endswith("No space left on device"), said
    assert "the checkpoint at step" in said, said
    record = json.loads(Path("left/run/run.json").read_text())
    assert (record["status"], record["error"]) == ("failed", said.removeprefix("paceline: "))
    assert record["result"]["steps"] > 0
    assert {path.name for path in Path("left").rglob(".*")} <= {".lock"}, (
        "neither a half-written checkpoint nor the reserve stays"
    )


def test_a_disk_that_is_too_small_for_the_events() -> None:
    done = train("300k", "--model", "mlp:hidden=8")
    said = done.stderr.strip()
    assert (done.returncode, len(said.splitlines())) == (1, 1), said
    assert "the records cannot be written: No space left on device" in said
    assert json.loads(Path("left/run/run.json").read_text())["status"] == "failed"
    assert {path.name for path in Path("left").rglob(".*")} <= {".lock"}
