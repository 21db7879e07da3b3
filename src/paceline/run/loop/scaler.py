"""torch.amp.GradScaler in a loop of the user's own.

GradScaler hands its scale and whether it has found an inf to an optimizer that declares
`_step_supports_amp_scaling`, instead of unscaling and skipping by itself. A worker that skipped a
step alone would leave the others waiting in the exchange. So the paced step takes both, the workers
agree, and all of them skip the step or none.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

NAMES = ("grad_scale", "found_inf")


@dataclass(frozen=True)
class Scaling:
    """What a GradScaler has said about the gradients of this step."""

    inverse: float | None  # the factor that unscales them; None: the loop has unscaled them
    found_inf: bool  # on this worker


@contextmanager
def taken(optimizer: torch.optim.Optimizer) -> Iterator[Scaling | None]:
    """Take what a GradScaler has handed to the optimizer for a `with` block; None: nothing.

    The optimizer's own step must not unscale a second time. GradScaler deletes both afterwards, so
    they are put back.
    """
    held = {name: optimizer.__dict__.pop(name) for name in NAMES if name in optimizer.__dict__}
    try:
        yield _scaling(held) if "found_inf" in held else None
    finally:
        optimizer.__dict__.update(held)


def _scaling(held: dict[str, Any]) -> Scaling:
    scale = held.get("grad_scale")
    # As GradScaler.unscale_ computes it.
    inverse = None if scale is None else float(torch.as_tensor(scale).double().reciprocal().float())
    return Scaling(inverse, bool(held["found_inf"]))


def agree(
    scaling: Scaling, optimizer: torch.optim.Optimizer, any_of: Callable[[bool], bool] | None
) -> bool:
    """Return whether the step is to be skipped: on all workers, or on none.

    `any_of` asks all workers; None where they do not run in step.
    """
    if any_of is None:
        return scaling.found_inf
    skip = any_of(scaling.found_inf)
    if skip and not scaling.found_inf:
        _tell_scaler(optimizer)
    return skip


def _tell_scaler(optimizer: torch.optim.Optimizer) -> None:
    """Let this worker's GradScaler lower its scale as that of the worker that found the inf.

    The scaler does not show what it keeps for an optimizer. It is found as the caller of this step.
    Where that fails the workers' scales differ, which is correct: each unscales with its own.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        caller = frame.f_locals.get("self")
        if isinstance(caller, torch.amp.GradScaler):
            kept: Any = getattr(caller, "_per_optimizer_states", {}).get(id(optimizer), {})
            for found in kept.get("found_inf_per_device", {}).values():
                found.fill_(1.0)
            return
