"""Models and optimizers that cannot be trained here, each refused with a reason."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from paceline.errors import BadRequest


def refuse_lazy(model: nn.Module) -> None:
    """Raise BadRequest if a tensor has no shape yet: flat buffers need all shapes."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise BadRequest(
                f"{name} has no shape yet, because a lazy module learns it from its first batch:"
                " pass a batch through the model first, in the function that makes it:"
                " `def make(): net = Net(); net(torch.zeros(2, 3, 32, 32)); return net`"
            )


def refuse_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise BadRequest for an optimizer whose step cannot be that of a strategy."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise BadRequest(
            "LBFGS evaluates the loss several times per step, which no strategy supports: use"
            " another optimizer, such as sgd or adam"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise BadRequest(
            "SparseAdam takes sparse gradients only, and workers keep gradients in dense buffers:"
            " use Adam, or nn.Embedding(sparse=False)"
        )


def refuse_foreign_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise BadRequest if the optimizer holds a parameter that is not the model's.

    Workers would not exchange such a parameter, and nothing would reset its gradient.
    """
    own = {id(p) for p in model.parameters()}
    for number, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            if id(parameter) not in own:
                names = group.get("param_names") or []
                name = (
                    names[index] if index < len(names) else f"parameter {index} of group {number}"
                )
                raise BadRequest(
                    f"the optimizer holds a parameter that is not the model's: {name}, of shape"
                    f" {tuple(parameter.shape)}. Workers exchange the model's parameters only:"
                    " register it in the model (self.x = nn.Parameter(...)), or give it a separate"
                    " optimizer"
                )
