"""Where a model can be cut: between the layers of `nn.Sequential`-like modules.

Layers are the children of a Sequential in their order, and those of Sequentials inside it. Stages
are runs of layers; they are chosen by measured time, or by hand (`--cut 3,6`).
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import BadRequest

MEASURED_PASSES = 3
COPIED_BYTES_PER_S = 1e9  # about what a core moves into a message, or out of it


@dataclass(frozen=True)
class Layer:
    name: str  # as in the whole model: "features.3"
    module: nn.Module


def layers_of(model: nn.Module) -> list[Layer]:
    """The layers of a model, in the order in which they are called. Raises where there are none."""
    if not _in_sequence(model):
        children = ", ".join(name for name, _ in model.named_children()) or "none"
        raise BadRequest(
            f"{type(model).__name__} cannot be cut: its forward is Python code, which may call its"
            f" children ({children}) in any way. Cut are the children of nn.Sequential: write it as"
            " nn.Sequential(...), or its forward as a Sequential of blocks"
        )
    return _inside(model, "")


def _in_sequence(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def _inside(module: nn.Module, name: str) -> list[Layer]:
    found = []
    for own, child in module.named_children():
        path = f"{name}.{own}" if name else own
        found += _inside(child, path) if _in_sequence(child) else [Layer(path, child)]
    return found


def refuse_ties(layers: Sequence[Layer], bounds: Sequence[int]) -> None:
    """Raise BadRequest where layers of two stages share a parameter."""
    owner: dict[int, tuple[int, str]] = {}
    for stage, (low, high) in enumerate(pairwise([0, *bounds, len(layers)])):
        for layer in layers[low:high]:
            for name, parameter in layer.module.named_parameters(remove_duplicate=False):
                before = owner.setdefault(id(parameter), (stage, f"{layer.name}.{name}"))
                if before[0] != stage:
                    raise BadRequest(
                        f"{before[1]} and {layer.name}.{name} are one parameter, and the cut puts"
                        f" them on stages {before[0]} and {stage}: cut elsewhere, or untie them"
                    )


def by_hand(text: str, layers: Sequence[Layer], stages: int) -> tuple[int, ...]:
    """The first layers of all stages but the first, from `--cut`: numbers or names of layers."""
    names = [layer.name for layer in layers]
    bounds = []
    for word in (w.strip() for w in text.split(",")):
        if word in names:
            bounds.append(names.index(word))
        elif word.isdigit() and int(word) < len(layers):
            bounds.append(int(word))
        else:
            raise BadRequest(
                f"cut={text}: {word!r} is no layer of the model: it has {len(layers)}, named"
                f" {', '.join(names[:12])}{', ...' if len(names) > 12 else ''}"
            )
    if len(bounds) != stages - 1 or sorted(set(bounds)) != bounds or 0 in bounds:
        raise BadRequest(
            f"cut={text}: {stages} stages need {stages - 1} cuts, in order, each the first layer of"
            " a stage (not the model's first)"
        )
    return tuple(bounds)


def trains(layer: Layer) -> bool:
    return any(p.requires_grad for p in layer.module.parameters())


def refuse_idle(layers: Sequence[Layer], bounds: Sequence[int]) -> None:
    """Raise BadRequest where a stage has nothing to train: its worker would have no optimizer."""
    for stage, (low, high) in enumerate(pairwise([0, *bounds, len(layers)])):
        if not any(map(trains, layers[low:high])):
            names = ", ".join(layer.name for layer in layers[low:high])
            raise BadRequest(
                f"stage {stage} (layers {names}) has no weights to train: cut elsewhere"
            )


def balanced(
    costs: Sequence[float],
    stages: int,
    trained: Sequence[bool] | None = None,
    messages: Sequence[float] | None = None,
) -> tuple[int, ...]:
    """The cuts that make the most expensive stage as cheap as it can be.

    `trained`: the layers that have weights to train; every stage gets one of them. `messages`: what
    a worker spends on a message of each layer's output.
    """
    count = len(costs)
    trained = trained or [True] * count
    if stages > sum(trained):
        raise BadRequest(
            f"{stages} stages for {sum(trained)} layers with weights to train: a stage needs one"
        )
    edges = [0.0, *(messages or [0.0] * count)]
    edges[count] = 0.0  # no stage gets the last output
    sums, found = [0.0], [0]
    for cost, has in zip(costs, trained, strict=True):
        sums.append(sums[-1] + cost)
        found.append(found[-1] + has)
    # best[k][i]: the cost of the dearest of k stages that hold the first i layers.
    best = [[0.0] + [float("inf")] * count]
    cut: list[list[int]] = [[0] * (count + 1)]
    for k in range(1, stages + 1):
        row, at = [float("inf")] * (count + 1), [0] * (count + 1)
        for i in range(k, count + 1):
            for j in range(k - 1, i):
                worst = max(best[k - 1][j], sums[i] - sums[j] + edges[i] + edges[j])
                if worst < row[i] and found[i] > found[j]:
                    row[i], at[i] = worst, j
        best.append(row)
        cut.append(at)
    bounds, i = [], count
    for k in range(stages, 1, -1):
        i = cut[k][i]
        bounds.append(i)
    return tuple(reversed(bounds))


def measured(layers: Sequence[Layer], inputs: Any) -> tuple[list[float], list[float]]:
    """The seconds of a forward and backward pass of each layer, the least of several.

    Also what a worker spends on messages of its output: one there, and one with its gradient back.
    """
    costs, messages = [float("inf")] * len(layers), [0.0] * len(layers)
    modes = [(m, m.training) for layer in layers for m in layer.module.modules()]
    buffers = [(b, b.clone()) for layer in layers for b in layer.module.buffers()]
    random = torch.get_rng_state()
    try:
        for _ in range(MEASURED_PASSES):
            value = inputs
            for number, layer in enumerate(layers):
                began = time.perf_counter()
                value = _passed(layer, value)
                costs[number] = min(costs[number], time.perf_counter() - began)
                messages[number] = 2 * value.nbytes / COPIED_BYTES_PER_S
    finally:
        torch.set_rng_state(random)
        for module, mode in modes:
            module.training = mode
        for buffer, before in buffers:
            buffer.copy_(before)
        for layer in layers:
            layer.module.zero_grad(set_to_none=True)
    return costs, messages


def _with_memory(module: nn.Module) -> nn.Module:
    """The module; for one on the meta device, a copy with some numbers, for as long as it runs."""
    if not any(t.is_meta for t in (*module.parameters(), *module.buffers())):
        return module
    found = copy.deepcopy(module).to_empty(device="cpu")
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.normal_(std=0.02)
        for buffer in found.buffers():
            buffer.fill_(1)
    return found


def _passed(layer: Layer, value: Any) -> Tensor:
    """One forward and backward pass of a layer; its output without a graph."""
    if isinstance(value, Tensor) and value.is_floating_point():
        value = value.detach().requires_grad_()
    output = _with_memory(layer.module)(value)
    if not isinstance(output, Tensor):
        raise BadRequest(
            f"layer {layer.name} ({type(layer.module).__name__}) returns a"
            f" {type(output).__name__}: only single tensors go from stage to stage"
        )
    if output.requires_grad:
        output.backward(torch.ones_like(output))
    return output.detach()
