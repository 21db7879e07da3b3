"""Weight gradients computed later: what the W tasks of a timetable do.

Linear and convolution layers keep their input and their output's gradient in the backward pass, and
make the product that is the gradient of their weights when W comes. All other layers do all of
their backward pass in B.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Product = Callable[[], None]


class Later:
    """The products that wait for their W; `products` counts those that were made."""

    def __init__(self) -> None:
        self.active = False
        self.waiting: list[Product] = []
        self.products = 0

    def taken(self) -> list[Product]:
        """The products of the backward pass that was just made."""
        found, self.waiting = self.waiting, []
        return found

    def make(self, products: list[Product]) -> None:
        with torch.no_grad():
            for product in products:
                product()
                self.products += 1


def _add(parameter: Tensor, gradient: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Linear, later: Later, _: Tensor) -> Tensor:
        ctx.layer, ctx.later = layer, later
        ctx.save_for_backward(x)
        return functional.linear(x, layer.weight, layer.bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        layer: nn.Linear = ctx.layer

        def product() -> None:
            rows = gradient.reshape(-1, gradient.shape[-1])
            if layer.weight.requires_grad:
                _add(layer.weight, rows.t() @ x.reshape(-1, x.shape[-1]))
            if layer.bias is not None and layer.bias.requires_grad:
                _add(layer.bias, rows.sum(0))

        ctx.later.waiting.append(product)
        needed = ctx.needs_input_grad[0]
        return (gradient @ layer.weight if needed else None), None, None, None


class _Conv2d(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Conv2d, later: Later, _: Tensor) -> Tensor:
        ctx.layer, ctx.later = layer, later
        ctx.save_for_backward(x)
        made: Tensor = layer._conv_forward(x, layer.weight, layer.bias)
        return made

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        layer: nn.Conv2d = ctx.layer

        def part(mask: list[bool]) -> tuple[Any, Any, Any]:
            return torch.ops.aten.convolution_backward(  # type: ignore[no-any-return]
                gradient,
                x,
                layer.weight,
                None if layer.bias is None else [layer.bias.numel()],
                list(layer.stride),
                list(layer.padding),
                list(layer.dilation),
                False,
                [0, 0],
                layer.groups,
                mask,
            )

        def product() -> None:
            biased = layer.bias is not None and layer.bias.requires_grad
            _, weight, bias = part([False, layer.weight.requires_grad, biased])
            if layer.weight.requires_grad:
                _add(layer.weight, weight)
            if biased:
                assert layer.bias is not None
                _add(layer.bias, bias)

        ctx.later.waiting.append(product)
        needed = ctx.needs_input_grad[0]
        return (part([True, False, False])[0] if needed else None), None, None, None


def _plain(layer: nn.Module) -> bool:
    """Whether a layer's weight gradient can be computed apart."""
    if type(layer) is nn.Linear:
        return True
    return (
        type(layer) is nn.Conv2d
        and layer.padding_mode == "zeros"
        and not isinstance(layer.padding, str)
    )


def compute_later(model: nn.Module, later: Later) -> int:
    """Make the Linear and convolution layers of a model compute weight gradients in W.

    Returns how many do. Outside of a timetable with W (`later.active`), they are as before.
    """
    found = 0
    # A function whose inputs need no gradient has no backward pass: this tensor always needs one.
    always = torch.zeros((), requires_grad=True)
    for module in model.modules():
        if not _plain(module):
            continue
        found += 1
        function = _Linear if type(module) is nn.Linear else _Conv2d

        def forward(
            self: nn.Module, x: Tensor, function: Any = function, before: Any = module.forward
        ) -> Any:
            if later.active and torch.is_grad_enabled():
                return function.apply(x, self, later, always)
            return before(x)

        module.forward = MethodType(forward, module)
    return found
