"""The user's own optimizer with a step that synchronises first.

It stays the same object: LR schedulers, `isinstance` and `param_groups` see no difference.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn

from paceline.errors import BadRequest
from paceline.replica.refusals import refuse_lazy, refuse_optimizer


def check(model: Any, optimizer: Any) -> None:
    """Refuse what is no model and optimizer, or an optimizer whose step cannot be paced."""
    if not isinstance(model, nn.Module) or not isinstance(optimizer, torch.optim.Optimizer):
        raise BadRequest(
            "prepare takes a torch.nn.Module and an optimizer made from its parameters"
        )
    refuse_optimizer(optimizer)
    refuse_lazy(model)


def pace_step(
    optimizer: torch.optim.Optimizer, step: Callable[[], None], zeroed: Callable[[], None]
) -> None:
    """Replace the optimizer's `step` by this one; call `zeroed` after each `zero_grad`."""
    inner_zero = optimizer.zero_grad

    def paced_step(self: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        step()
        return loss

    def zero_grad(self: torch.optim.Optimizer, *args: Any, **options: Any) -> None:
        inner_zero(*args, **options)
        zeroed()

    # Schedulers wrap `step` to see that it was called; the paced step tells them by itself.
    paced_step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = MethodType(paced_step, optimizer)  # type: ignore[method-assign]
    optimizer.zero_grad = MethodType(zero_grad, optimizer)  # type: ignore[method-assign]
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]


def refuse_state(optimizer: torch.optim.Optimizer, strategy: str) -> None:
    """Where servers run the optimizer, its state is not here: refuse to give or take it."""

    def refuse(self: torch.optim.Optimizer, *_: Any) -> Any:
        raise BadRequest(
            f"with {strategy} the servers hold the optimizer's state, so this worker's optimizer"
            " has none: use pace.save(path) and pace.load(path), which save and load it with"
            " everything else"
        )

    optimizer.state_dict = MethodType(refuse, optimizer)  # type: ignore[method-assign]
    optimizer.load_state_dict = MethodType(refuse, optimizer)  # type: ignore[method-assign]


class Parameters(nn.Module):
    """The parameters of an optimizer that came without its model."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        for number, group in enumerate(optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                self.register_parameter(f"group{number}_{index}", parameter)
