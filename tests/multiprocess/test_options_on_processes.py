"""Options of `train` where gradients are exchanged inside the backward pass: ddp and overlap."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.small import make_pairs, small_net, weights_distance

import paceline

pytestmark = pytest.mark.processes


def run(tmp_path: Path, name: str, **more: Any) -> paceline.Run:
    options = {
        "model": small_net,
        "data": (make_pairs(60), make_pairs(20, seed=1)),
        "workers": 2,
        "batch_size": 4,
        "steps": 6,
        "lr": 0.05,
        "threads": 1,
        "memory_format": "contiguous",
        "sample_every_s": 0,
        "out": str(tmp_path / name),
        "progress": False,
    }
    return paceline.train(**{**options, **more})


@pytest.mark.parametrize(
    "more",
    [
        {"accumulate": 3, "clip_norm": 0.1, "ema": 0.9},
        pytest.param({"precision": "fp16", "compile": "aot_eager"}, marks=pytest.mark.slow),
    ],
    ids=["accumulate", "fp16"],
)
def test_ddp_is_allreduce(tmp_path: Path, more: dict[str, Any]) -> None:
    ours = run(tmp_path, "ours", strategy="allreduce", overlap="off", **more)
    theirs = run(tmp_path, "theirs", strategy="ddp", transport="gloo", **more)
    assert weights_distance(ours.weights, theirs.weights) < 1e-6
    assert (ours.ema is None) == (theirs.ema is None)


def test_overlap_exchanges_what_has_been_added_up(tmp_path: Path) -> None:
    apart = run(tmp_path, "apart", overlap="off", accumulate=3)
    while_computing = run(tmp_path, "overlap", overlap="on", accumulate=3)
    assert weights_distance(apart.weights, while_computing.weights) < 1e-6


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of PyTorch's own modules
def test_inductor(tmp_path: Path) -> None:
    plain = run(tmp_path, "plain", strategy="allreduce")
    compiled = run(tmp_path, "compiled", strategy="allreduce", compile=True)
    assert weights_distance(plain.weights, compiled.weights) < 1e-5
    assert compiled.record["config"]["compile"] == "inductor"
