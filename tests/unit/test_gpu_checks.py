"""`paceline doctor --gpu` notices what is wrong: its checks with made-up trainings."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.doctor import gpu
from paceline.doctor.gpu import Check, Place, difference
from paceline.doctor.running import PartFailed, scrubbed
from paceline.errors import BadRequest


class Trainings:
    """Made-up trainings: weights that depend on the options, and an error on the GPU."""

    def __init__(self, **off: float) -> None:
        self.off, self.asked = off, list[dict[str, Any]]()

    def __call__(self, options: Mapping[str, Any], out: Path) -> dict[str, Tensor]:
        self.asked.append(dict(options))
        weights = torch.tensor([1.0, -2.0, 4.0])
        if options.get("device") == "cuda":
            weights += self.off.get("device", 0.0)
        if options.get("workers") == 2:
            weights += self.off.get("workers", 0.0)
        if "resume" in options:
            weights += self.off.get("resume", 0.0)
        weights += self.off.get("each", 0.0) * len(self.asked)
        return {"weight": weights, "bias": torch.zeros(2)}


def place(tmp_path: Path, trainings: Trainings, devices: int = 1) -> Place:
    return Place("cuda", "nccl", devices, tmp_path, train=trainings)


def found(tmp_path: Path, trainings: Trainings) -> dict[str, Check]:
    return {check.name: check for check in gpu.checks(place(tmp_path, trainings))}


def test_what_is_right(tmp_path: Path) -> None:
    """One GPU: processes need one each, so their checks are left out, and say so."""
    checks = found(tmp_path, Trainings())
    made = [c for c in checks.values() if c.ok is not None]
    assert len(made) == 5
    assert all(c.ok for c in made)
    assert {c.detail for c in checks.values() if c.ok is None} == {
        "not checked: it takes 2 devices, one per process, and here is 1"
    }
    assert {"nccl: native", "nccl: ring", "nccl: tree", "nccl: other operations"} <= set(checks)
    assert "parity: 2 workers, inproc, native" in {c.name for c in made}


def test_a_device_that_computes_otherwise(tmp_path: Path) -> None:
    checks = found(tmp_path, Trainings(device=0.004))
    mlp, cnn = checks["parity: mlp, 1 worker"], checks["parity: cnn, 1 worker"]
    assert (mlp.ok, cnn.ok) == (False, True)
    assert mlp.detail == "weights differ from those of the CPU by 1.0e-03 (allowed: 1e-04)"
    assert mlp.figures["difference"] == pytest.approx(0.001, rel=1e-4)


def test_workers_that_differ_from_one(tmp_path: Path) -> None:
    check = found(tmp_path, Trainings(workers=0.1))["parity: 2 workers, inproc, native"]
    assert check.ok is False
    assert "those of one worker by 2.5e-02" in check.detail


def test_a_resume_that_is_not_exact(tmp_path: Path) -> None:
    check = found(tmp_path, Trainings(resume=1e-6))["resume: 1 worker, adam, dropout"]
    assert check.ok is False
    assert check.detail.startswith("differs from the unbroken run by 2.4e-07")


def test_a_device_that_does_not_repeat_itself(tmp_path: Path) -> None:
    check = found(tmp_path, Trainings(each=1e-5))["resume: 1 worker, adam, dropout"]
    assert check.ok is None
    assert check.detail.startswith("not decided: two unbroken runs differ by")


def test_a_training_that_fails_is_told_and_the_other_checks_go_on(tmp_path: Path) -> None:
    class Failing(Trainings):
        def __call__(self, options: Mapping[str, Any], out: Path) -> dict[str, Tensor]:
            if options.get("model") == "mlp" and options["device"] == "cuda":
                raise PartFailed(f"worker 0: no kernel image in {out}/x on {socket.gethostname()}")
            return super().__call__(options, out)

    checks = found(tmp_path, Failing())
    assert checks["parity: mlp, 1 worker"].ok is False
    assert checks["parity: mlp, 1 worker"].detail == "worker 0: no kernel image in PATH on HOST"
    assert checks["parity: cnn, 1 worker"].ok is True


@pytest.mark.parametrize(
    "other",
    [{}, {"weight": torch.tensor([float("nan")])}, {"weight": torch.tensor([float("inf")])}],
)
def test_weights_that_are_missing_or_not_finite_differ(other: dict[str, Tensor]) -> None:
    assert difference(other, {"weight": torch.ones(1)}) == float("inf")


def test_the_file_has_no_paths_and_no_host(tmp_path: Path) -> None:
    where = place(tmp_path, Trainings())
    made = [Check("a", False, scrubbed(f"in {tmp_path}"), {"difference": float("inf")})]
    content = gpu.described(where, made, ("Made-up A",))
    text = json.dumps(content, allow_nan=False)
    assert str(tmp_path) not in text
    assert socket.gethostname() not in text
    assert content["devices"] == ["Made-up A"]
    assert content["rehearsal"] is False
    assert content["checks"][0]["detail"] == "in PATH"


def test_what_is_scrubbed() -> None:
    assert scrubbed("cannot read '/home/ada/a b.py' or ~/x/y: no") == (
        "cannot read 'PATH b.py' or PATH: no"
    )
    assert scrubbed("1e-04 samples/s, and/or") == "1e-04 samples/s, and/or"


def test_without_a_gpu() -> None:
    if torch.version.cuda is not None:
        pytest.skip("this PyTorch has CUDA")
    with (
        pytest.raises(BadRequest, match=r"no GPU to check here.*built without CUDA"),
        gpu.here("cuda"),
    ):
        pass
