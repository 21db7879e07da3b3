"""Run folders of earlier versions are read, and their checkpoints are gone on from, bit for bit.

tests/golden/VERSION holds folders that the version itself has written (tests/golden/make.py), and
the weights of its own run that did not stop. The last bit of a float32 product depends on the CPU,
so a CPU other than the one that the folder names gives weights that are equal but for rounding.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.contract.test_strategies import identical
from tests.golden.make import END, RUNS, STOP, options

import paceline
from paceline.errors import DataCorrupt
from paceline.record.machine import cpu_name
from paceline.record.reader import read_run

GOLDEN = Path(__file__).parents[1] / "golden"
VERSIONS = sorted(p.name for p in GOLDEN.iterdir() if p.name[0].isdigit())


@pytest.fixture(params=[(version, name) for version in VERSIONS for name in RUNS])
def earlier(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    version, name = request.param
    shutil.copytree(GOLDEN / version / name, tmp_path / "run")
    return name, tmp_path / "run"


def test_there_are_some() -> None:
    assert "0.1.0" in VERSIONS


def test_a_record_is_read(earlier: tuple[str, Path]) -> None:
    record = read_run(earlier[1])
    assert record["result"]["steps"] == STOP
    assert record["status"] == "completed"


def test_a_run_goes_on_as_if_it_had_not_stopped(earlier: tuple[str, Path]) -> None:
    name, folder = earlier
    expected = load_file(folder / "whole.safetensors")
    same_cpu = read_run(folder)["environment"]["cpu"] == cpu_name()
    run = paceline.train(
        **options(name), steps=END, resume=str(folder), out=str(folder), sample_every_s=0
    )
    assert run.steps == END
    if same_cpu:
        assert identical(run.weights, expected)
    else:
        assert run.weights.keys() == expected.keys()
        torch.testing.assert_close(run.weights, expected, rtol=0, atol=1e-6)


def test_a_momentum_that_is_forgotten_is_seen_on_every_cpu(earlier: tuple[str, Path]) -> None:
    """What a resumed run may lose moves the weights by much more than rounding does."""
    name, folder = earlier
    expected = load_file(folder / "whole.safetensors")
    asked = {**options(name), "momentum": 0.0, "sample_every_s": 0}
    run = paceline.train(**asked, steps=END, resume=str(folder), out=str(folder))
    assert max(float((run.weights[k] - expected[k]).abs().max()) for k in expected) > 1e-3


def test_other_workers_go_on_too(earlier: tuple[str, Path]) -> None:
    name, folder = earlier
    asked = {**options(name), "workers": 3, "sample_every_s": 0}
    assert paceline.train(**asked, steps=END, resume=str(folder), out=str(folder)).steps == END


def test_a_damaged_part_is_named(earlier: tuple[str, Path]) -> None:
    name, folder = earlier
    part = folder / "checkpoints" / f"step-{STOP:08d}" / "worker-0.pt"
    part.write_bytes(part.read_bytes()[:100])
    with pytest.raises(DataCorrupt, match=r"worker-0\.pt cannot be read"):
        paceline.train(**options(name), steps=END, resume=str(folder), out=str(folder))
