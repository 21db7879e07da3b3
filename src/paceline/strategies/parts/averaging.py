"""Averaging of weights and optimizer state over workers, for strategies whose replicas differ."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.collectives.base import Collective
from paceline.errors import BadRequest
from paceline.strategies.base import Context

if TYPE_CHECKING:
    from paceline.replica.replica import Replica
    from paceline.strategies.parts.saved import Saved


class Shares:
    """This worker's samples and all workers' samples since the last average.

    Each worker knows both without communication, because shards are a function of the step.
    """

    def __init__(self, saved: Saved | None = None) -> None:
        # After a change of workers all begin with the average, which counts nothing yet.
        kept: list[float] = saved["shares"] if saved is not None and saved.own else [0.0, 0.0]
        self.own, self.total = kept

    def add(self, own: float, total: float) -> None:
        self.own += own
        self.total += total

    def share(self, workers: int) -> float:
        """Return this worker's share; before the first samples all have the same."""
        return self.own / self.total if self.total else 1 / workers

    def take(self, workers: int) -> float:
        """Return this worker's share and start counting anew."""
        share = self.share(workers)
        self.own = self.total = 0.0
        return share

    def state(self) -> list[float]:
        return [self.own, self.total]


def average_weights(ctx: Context, replica: Replica, share: float, collective: Collective) -> None:
    """w <- sum_p share_p w_p, in place, on every worker."""
    if ctx.workers == 1:
        return
    for region in replica.regions:
        collective.all_reduce(region.trained.mul_(share))


class OptimizerAverage:
    """Averages the state of the workers' optimizers (momentum, squared gradients).

    An optimizer has no state for a parameter that none of the worker's batches has touched. If
    another worker has state for it, this worker takes part with the state of an optimizer that has
    only seen zero gradients: zero momentum and zero squared gradients. The count of steps (for
    Adam's bias correction) becomes the largest of the workers', which is how often the average has
    been updated. Other scalars in an optimizer's state stay each worker's own.
    """

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        # True once all workers have state for all parameters and no state counts steps. Then there
        # is nothing to agree on any more.
        self._agreed = False
        self._kept: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}

    def average(self, replica: Replica, share: float) -> None:
        """s <- sum_p share_p s_p for every tensor s of the state, in one order on all workers."""
        if self._ctx.workers == 1:
            return
        if not self._agreed:
            self._agree(replica)
        state = replica.optimizer.state
        for parameter in parameters_of(replica.optimizer):
            for key in _averaged(parameter, state.get(parameter, {})):
                value = state[parameter][key]
                whole = self._memory(value)
                self._ctx.peers.all_reduce(torch.mul(value, share, out=whole))
                value.copy_(whole)

    def _memory(self, value: Tensor) -> Tensor:
        key = (value.numel(), value.dtype, value.device)
        if key not in self._kept:
            self._kept[key] = self._ctx.transport.allocate(*key)
        return self._kept[key].view(value.shape)

    def _agree(self, replica: Replica) -> None:
        """Make state for each parameter that any worker has state for.

        One small all-reduce (maximum) finds those parameters.
        """
        optimizer, parameters = replica.optimizer, parameters_of(replica.optimizer)
        kinds = [_kind(p, optimizer.state.get(p, {})) for p in parameters]
        has = [float(kind is not None) for kind in kinds]
        steps = [_steps(optimizer.state.get(p, {})) for p in parameters]
        largest = [ABSENT if kind is None else kind for kind in kinds]
        smallest = [ABSENT if kind is None else -kind for kind in kinds]
        table = torch.tensor(
            [has, [1.0 - h for h in has], largest, smallest, steps], dtype=torch.float64
        )
        self._ctx.peers.control.all_reduce(table, "max")
        some, lacking, largest, smallest, steps = table.tolist()
        make_state(
            optimizer,
            [
                p
                for p, here, any_has in zip(parameters, has, some, strict=True)
                if any_has and not here
            ],
        )
        for parameter, any_has, high, low, step in zip(
            parameters, some, largest, smallest, steps, strict=True
        ):
            state = optimizer.state.get(parameter, {})
            if any_has and not high == -low == _kind(parameter, state):
                name = next(
                    (n for n, p in replica.model.named_parameters() if p is parameter),
                    "a parameter",
                )
                raise BadRequest(
                    f"optimizer_state=average: the workers' {type(optimizer).__name__} optimizers"
                    f" have different kinds of state for {name}: use optimizer_state=keep or"
                    " optimizer_state=reset"
                )
            if any_has and step > _steps(state) >= 0:
                state["step"] = (
                    state["step"].fill_(step)
                    if isinstance(state["step"], Tensor)
                    else type(state["step"])(step)
                )
        self._agreed = not any(lacking) and max(steps, default=ABSENT) < 0


ABSENT = -float(1 << 40)  # below any number that is compared


def make_state(optimizer: torch.optim.Optimizer, parameters: list[Tensor]) -> None:
    """Make the optimizer's state for these parameters by a step with zero gradients.

    Parameters and gradients are not changed.
    """
    if not parameters:
        return
    wanted = {id(p) for p in parameters}
    kept = [(p, p.data, p.grad) for p in parameters_of(optimizer)]
    options = [
        {k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups
    ]
    try:
        for group in optimizer.param_groups:
            if "weight_decay" in group:
                group["weight_decay"] = 0.0  # otherwise the gradient would not be zero
        for parameter, data, _ in kept:
            if id(parameter) in wanted:
                parameter.grad = None
                parameter.data = data.clone()
                parameter.grad = torch.zeros_like(parameter)
            else:
                parameter.grad = None  # the optimizer skips it
        optimizer.step()
    finally:
        for parameter, data, grad in kept:
            parameter.grad = None
            parameter.data = data
            parameter.grad = grad
        for group, before in zip(optimizer.param_groups, options, strict=True):
            group.update(before)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _averaged(parameter: Tensor, state: dict[str, Any]) -> list[str]:
    """The keys of the tensors to average: no scalars, unless the parameter is a scalar."""
    tensors = {
        key: value for key, value in state.items() if isinstance(value, Tensor) and key != "step"
    }
    return sorted(
        key
        for key, value in tensors.items()
        if (value.is_floating_point() or value.is_complex())
        and (value.dim() or not parameter.dim())
    )


def _kind(parameter: Tensor, state: dict[str, Any]) -> float | None:
    """A hash of the names, shapes and types of the tensors to average; None: there are none."""
    keys = _averaged(parameter, state)
    described = [(key, tuple(state[key].shape), str(state[key].dtype)) for key in keys]
    return float(zlib.crc32(repr(described).encode())) if keys else None


def _steps(state: dict[str, Any]) -> float:
    """The steps that the optimizer has counted for a parameter; below zero: it counts none."""
    return float(state["step"]) if "step" in state else ABSENT
