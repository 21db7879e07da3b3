"""A model that is split, and its optimizer, in the files of the whole model: saved by any form, and
resumed by any other. No rank holds all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.common.files import rename_whole
from paceline.common.shortage import why_not_written
from paceline.errors import RunFailed
from paceline.parallel.base import Part
from paceline.parallel.pieces import Piece, gathered
from paceline.parallel.saving import can_be_sliced, load_pieces, read_piece, save_pieces
from paceline.record import checkpoint
from paceline.record.sliced import Slices

NUMBER = "#"  # marks what is no tensor of its parameter's shape
FILE = "optimizer.safetensors"


def names_by_group(model: nn.Module, optimizer_groups: Sequence[Any]) -> list[list[str]]:
    """The names of the parameters in an optimizer's groups, or in a plain list of them."""
    name_of = {id(p): name for name, p in model.named_parameters()}
    groups = [group["params"] if isinstance(group, dict) else [group] for group in optimizer_groups]
    if not any(isinstance(group, dict) for group in optimizer_groups):
        groups = [list(optimizer_groups)]
    return [[name_of[id(p)] for p in group] for group in groups]


def split_state(
    part: Part, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A rank's optimizer state: tensors of their parameters' shapes, and numbers, by name/key."""
    shaped: dict[str, Tensor] = {}
    numbers: dict[str, Tensor] = {}
    for name, parameter in part.model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                shaped[f"{name}/{key}"] = value
            elif isinstance(value, (Tensor, int, float, bool)):
                numbers[f"{NUMBER}{name}/{key}"] = torch.as_tensor(value)
    return shaped, numbers


def whole_optimizer(
    part: Part,
    optimizer: torch.optim.Optimizer,
    order: Sequence[Sequence[str]],
    in_file: bool = False,
) -> dict[str, Any] | None:
    """The whole model's optimizer state, on the group's rank 0; None on the others.

    All ranks of the group call it. `order`: the whole model's parameters in the optimizer's groups.
    `in_file`: without the tensors of the parameters' shapes, which all ranks write to a file
    (`FILE`).
    """
    shaped, numbers = split_state(part, optimizer)
    found = {} if in_file else part.gather(shaped)
    counted = _gather_numbers(part, numbers)
    if found is None or counted is None:
        return None
    made = _as_saved(found | counted, order, optimizer.defaults)
    return {**made, "file": FILE, "names": [list(group) for group in order]} if in_file else made


def _as_saved(
    tensors: Mapping[str, Tensor], order: Sequence[Sequence[str]], defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """An optimizer's state as `state_dict` gives it, of tensors by name/key."""
    place = {name: i for i, name in enumerate(n for group in order for n in group)}
    state: dict[int, dict[str, Any]] = {}
    for label, value in tensors.items():
        name, _, key = label.removeprefix(NUMBER).rpartition("/")
        state.setdefault(place[name], {})[key] = value
    groups, number = [], 0
    for group in order:
        groups.append({**defaults, "params": list(range(number, number + len(group)))})
        number += len(group)
    return {"state": dict(sorted(state.items())), "param_groups": groups}


def with_tensors(saved: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The optimizer of a checkpoint, with the tensors that are in a file beside it."""
    if "file" not in saved:
        return saved
    names = [name for group in saved["names"] for name in group]
    slices = Slices(folder / saved["file"])
    state = {number: dict(values) for number, values in saved["state"].items()}
    for label in sorted(slices.names):
        name, _, key = label.rpartition("/")
        state.setdefault(names.index(name), {})[key] = slices.whole(label)
    return {"state": dict(sorted(state.items())), "param_groups": saved["param_groups"]}


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
    folder: Path,
) -> dict[str, Any]:
    """Of the whole model's optimizer state, what belongs to this part, for `load_state_dict`.

    Tensors that are in a file in `folder` are read piece by piece.
    """
    pieces = part.pieces()
    slices = Slices(folder / saved["file"]) if "file" in saved else None
    keys: dict[str, list[str]] = {}
    for label in slices.names if slices else ():
        name, _, key = label.rpartition("/")
        keys.setdefault(name, []).append(key)
    name_of = {id(p): name for name, p in part.model.named_parameters()}
    place = {name: i for i, name in enumerate(n for group in order for n in group)}
    state: dict[int, dict[str, Any]] = {}
    groups, number = [], 0
    for group in optimizer.param_groups:
        indices = []
        for parameter in group["params"]:
            name = name_of[id(parameter)]
            kept = saved["state"].get(place.get(name, -1), {})
            own = {
                key: pieces[name].of(value)
                if isinstance(value, Tensor) and value.dim() == parameter.dim()
                else value
                for key, value in kept.items()
            }
            for key in keys.get(name, ()):
                assert slices is not None
                own[key] = read_piece(slices, f"{name}/{key}", pieces[name])
            if own:
                state[number] = own
            indices.append(number)
            number += 1
        groups.append({**{k: v for k, v in group.items() if k != "params"}, "params": indices})
    return {"state": state, "param_groups": groups}


# --- files


def file_writers(
    part: Part, weights: Mapping[str, Tensor], optimizer: torch.optim.Optimizer
) -> dict[str, Callable[[Path], None]]:
    """What the ranks of a copy write together into a checkpoint; empty where they cannot.

    All ranks of the group call it.
    """
    shaped, _ = split_state(part, optimizer)
    if not can_be_sliced(part, weights, shaped):
        return {}
    return {
        "model.safetensors": lambda path: save_pieces(part, weights, path),
        FILE: lambda path: save_pieces(part, shaped, path),
    }


def write_weights(part: Part, state: dict[str, Tensor], path: Path) -> None:
    """Write the whole model's weights, whole or not at all. All ranks of the group call it."""
    if part.size == 1 or not can_be_sliced(part, state):
        gathered_state = part.gather(state)
        if gathered_state is not None:
            checkpoint.save_weights(path, gathered_state)
        return
    aside = path.with_name(f".{path.name}.part")
    try:
        save_pieces(part, state, aside)
        if part.rank == 0:
            rename_whole(aside, path)
    except OSError as error:
        raise RunFailed(f"{path} cannot be written: {why_not_written(error)}") from None


def load_weights(part: Part, path: Path) -> dict[str, Tensor]:
    """Of a file of the whole model's weights, what a part holds."""
    if part.size == 1 or Slices(path).metadata:  # types that are saved as others
        return part.own(checkpoint.load_weights(path))
    return load_pieces(part, path)
