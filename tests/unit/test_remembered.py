"""A choice that was measured is made again: two runs of one model give the same bits."""

from pathlib import Path

import pytest
import torch
from torch import nn

import paceline
from paceline.replica import remembered
from paceline.run import rank


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3))


def train(tmp_path: Path, name: str) -> paceline.Run:
    random = torch.Generator().manual_seed(0)
    data = torch.randn(24, 1, 8, 8, generator=random), torch.arange(24) % 3
    return paceline.train(
        model=convolutions, data=data, transport="inproc", batch_size=8, steps=3,
        out=str(tmp_path / name), sample_every_s=0, progress=False,
    )  # fmt: skip


def test_the_second_run_makes_the_same_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter(["channels_last", "contiguous"])  # timing may say either
    monkeypatch.setattr(rank, "measure_memory_format", lambda *_: next(answers))
    first, second = train(tmp_path, "a"), train(tmp_path, "b")
    chosen = [run.record["chosen"]["memory_format"] for run in (first, second)]
    assert chosen == ["channels_last", "channels_last"]
    assert remembered.count() == 1
    assert all(torch.equal(first.weights[k], second.weights[k]) for k in first.weights)


@pytest.mark.parametrize("content", ["", "[]", '{"a": 3}', "{"])
def test_a_damaged_file_is_no_file(content: str) -> None:
    remembered.place().parent.mkdir(parents=True)
    remembered.place().write_text(content)
    assert remembered.recall("a") is None
    remembered.remember("a", "contiguous")
    assert remembered.recall("a") == "contiguous"


def test_another_shape_or_model_is_measured_anew() -> None:
    net, x = convolutions(), torch.zeros(2, 1, 8, 8)
    key = remembered.key_of(net, x, 1)
    assert key == remembered.key_of(convolutions(), x, 1)
    assert key != remembered.key_of(net, x, 2)
    assert key != remembered.key_of(net, torch.zeros(2, 1, 9, 9), 1)
    assert key != remembered.key_of(nn.Sequential(*net, nn.ReLU()), x, 1)


def test_a_cache_that_cannot_be_written_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    remembered.remember("a", "contiguous")
    assert remembered.recall("a") is None
