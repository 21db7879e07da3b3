"""Losses: the mean over a batch's rows.

A loss of your own (`package.module:factory`) must be a mean over the rows too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from torch import Tensor
from torch.nn import functional as F

from paceline.errors import BadRequest
from paceline.registry import losses

Loss = Callable[[Any, Any], Tensor]


def needs_tensors(loss: Loss, name: str | None) -> Loss:
    """Return a loss that says what to do where a model's outputs do not fit it.

    `name` is that of a built-in loss. A loss of the user's own raises its own errors.
    """

    def checked(outputs: Any, targets: Any) -> Tensor:
        if not isinstance(outputs, Tensor):
            raise BadRequest(
                f"the model returns {_described(outputs)}, and this loss takes one tensor: give a"
                " loss of your own (a function of outputs and targets), or step=, a function of"
                " (model, batch) that returns the loss"
            )
        try:
            return loss(outputs, targets)
        except (ValueError, IndexError, RuntimeError) as error:
            if name is None or not isinstance(targets, Tensor) or outputs.device.type != "cpu":
                raise
            shapes = f"outputs {tuple(outputs.shape)} and targets {tuple(targets.shape)}"
            raise BadRequest(
                f"loss {name} does not fit {shapes}: {str(error).splitlines()[0]}"
                f"{advice(outputs, targets)}"
            ) from error

    return checked


def advice(outputs: Any, targets: Any) -> str:
    """What to give where every place of a sample has a class, as in segmentation."""
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
        return ""
    places = outputs.dim() > 2 and outputs.shape[2:] == targets.shape[1:]
    if targets.is_floating_point() or not places:
        return ""
    return " (for a class at every place give loss=cross-entropy and metric=accuracy)"


def _described(outputs: Any) -> str:
    if isinstance(outputs, (tuple, list)):
        kinds = ", ".join(type(each).__name__ for each in outputs[:4])
        return f"a {type(outputs).__name__} ({kinds})"
    return f"a {type(outputs).__name__}"


@losses.register("cross-entropy")
def cross_entropy(smoothing: Annotated[float, "label smoothing"] = 0.0) -> Loss:
    """Softmax and negative log-likelihood of the class."""
    return lambda outputs, targets: F.cross_entropy(outputs, targets, label_smoothing=smoothing)


@losses.register("mse")
def mse() -> Loss:
    """Mean squared error."""
    return lambda outputs, targets: F.mse_loss(
        outputs.reshape(targets.shape), targets.to(outputs.dtype)
    )


@losses.register("bce")
def bce() -> Loss:
    """Binary cross-entropy of one logit per row."""
    return lambda outputs, targets: F.binary_cross_entropy_with_logits(
        outputs.reshape(targets.shape), targets.to(outputs.dtype)
    )


@losses.register("nll")
def nll() -> Loss:
    """Negative log-likelihood, for models that end in log-softmax."""
    return F.nll_loss
