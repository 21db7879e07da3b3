"""What a checkpoint remembers, as a strategy and its parts are set up with it.

Some of it is the same on all workers (DiLoCo's outer momentum, a server's optimizer), so that any
number of workers can go on with it. Some is one worker's own (error feedback): a worker that did
not make it begins anew, and the user is told what begins anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from paceline.errors import BadRequest


@dataclass(frozen=True)
class Saved:
    """What `Strategy.state` returned: on this worker, or on worker 0 where this worker is new."""

    state: Mapping[str, Any]
    refusal: str  # the sentence for what cannot be used
    own: bool = True  # this worker made it
    members: frozenset[int] = frozenset()  # the workers that made their own and are here again
    lost: list[str] = field(default_factory=list)  # what begins anew, for the user

    def part(self, key: str) -> Saved:
        """What one part of a strategy remembers."""
        found = self[key]
        if not isinstance(found, Mapping):
            raise BadRequest(self.refusal)
        return replace(self, state=found)

    def __getitem__(self, key: str) -> Any:
        """What is the same on all workers."""
        if key not in self.state:
            raise BadRequest(self.refusal)
        return self.state[key]

    def fill(self, key: str, into: Sequence[Tensor], what: str = "") -> None:
        """Copy tensors into those of this run.

        Without `what` they are the same on all workers; with it they are one worker's own. A
        checkpoint without such tensors changes nothing.
        """
        kept = self[key]
        if not len(kept):
            return
        if (what and not self.own) or not into:
            self.anew(what or key)
            return
        shapes = [getattr(tensor, "shape", None) for tensor in kept]
        if shapes != [tensor.shape for tensor in into]:
            raise BadRequest(self.refusal)
        for own, tensor in zip(into, kept, strict=True):
            own.copy_(tensor)

    def states(self, key: str, new: Sequence[dict[str, Any]], what: str) -> list[dict[str, Any]]:
        """Return one worker's own dictionaries, on the device of this run, or the new ones."""
        kept = self[key]
        if not len(kept):
            return list(new)
        if not self.own or len(kept) != len(new):
            self.anew(what)
            return list(new)
        return list(kept)

    def anew(self, what: str) -> None:
        if what not in self.lost:
            self.lost.append(what)


def on_device(tree: Any, device: torch.device) -> Any:
    """Return a checkpoint's content with its floating tensors on a device."""
    if isinstance(tree, Tensor):
        return tree.to(device) if tree.is_floating_point() or tree.is_complex() else tree
    if isinstance(tree, dict):
        return {key: on_device(value, device) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(on_device(value, device) for value in tree)
    return tree
