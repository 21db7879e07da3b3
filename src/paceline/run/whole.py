"""The optimizer of a model that is split, as that of the whole model: saved by any form, and
resumed by any other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.parallel.base import Part
from paceline.parallel.pieces import Piece, gathered

NUMBER = "#"  # marks what is no tensor of its parameter's shape


def names_by_group(model: nn.Module, optimizer_groups: Sequence[Any]) -> list[list[str]]:
    """The names of the parameters in an optimizer's groups, or in a plain list of them."""
    name_of = {id(p): name for name, p in model.named_parameters()}
    groups = [group["params"] if isinstance(group, dict) else [group] for group in optimizer_groups]
    if not any(isinstance(group, dict) for group in optimizer_groups):
        groups = [list(optimizer_groups)]
    return [[name_of[id(p)] for p in group] for group in groups]


def whole_optimizer(
    part: Part, optimizer: torch.optim.Optimizer, order: Sequence[Sequence[str]]
) -> dict[str, Any] | None:
    """The whole model's optimizer state, on the group's rank 0; None on the others.

    All ranks of the group call it. `order`: the whole model's parameters in the optimizer's groups.
    """
    own: dict[str, Tensor] = {}
    for name, parameter in part.model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                own[f"{name}/{key}"] = value
            elif isinstance(value, (Tensor, int, float, bool)):
                own[f"{NUMBER}{name}/{key}"] = torch.as_tensor(value)
    numbers = {name: value for name, value in own.items() if name.startswith(NUMBER)}
    shaped = {name: value for name, value in own.items() if name not in numbers}
    found = part.gather(shaped)
    counted = _gather_numbers(part, numbers)
    if found is None or counted is None:
        return None
    place = {name: i for i, name in enumerate(n for group in order for n in group)}
    state: dict[int, dict[str, Any]] = {}
    for label, value in (*found.items(), *counted.items()):
        name, _, key = label.removeprefix(NUMBER).rpartition("/")
        state.setdefault(place[name], {})[key] = value
    groups, number = [], 0
    for group in order:
        groups.append({**optimizer.defaults, "params": list(range(number, number + len(group)))})
        number += len(group)
    return {"state": dict(sorted(state.items())), "param_groups": groups}


def _gather_numbers(part: Part, numbers: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    if part.group is None or part.size == 1:
        return dict(numbers)
    given = {
        name: Piece()
        for name in numbers
        if part.gives(name.removeprefix(NUMBER).rpartition("/")[0])
    }
    return gathered(part.group, given, numbers)


def own_optimizer(
    part: Part,
    saved: Mapping[str, Any],
    optimizer: torch.optim.Optimizer,
    order: Sequence[Sequence[str]],
) -> dict[str, Any]:
    """Of the whole model's optimizer state, what belongs to this part, for `load_state_dict`."""
    pieces = part.pieces()
    name_of = {id(p): name for name, p in part.model.named_parameters()}
    place = {name: i for i, name in enumerate(n for group in order for n in group)}
    state: dict[int, dict[str, Any]] = {}
    groups, number = [], 0
    for group in optimizer.param_groups:
        indices = []
        for parameter in group["params"]:
            name = name_of[id(parameter)]
            kept = saved["state"].get(place.get(name, -1), {})
            if kept:
                state[number] = {
                    key: pieces[name].of(value)
                    if isinstance(value, Tensor) and value.dim() == parameter.dim()
                    else value
                    for key, value in kept.items()
                }
            indices.append(number)
            number += 1
        groups.append({**{k: v for k, v in group.items() if k != "params"}, "params": indices})
    return {"state": state, "param_groups": groups}
