"""The shapes of every module's input and output, by running the model once on samples."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

Shape = tuple[int, ...]


def shapes_of(model: nn.Module, inputs: Any) -> dict[str, tuple[Shape, Shape]]:
    """The shapes of input and output by the modules' names, of those that take and make tensors."""
    shapes: dict[str, tuple[Shape, Shape]] = {}
    handles = []
    for name, module in model.named_modules():

        def note(_: nn.Module, given: tuple[Any, ...], made: Any, name: str = name) -> None:
            if given and isinstance(given[0], Tensor) and isinstance(made, Tensor):
                shapes[name] = tuple(given[0].shape), tuple(made.shape)

        handles.append(module.register_forward_hook(note))
    modes = [(m, m.training) for m in model.modules()]
    try:
        model.eval()
        with torch.no_grad():
            model(inputs)
    finally:
        for handle in handles:
            handle.remove()
        for module, mode in modes:
            module.training = mode
    return shapes
