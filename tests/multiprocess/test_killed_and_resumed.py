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
KILLS = 10  # per setting: 50 in all
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


@pytest.mark.parametrize(("spec", "codec", "transport"), SETTINGS)
def test_resumes_after_kill_9_are_exact(
    tmp_path: Path, spec: str, codec: str, transport: str
) -> None:
    began = time.monotonic()
    _, told = start(tmp_path / "whole", spec, codec, transport).communicate(timeout=120)
    longest = time.monotonic() - began
    expected = load_file(tmp_path / "whole" / "model.safetensors")
    draw, kills, ends = random.Random(7), 0, 0
    while kills < KILLS or not ends:
        out = tmp_path / f"run-{ends}"
        process = start(out, spec, codec, transport)
        patience = draw.uniform(0.2, 0.9) * longest if kills < KILLS else 120
        try:
            _, told = process.communicate(timeout=patience)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate(timeout=30)
            kills += 1
            continue
        assert process.returncode == 0, told
        assert identical(load_file(out / "model.safetensors"), expected)
        ends += 1
