"""`paceline doctor --gpu` on the CPU with gloo: real trainings, real processes."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import paceline
from paceline.collectives.algorithms.native import Native
from paceline.doctor import gpu, running
from paceline.doctor.gpu import Place


def train_here(options: Mapping[str, Any], out: Path) -> dict[str, Tensor]:
    """As `train_by_command`, in this process, which has PyTorch loaded already."""
    weights: dict[str, Tensor] = paceline.train(progress=False, out=str(out), **options).weights
    return weights


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setattr(gpu, "STEPS", 4)
    data = "synthetic:shape=1x20x20,samples=256"
    return Place("cpu", "gloo", 2, tmp_path, data, train_here)


@pytest.mark.slow
def test_a_rehearsal(place: Place) -> None:
    checks = {check.name: check for check in gpu.checks(place)}
    assert {name: check.detail for name, check in checks.items() if not check.ok} == {}
    assert {"gloo: native", "gloo: ring", "gloo: tree"} <= set(checks)
    assert checks["parity: mlp, 1 worker"].figures["difference"] == 0.0
    assert checks["gloo: ring"].figures == {"tried": 12.0, "wrong": 0.0}


@pytest.mark.parametrize(
    "name",
    [
        "parity: 2 workers, gloo, ring",
        "gloo: native",
        "gloo: other operations",
        "resume: 2 workers, inproc, codec topk",
    ],
)
def test_one_check_of_each_kind(place: Place, name: str) -> None:
    bodies = {title: body for title, _, body in gpu._bodies(place)}
    right, detail, _ = bodies[name]()
    assert right, detail


def test_a_collective_that_adds_wrongly(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Native, "all_reduce", lambda self, buffer, op="sum": buffer.add_(0))
    right, detail, figures = gpu.sums(place, "native")
    assert not right
    assert detail.startswith("wrong results: max of 1, ")
    assert figures["wrong"] == 12


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (lambda: time.sleep(60), "no result after 0.3 s"),
        (lambda: os._exit(3), "the process ended with exit code 3"),
        (lambda: 1 / 0, "division by zero"),
    ],
)
def test_a_part_that_hangs_or_dies(body: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "PATIENCE_S", 0.3)
    with pytest.raises(running.PartFailed, match=said):
        running.in_child(body)


def test_a_training_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import sys; sys.exit('paceline: /a/b/c cannot be read: ' + sys.argv[2])"
    monkeypatch.setattr(running, "COMMAND", program)
    with pytest.raises(running.PartFailed, match=r"^PATH cannot be read: --global-batch-size=64$"):
        running.train_by_command({"global_batch_size": 64}, tmp_path)
    monkeypatch.setattr(running, "COMMAND", "import time; time.sleep(60)")
    monkeypatch.setattr(running, "PATIENCE_S", 0.3)
    with pytest.raises(running.PartFailed, match=r"had not ended after 0.3 s"):
        running.train_by_command({}, tmp_path)


@pytest.mark.slow
def test_a_training_by_command(tmp_path: Path) -> None:
    options = Place("cpu", "gloo", 2, tmp_path, "synthetic:shape=4,samples=64").options(steps=1)
    assert running.train_by_command(options, tmp_path / "run").keys() >= {"1.weight", "1.bias"}
