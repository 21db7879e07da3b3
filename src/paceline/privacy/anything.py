"""Gradients per sample of layers without a rule of their own, by `torch.func`.

`vmap` runs the layer again for each sample, from its input and the gradient of its output. That is
slower than a rule, and it holds the gradients of all samples of that layer, but it is correct for
every layer that does not mix samples.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from paceline.errors import BadRequest
from paceline.privacy.layers import Call, Kept


class Anything(Kept):
    """Treats a module and all its submodules as one layer."""

    def __init__(self, name: str, module: nn.Module, places: Mapping[str, Tensor]) -> None:
        super().__init__(name, module, places)
        # Inputs that all samples share (a mask, say). Batches of two sizes tell them apart.
        self._shared: set[int] = set()
        draws = [
            m for m in module.modules() if isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0
        ]
        if draws or (
            isinstance(getattr(module, "dropout", 0.0), float)
            and getattr(module, "dropout", 0.0) > 0
        ):
            raise BadRequest(
                f"privacy: {self._said()} has dropout inside, so it cannot be run again sample by"
                " sample: set its dropout to 0, or use clipping=loop"
            )

    def _said(self) -> str:
        return f"layer {self.name or 'the model itself'} ({type(self.module).__name__})"

    def gradients(self, call: Call) -> dict[str, Tensor]:
        grads = call.grads
        assert grads is not None
        samples = len(grads)
        trained = {
            name: p.detach() for name, p in self.module.named_parameters() if name in self.places
        }
        given = tree_map(
            lambda v: v.detach() if isinstance(v, Tensor) else v, (call.inputs, call.named)
        )
        leaves, shape = tree_flatten(given)
        # An input whose length ever differed from the batch's is shared, also when it matches now.
        for place, value in enumerate(leaves):
            if not (isinstance(value, Tensor) and value.dim() and len(value) == samples):
                self._shared.add(place)
        dims = tree_unflatten(
            [None if place in self._shared else 0 for place in range(len(leaves))], shape
        )

        def alone(inputs: Any, gradient: Tensor) -> dict[str, Tensor]:
            mapped = tree_map(lambda v, d: v.unsqueeze(0) if d == 0 else v, inputs, dims)

            def forward(parameters: dict[str, Tensor]) -> Tensor:
                output = functional_call(self.module, parameters, mapped[0], mapped[1])
                return output if call.which is None else output[call.which]  # type: ignore[no-any-return]

            back: Any = vjp(forward, trained)[1]
            return back(gradient.unsqueeze(0))[0]  # type: ignore[no-any-return]

        try:
            with warnings.catch_warnings():  # a notice has said already that this is slow
                warnings.simplefilter("ignore", UserWarning)
                found: dict[str, Tensor] = vmap(alone, in_dims=(dims, 0))(given, grads)
        except (RuntimeError, ValueError, TypeError, AttributeError) as error:
            first = str(error).splitlines()[0][:160] if str(error) else type(error).__name__
            raise BadRequest(
                f"privacy: {self._said()} cannot be run sample by sample ({first}): use"
                " clipping=loop, or another layer"
            ) from None
        return found


def take_row(value: Any, row: int) -> Any:
    """Return one sample of a batch, as a batch of one."""
    return tree_map(lambda v: v[row : row + 1] if isinstance(v, Tensor) and v.dim() else v, value)


def take_rows(value: Any, count: int) -> Any:
    """Return the first samples of a batch."""
    return tree_map(lambda v: v[:count] if isinstance(v, Tensor) and v.dim() else v, value)


def gradients_alone(loss: Tensor, parameters: list[Tensor]) -> list[Tensor]:
    """Return the gradient of each parameter; zeros where the loss does not depend on it."""
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]
