"""The six optimizers, from torch.optim.

docs/optimizers.md has the update rules, and a test checks each optimizer against its formula.
`momentum` and `weight_decay` are options of the run. Options that only one optimizer has are that
optimizer's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import torch
from torch.optim import Optimizer

from paceline.errors import BadRequest
from paceline.registry import optimizers

Params = Iterable[Any]


def _no_momentum(name: str, momentum: float | None) -> None:
    if momentum:
        raise BadRequest(
            f"optimizer {name} takes no momentum={momentum:g}; sgd, momentum and rmsprop do"
        )


@optimizers.register("sgd")
def sgd(params: Params, lr: float, momentum: float | None, weight_decay: float) -> Optimizer:
    """w <- w - lr g (with momentum only if it is given)."""
    return torch.optim.SGD(params, lr=lr, momentum=momentum or 0.0, weight_decay=weight_decay)


@optimizers.register("momentum")
def momentum_sgd(
    params: Params,
    lr: float,
    momentum: float | None,
    weight_decay: float,
    nesterov: Annotated[bool, "Nesterov's momentum"] = False,
) -> Optimizer:
    """v <- m v + g, w <- w - lr v (m = 0.9 unless momentum is given)."""
    chosen = 0.9 if momentum is None else momentum
    if nesterov and not chosen:
        raise BadRequest("momentum:nesterov=true needs a momentum above 0")
    return torch.optim.SGD(
        params, lr=lr, momentum=chosen, weight_decay=weight_decay, nesterov=nesterov
    )


@optimizers.register("adagrad")
def adagrad(
    params: Params,
    lr: float,
    momentum: float | None,
    weight_decay: float,
    eps: Annotated[float, "added to the root"] = 1e-10,
) -> Optimizer:
    """s <- s + g^2, w <- w - lr g / (sqrt(s) + eps)."""
    _no_momentum("adagrad", momentum)
    return torch.optim.Adagrad(params, lr=lr, weight_decay=weight_decay, eps=eps)


@optimizers.register("rmsprop")
def rmsprop(
    params: Params,
    lr: float,
    momentum: float | None,
    weight_decay: float,
    alpha: Annotated[float, "memory of the squared gradient"] = 0.99,
    eps: Annotated[float, "added to the root"] = 1e-8,
) -> Optimizer:
    """s <- a s + (1-a) g^2, w <- w - lr g / (sqrt(s) + eps)."""
    return torch.optim.RMSprop(
        params, lr=lr, alpha=alpha, eps=eps, momentum=momentum or 0.0, weight_decay=weight_decay
    )


@optimizers.register("adam")
def adam(
    params: Params,
    lr: float,
    momentum: float | None,
    weight_decay: float,
    beta1: Annotated[float, "memory of the gradient"] = 0.9,
    beta2: Annotated[float, "memory of its square"] = 0.999,
    eps: Annotated[float, "added to the root"] = 1e-8,
) -> Optimizer:
    """m, v: running means of g and g^2, bias-corrected; w <- w - lr m / (sqrt(v) + eps)."""
    _no_momentum("adam", momentum)
    return torch.optim.Adam(params, lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=weight_decay)


@optimizers.register("adamw")
def adamw(
    params: Params,
    lr: float,
    momentum: float | None,
    weight_decay: float,
    beta1: Annotated[float, "memory of the gradient"] = 0.9,
    beta2: Annotated[float, "memory of its square"] = 0.999,
    eps: Annotated[float, "added to the root"] = 1e-8,
) -> Optimizer:
    """Adam with decoupled weight decay d: w <- (1 - lr d) w - lr m / (sqrt(v) + eps)."""
    _no_momentum("adamw", momentum)
    return torch.optim.AdamW(
        params, lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=weight_decay
    )
