"""Models have the sizes that the documentation states."""

import pytest
import torch

from paceline.errors import BadRequest
from paceline.registry import models


@pytest.mark.parametrize(
    ("name", "shape", "classes", "parameters"),
    [
        ("cnn", (1, 28, 28), 10, 22_154),
        ("cnn-wide", (1, 28, 28), 10, 1_352_714),
        ("mlp", (1, 28, 28), 10, 235_146),
        ("mlp:hidden=32,activation=tanh", (4,), 2, 226),
        ("linear", (1, 28, 28), 10, 7_850),
        ("resnet50", (3, 224, 224), 1000, 25_557_032),
    ],
)
def test_sizes(name: str, shape: tuple[int, ...], classes: int, parameters: int) -> None:
    with torch.device("meta"):
        model = models.build(name, input_shape=shape, classes=classes)
    assert sum(p.numel() for p in model.parameters()) == parameters


@pytest.mark.parametrize("name", [n for n in models.names() if n != "resnet50"])
@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32)])
def test_shapes_follow_the_data(name: str, shape: tuple[int, ...]) -> None:
    assert models.build(name, input_shape=shape, classes=7).eval()(
        torch.randn(2, *shape)
    ).shape == (2, 7)


def test_alexnet_has_five_convolutions_and_three_layers() -> None:
    model = models.build("alexnet", input_shape=(3, 32, 32), classes=10)
    kinds = [type(m).__name__ for m in model.modules()]
    assert (kinds.count("Conv2d"), kinds.count("Linear")) == (5, 3)


def test_resnet50_has_torchvisions_names() -> None:
    """A state dict with these keys and shapes is what torchvision.models.resnet50 saves."""
    with torch.device("meta"):
        state = models.build("resnet50", input_shape=(3, 224, 224), classes=1000).state_dict()
    assert len(state) == 320
    assert state["conv1.weight"].shape == (64, 3, 7, 7)
    assert state["layer1.0.downsample.0.weight"].shape == (256, 64, 1, 1)
    assert state["layer2.0.conv2.weight"].shape == (128, 128, 3, 3)
    assert state["layer4.2.bn3.num_batches_tracked"].shape == ()
    assert state["fc.weight"].shape == (1000, 2048)
    assert not any(k.startswith("layer2.1.downsample") for k in state)


@pytest.mark.parametrize(
    ("name", "shape"),
    [("cnn", (4,)), ("cnn", (1, 12, 12)), ("alexnet", (3, 8, 8)), ("resnet50", (3, 16, 16))],
)
def test_data_that_does_not_fit(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(BadRequest, match="needs images"):
        models.build(name, input_shape=shape, classes=2)
