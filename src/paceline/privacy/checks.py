"""Refuse models, losses and targets in which the influence of one sample cannot be bounded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from paceline.errors import BadRequest
from paceline.objectives.losses import Loss

MIXING = nn.modules.batchnorm._BatchNorm
LEFT_OUT = -100  # cross-entropy's default ignore_index


def refuse_unequal_loss(loss: Loss) -> None:
    """Refuse a PyTorch loss that is not a mean over the rows."""
    if getattr(loss, "weight", None) is not None or getattr(loss, "ignore_index", -100) != -100:
        raise BadRequest(
            f"privacy: {type(loss).__name__} with weight or ignore_index is not a mean over the"
            " rows, so the influence of one sample cannot be bounded: leave them out"
        )
    if getattr(loss, "reduction", "mean") != "mean":
        raise BadRequest("privacy: the loss must be the mean over the rows (reduction='mean')")


def refuse_left_out(loss: Loss, targets: Any) -> None:
    """Refuse targets that cross-entropy ignores: the mean over the others is not over the rows.

    The influence of a sample would then depend on how many targets other samples ignore.
    `clipping=loop` computes the loss of each sample by itself.
    """
    if isinstance(loss, nn.modules.loss._Loss) and not hasattr(loss, "ignore_index"):
        return
    for leaf in tree_leaves(targets):
        if (
            isinstance(leaf, Tensor)
            and not leaf.is_floating_point()
            and bool((leaf == LEFT_OUT).any())
        ):
            raise BadRequest(
                f"privacy: a target is {LEFT_OUT}, which cross-entropy ignores, so the loss is not"
                " a mean over the rows: give every place a class, or use clipping=loop (make"
                " targets that are not classes floating point)"
            )


def refuse_mixing(model: nn.Module) -> None:
    """Refuse a model with a layer that mixes samples or keeps statistics of them."""
    if hasattr(model, "_orig_mod"):
        raise BadRequest(
            "privacy: a compiled model hides its layers: give the model without torch.compile"
        )
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype not in (torch.float32, torch.float64):
            raise BadRequest(
                f"privacy: {name} is {parameter.dtype}, which is too coarse for lengths and noise:"
                " train in float32"
            )
    for name, module in model.named_modules():
        if isinstance(module, MIXING):
            raise BadRequest(
                f"privacy: layer {name} ({type(module).__name__}) mixes the samples of a batch, so"
                " the influence of one sample cannot be bounded: use GroupNorm in its place"
                " (nn.GroupNorm(groups, channels))"
            )
        if isinstance(module, nn.Embedding) and (
            module.max_norm is not None or module.scale_grad_by_freq
        ):
            raise BadRequest(
                f"privacy: layer {name} (Embedding) with max_norm or scale_grad_by_freq mixes"
                " samples: leave it out"
            )
        if getattr(module, "track_running_stats", False):
            raise BadRequest(
                f"privacy: layer {name} ({type(module).__name__}) keeps statistics of the data,"
                " which would be released without noise: set track_running_stats=False, or use"
                " GroupNorm"
            )
