"""The gradients of a loop of the user's own: what came, and what was changed afterwards.

The loop computes gradients by `loss.backward()`, in which Paceline has no part. A hook on each
parameter notes that a gradient came, and the version of its memory at that time. PyTorch counts a
tensor's version up at each change in place, so clipping shows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from paceline.errors import BadRequest
from paceline.replica.flat import FlatModel


class OwnGradients:
    """Watches the gradients of one model, which lie in flat buffers."""

    def __init__(self, flat: FlatModel) -> None:
        self.flat = flat
        self.arrived = False  # a backward pass has written gradients; the reader sets it back
        self._region = {id(p): r for r in flat.regions for p in r.owners}
        self._versions: dict[int, int] = {}  # of each region's gradients after the last one came
        # Parameters without a gradient but for that of dummy samples.
        self._muted: set[int] = set()
        self._muting: list[RemovableHandle] = []
        for parameter, _ in flat.trainable:
            parameter.register_post_accumulate_grad_hook(self._note)

    def _note(self, parameter: Tensor) -> None:
        self.arrived = True
        if self._muted and not self._muting:
            self._muted.discard(id(parameter))
        region = self._region.get(id(parameter))
        if region is not None:
            self._versions[id(region)] = region.grads._version

    # --- dummy samples

    def mute(self) -> None:
        """Let gradients change nothing until `unmute`: they become negative zeros."""
        for parameter, _ in self.flat.trainable if not self._muting else ():
            self._muting.append(parameter.register_hook(self._silence(parameter)))

    def _silence(self, parameter: nn.Parameter) -> Callable[[Tensor], Tensor]:
        def negative_zero(gradient: Tensor) -> Tensor:
            if parameter.grad is None:
                self._muted.add(id(parameter))
            return torch.full_like(gradient, -0.0, layout=torch.strided)

        return negative_zero

    def unmute(self) -> None:
        for handle in self._muting:
            handle.remove()
        self._muting.clear()

    # --- the loop's step

    def refuse_changes(self, unscaled: bool) -> None:
        """Raise BadRequest if gradients were changed in place after the last backward pass.

        `unscaled`: GradScaler.unscale_ has changed each of them once.
        """
        for region in self.flat.regions:
            known = self._versions.get(id(region))
            if known is None:
                continue
            if unscaled:
                known += _versions_of_unscaling(region.grads.device) * sum(
                    p.grad is not None for p in region.owners
                )
            if region.grads._version != known:
                raise BadRequest(
                    "the gradients were changed (clipped?) after the backward pass and before the"
                    " workers exchanged them, so each worker changed its own part only: call"
                    " pace.synchronize() before, or use pace.step(clip_norm=...)"
                )

    def take(self) -> bool:
        """Put all gradients into the flat buffers, mark untouched ones; return if there are any."""
        untouched = not self.flat.take_gradients(self._muted)
        self._muted.clear()
        self._versions.clear()
        return untouched

    def scale(self, factor: float) -> None:
        """Multiply the gradients in the flat buffers. With 0 they count as untouched."""
        for region in self.flat.regions:
            if factor:
                region.grads.mul_(factor)
            else:
                region.grads.fill_(-0.0)

    def rescale(self, factor: float) -> None:
        """Multiply the gradients between two backward passes."""
        for parameter, _ in self.flat.trainable:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
        for region in self.flat.regions:
            self._versions[id(region)] = region.grads._version

    @property
    def present(self) -> bool:
        """Whether any parameter has a gradient."""
        return any(p.grad is not None for p, _ in self.flat.trainable)

    @property
    def replaced(self) -> bool:
        """Whether the loop has given a parameter another gradient than that of a backward pass."""
        return any(p.grad is not None and p.grad is not place for p, place in self.flat.trainable)


@cache
def _versions_of_unscaling(device: torch.device) -> int:
    """By how much GradScaler.unscale_ counts up a gradient's version (depends on the device)."""
    gradient, found = torch.ones(1, device=device), torch.zeros(1, device=device)
    torch._amp_foreach_non_finite_check_and_unscale_([gradient], found, found + 1)
    return gradient._version
