"""The model of a drawing, built for inputs of a shape, without memory for its weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from paceline.collectives.draw.page import bytes_words
from paceline.errors import BadRequest, PacelineError
from paceline.parallel.cut import Layer, layers_of
from paceline.parallel.shapes import Shape, shapes_of
from paceline.registry import models

CLASSES = 10
NUMBER_BYTES = 4  # float32


@dataclass(frozen=True)
class Built:
    """A model, its layers, and the shapes of their inputs and outputs for one sample."""

    name: str
    given: Shape
    model: nn.Module
    layers: tuple[Layer, ...]
    shapes: dict[str, tuple[Shape, Shape]]  # without the dimension of samples

    @property
    def title(self) -> str:
        return f"{self.name} on {'x'.join(map(str, self.given))}"


def build(name: str, given: Shape) -> Built:
    """Build a registered model. Raises BadRequest where it cannot be cut or does not run."""
    with torch.device("meta"):
        model: nn.Module = models.build(name, input_shape=given, classes=CLASSES)
        layers = tuple(layers_of(model))
        try:
            shapes = shapes_of(model, torch.zeros(1, *given))
        except PacelineError:
            raise
        except Exception as error:  # the model's own code
            said = str(error).splitlines()[0] if str(error) else type(error).__name__
            size = "x".join(map(str, given))
            raise BadRequest(f"model {name} does not take an input of {size}: {said}") from None
    return Built(name, given, model, layers, {n: (a[1:], b[1:]) for n, (a, b) in shapes.items()})


def kind_of(module: nn.Module) -> str:
    """A layer in a few words: Conv2d 5x5, MaxPool2d 2x2/2 (with stride 2), Linear."""
    size = getattr(module, "kernel_size", None)
    words = type(module).__name__
    if size is not None:
        high, wide = size if isinstance(size, tuple) else (size, size)
        words += f" {high}x{wide}"
        stride = getattr(module, "stride", 1)
        stride = stride[0] if isinstance(stride, tuple) else stride
        words += f"/{stride}" if stride != 1 else ""
    return words


def needs_gradients(model: nn.Module) -> dict[str, bool]:
    """Whether the input of each module needs a gradient: a module before it has weights."""
    found, seen = {}, False
    for name, module in model.named_modules():
        found[name] = seen
        seen = seen or any(p.requires_grad for p in module.parameters(recurse=False))
    return found


def size_words(size: float) -> str:
    return bytes_words(size) if size else "0"
