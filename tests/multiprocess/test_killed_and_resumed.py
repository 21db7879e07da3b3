"""Runs that are killed with SIGKILL at a random moment go on as if nothing had happened."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tests import commands
from tests.contract.test_strategies import identical

pytestmark = [pytest.mark.processes, pytest.mark.slow]
KILLS = 10  # that leave a checkpoint, per setting: 50 in all
SETTINGS = [
    ("allreduce:collective=ring", "none", "shm"),
    ("local-sgd:every=4", "int8:feedback=true", "gloo"),
    ("ps", "topk:ratio=0.1", "shm"),
    ("diloco:every=5", "none", "gloo"),
    ("gossip", "int8", "shm"),
]


def start(out: Path, spec: str, codec: str, transport: str) -> commands.Popen:
    """Begin the run in `out`, or go on from its last checkpoint."""
    words = ["train", "--model", "mlp:hidden=16", "--data", "fashion-mini", "--strategy", spec]
    words += ["--codec", codec, "--transport", transport, "--workers", "2", "--steps", "120"]
    words += ["--checkpoint-every", "5", "--momentum", "0.9", "--threads", "1", "--overlap", "off"]
    if any((out / "checkpoints").glob("step-*")):
        words += ["--resume", str(out)]
    else:
        shutil.rmtree(out, ignore_errors=True)
    return commands.Popen(
        [commands.PACELINE, *words, "--out", out],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def newest(out: Path) -> int:
    """Return the step of the newest checkpoint in `out`, or 0."""
    folders = (out / "checkpoints").glob("step-*")
    return max((int(folder.name.removeprefix("step-")) for folder in folders), default=0)


def kill_at(process: commands.Popen, out: Path, step: int, delay_s: float) -> bool:
    """Kill the run `delay_s` after its checkpoint of `step`; return whether it was still alive."""
    until = time.monotonic() + 120
    while newest(out) < step and process.poll() is None:
        assert time.monotonic() < until, f"no checkpoint of step {step} after 120 s"
        time.sleep(0.002)
    try:
        process.wait(timeout=delay_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=30)
        return True
    return False


@pytest.mark.parametrize(("spec", "codec", "transport"), SETTINGS)
def test_resumes_after_kill_9_are_exact(
    tmp_path: Path, spec: str, codec: str, transport: str
) -> None:
    began = time.monotonic()
    whole = start(tmp_path / "whole", spec, codec, transport)
    _, told = whole.communicate(timeout=120)
    assert whole.returncode == 0, told
    longest = time.monotonic() - began
    expected = load_file(tmp_path / "whole" / "model.safetensors")
    draw, resumes, ends = random.Random(7), 0, 0
    while resumes < KILLS or not ends:
        out = tmp_path / f"run-{ends}"
        process = start(out, spec, codec, transport)
        # A start takes longer than the steps. So one kill in four comes after a random time, and
        # the others a moment after one of the next three checkpoints, while the run trains.
        further = draw.randrange(4)
        delay_s = draw.uniform(0, 0.1 if further else longest)
        if resumes < KILLS and kill_at(process, out, newest(out) + 5 * further, delay_s):
            resumes += newest(out) > 0  # without a checkpoint the run begins again
            continue
        _, told = process.communicate(timeout=120)
        assert process.returncode == 0, told
        assert identical(load_file(out / "model.safetensors"), expected)
        ends += 1
