"""A stage: a run of a model's layers, which keep the names that they have in the whole model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from paceline.parallel.cut import Layer


class Stage(nn.Module):
    """Calls its layers one after the other. Its state_dict has the whole model's names."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        super().__init__()
        self.layers = tuple(layers)  # registered below, under their names
        for layer in layers:
            *path, last = layer.name.split(".")
            holder: nn.Module = self
            for word in path:
                inner = holder._modules.get(word)
                if inner is None:
                    inner = nn.Module()
                    holder.add_module(word, inner)
                holder = inner
            holder.add_module(last, layer.module)

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer.module(x)
        return x


class Stages(nn.Module):
    """All stages of one rank, as one module for the optimizer and for saving."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        super().__init__()
        self.stages = tuple(stages)
        merged = Stage([layer for stage in stages for layer in stage.layers])
        for name, child in merged.named_children():
            self.add_module(name, child)
        self.whole: Any = None  # what a call of the module does: the pass through all ranks

    def forward(self, x: Any) -> Any:
        return self.whole(x)
