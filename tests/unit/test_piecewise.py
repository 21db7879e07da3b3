"""Models that are built piece by piece: the weights of a plain build, without all of its memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline.parallel import piecewise
from paceline.parallel.piecewise import bare, with_only
from paceline.registry import models

IMAGES = {"input_shape": (1, 28, 28), "classes": 10}


class Block(nn.Module):
    """A stranger's module: weights of its own, made before and after its children's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before = nn.Parameter(torch.randn(width))
        self.inner = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width))
        self.after = nn.Parameter(torch.empty(width))
        nn.init.normal_(self.after)
        self.register_buffer("drawn", torch.rand(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x * self.before) + self.after


class Deeper(Block):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.more = nn.Linear(width, 3)


def strangers() -> nn.Module:
    return nn.Sequential(nn.Flatten(), Block(4), Deeper(4), nn.Linear(3, 2))


def initialised_at_the_end() -> nn.Module:
    """As many tutorials do it."""
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.Linear(9, 7), nn.Linear(7, 5))
    for number, layer in enumerate(model):
        draw = (nn.init.kaiming_normal_, nn.init.orthogonal_, nn.init.trunc_normal_)[number]
        draw(layer.weight)
        nn.init.uniform_(layer.bias)
    model[1].weight.data.copy_(torch.randn_like(model[1].weight))
    return model


def plugged() -> nn.Module:
    class Local(nn.Linear):  # made anew by every build
        def __init__(self) -> None:
            super().__init__(5, 5)
            nn.init.uniform_(self.weight)

    return nn.Sequential(Local(), nn.Linear(5, 5))


def built_in(name: str) -> Callable[[], nn.Module]:
    given: dict[str, Any] = dict(IMAGES)
    if name.startswith("transformer"):
        given = {"input_shape": (16,), "classes": 10}
    if name in ("alexnet", "resnet50"):
        given["input_shape"] = (3, 64, 64)
    return lambda: models.build(name, **given)  # type: ignore[no-any-return]


CASES = {
    "strangers": strangers,
    "plugged": plugged,
    "initialised at the end": initialised_at_the_end,
    **{name: built_in(name) for name in ("cnn", "mlp", "resnet50")},
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kept", [0, 1, -1])
def test_weights_that_are_kept_are_those_of_a_plain_build(
    name: str, kept: int, tmp_path: Path
) -> None:
    make = CASES[name]
    torch.manual_seed(3)
    plain, after = make(), torch.rand(3)
    top = [child for child, module in plain.named_children() if list(module.parameters())][kept]
    _, order = bare(make)
    torch.manual_seed(3)
    found = with_only(make, order, lambda path: path.split(".")[0] == top, tmp_path)
    assert list(tmp_path.iterdir()) == []  # files without names
    assert torch.equal(torch.rand(3), after)  # the generators are where a plain build leaves them
    assert list(found.state_dict()) == list(plain.state_dict())
    real = 0
    for path, tensor in found.state_dict().items():
        if path.split(".")[0] == top:
            assert torch.equal(tensor, plain.state_dict()[path]), path
        else:
            assert tensor.is_meta, path
        real += 0 if tensor.is_meta else tensor.numel()
    assert real < sum(t.numel() for t in plain.state_dict().values())
    assert [p.requires_grad for p in found.parameters()] == [
        p.requires_grad for p in plain.parameters()
    ]


def test_what_is_not_needed_moves_to_a_file_as_soon_as_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers in a list are all made before the Sequential that gets them."""
    moved: list[int] = []
    plain = piecewise._to_file

    def noted(tensor: torch.Tensor, folder: Path) -> None:
        plain(tensor, folder)
        moved.append(tensor.numel())

    monkeypatch.setattr(piecewise, "_to_file", noted)
    made: list[int] = []

    def make() -> nn.Module:
        layers = []
        for _ in range(6):
            layers.append(nn.Linear(8, 8))
            made.append(len(moved))
        return nn.Sequential(*layers)

    _, order = bare(make)
    made.clear()
    with_only(make, order, lambda path: path == "2", tmp_path)
    assert made == [2, 4, 4, 6, 8, 10]  # a weight and a bias of every layer but the third
    assert moved == [64, 8] * 5


def test_a_model_in_files_has_the_weights_of_a_plain_one(tmp_path: Path) -> None:
    torch.manual_seed(3)
    plain, after = strangers(), torch.rand(3)
    torch.manual_seed(3)
    found = piecewise.in_file(strangers, tmp_path)
    assert torch.equal(torch.rand(3), after)
    assert list(tmp_path.iterdir()) == []
    before = {name: tensor.data_ptr() for name, tensor in found.state_dict().items()}
    piecewise.into_memory(found)
    for name, tensor in found.state_dict().items():
        assert torch.equal(tensor, plain.state_dict()[name]), name
        assert tensor.data_ptr() != before[name], name


def test_constructors_are_as_they_were_also_after_an_error() -> None:
    before = nn.Linear.__init__, nn.Module.__init__

    def fails() -> nn.Module:
        nn.Linear(2, 2)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        bare(fails)
    assert (nn.Linear.__init__, nn.Module.__init__) == before
