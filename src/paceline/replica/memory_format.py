"""Chooses a model's memory format by measuring copies of it before the first step."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from paceline.common.seeding import random_states, set_random_states

FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
LIMIT_S = 2.0  # other workers wait for the result
PASS_S = 0.3  # the longest pass; a slower model is measured with fewer rows
FASTER = 1.1  # channels_last must be faster by this factor


def measure_memory_format(
    model: nn.Module, loss: Callable[[Any, Any], Tensor], inputs: Any, targets: Any
) -> str:
    """Return "channels_last" if it is more than 10% faster and gives the same outputs.

    Otherwise, or if the model raises, the result is "contiguous": `x.view(n, -1)` after a
    convolution fails on channels_last, and so may other code that relies on strides. An error that
    the plain layout has, too, is raised in the first step. The random state is restored.
    """
    if not (isinstance(inputs, Tensor) and inputs.dim() == 4) or not any(
        p.dim() == 4 for p in model.parameters()
    ):
        return "contiguous"
    before = random_states()
    try:
        copies = {
            name: copy.deepcopy(model).to(memory_format=value)  # type: ignore[call-overload]
            for name, value in FORMATS.items()
        }
        if not _same_answers(copies, inputs):
            return "contiguous"
        times = _seconds(copies, loss, inputs, targets)
    except Exception:  # the user's code may raise anything
        return "contiguous"
    finally:
        set_random_states(before)
    return (
        "channels_last"
        if min(times["contiguous"]) > FASTER * min(times["channels_last"])
        else "contiguous"
    )


def _same_answers(copies: dict[str, nn.Module], inputs: Tensor) -> bool:
    """Whether both give the same outputs in evaluation mode, where nothing is random."""
    said = {}
    for name, model in copies.items():
        modes = [(module, module.training) for module in model.modules()]
        with torch.no_grad():
            said[name] = model.eval()(inputs.contiguous(memory_format=FORMATS[name]))
        for module, mode in modes:
            module.training = mode
    one, other = said.values()
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return type(one) is type(other)
    return one.shape == other.shape and torch.allclose(
        one, other, rtol=1e-3, atol=1e-3 * float(one.abs().max())
    )


def _seconds(
    copies: dict[str, nn.Module], loss: Callable[[Any, Any], Tensor], inputs: Tensor, targets: Any
) -> dict[str, list[float]]:
    """Seconds of a forward and a backward pass of each copy, alternating, after a warm-up."""

    def seconds(name: str, rows: int) -> float:
        x = inputs[:rows].contiguous(memory_format=FORMATS[name])
        start = time.perf_counter()
        loss(copies[name](x), targets[:rows]).backward()
        return time.perf_counter() - start

    times: dict[str, list[float]] = {name: [] for name in copies}
    rows, until = len(inputs), time.perf_counter() + LIMIT_S
    slow = seconds("contiguous", rows) / PASS_S
    rows = max(2, int(rows / slow)) if slow > 1 else rows
    for round_number in range(6):
        for name in copies:
            passed = seconds(name, rows)
            if round_number:
                times[name].append(passed)
        if round_number and time.perf_counter() > until:
            break
    return times
