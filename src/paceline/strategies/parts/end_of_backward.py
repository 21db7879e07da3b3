"""The wait at the end of a backward pass in which PyTorch's DDP exchanges gradients.

DDP starts its all-reduces while the backward pass computes. It waits for them in a callback that
autograd calls when all gradients are computed. A callback that is queued before DDP's is called
just before that wait, so that a slow worker can be told from those that wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from paceline.transport.patience import Patience, Wait


class EndOfBackward:
    """Lets `patience` watch the waits of one DDP wrapper, and `abort` them."""

    def __init__(
        self, wrapper: DistributedDataParallel, patience: Patience, abort: Callable[[], None]
    ) -> None:
        self._patience, self._abort, self._queued = patience, abort, False
        self._wait: Wait | None = None
        # torch.compile takes no part in what is done for the user's information.
        wrapper.register_forward_pre_hook(torch.compiler.disable(self._forward_begins))
        wrapper.register_forward_hook(torch.compiler.disable(self._forward_ended))

    def _forward_begins(self, wrapper: Any, inputs: Any) -> None:
        self.over()

    def _forward_ended(self, wrapper: Any, inputs: Any, outputs: Any) -> None:
        self._queued = False
        if wrapper.require_backward_grad_sync and torch.is_grad_enabled():
            for tensor in tensors_in(outputs):
                if tensor.requires_grad:
                    tensor.register_hook(self._backward_begins)

    def _backward_begins(self, gradient: Tensor) -> None:
        if not self._queued:
            self._queued = True
            # autograd has no public name for it; DDP's own callback is queued the same way
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._computed)

    def _computed(self) -> None:
        self._wait = self._patience.enter("DDP's all-reduce", abort=self._abort)

    def over(self) -> None:
        """The backward pass is over, and its exchange with it."""
        if self._wait is not None:
            self._patience.leave(self._wait)
            self._wait = None


def tensors_in(outputs: Any) -> Iterator[Tensor]:
    """The tensors that a model returns, in the containers of DDP."""
    if isinstance(outputs, Tensor):
        yield outputs
    elif isinstance(outputs, (list, tuple, dict)):
        for part in outputs.values() if isinstance(outputs, dict) else outputs:
            yield from tensors_in(part)
