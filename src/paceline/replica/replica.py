"""One worker's copy: model, optimizer, and the flat buffers that the model's tensors are views of
(flat.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import BadRequest, NotFinite
from paceline.replica.buckets import Buckets
from paceline.replica.flat import Allocate, FlatModel, Region, allocate_plainly
from paceline.types import Batch


class Replica:
    """Model, loss and optimizer of one worker. `forward` is what is called; a strategy may wrap it
    (DDP).
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Callable[[Any, Any], Tensor],
        *,
        flat: bool = True,
        channels_last: bool = False,
        allocate: Allocate = allocate_plainly,
    ) -> None:
        self.model, self.optimizer, self.loss = model, optimizer, loss
        self.forward: Callable[..., Any] = model
        self.channels_last = channels_last
        self.samples_seen = 0.0
        self.clip_norm: float | None = None  # of the gradients, after they have been exchanged
        self.common_buffers: list[Tensor] = []
        refuse_foreign_parameters(model, optimizer)
        if (
            not model.training
        ):  # otherwise it is as its author made it: a frozen batch norm stays frozen
            model.train()
        self.flat = FlatModel(model, optimizer, allocate) if flat else None
        self._initial_lrs = [g["lr"] for g in optimizer.param_groups]

    @property
    def regions(self) -> Sequence[Region]:
        return self.flat.regions if self.flat else ()

    @property
    def places(self) -> Sequence[tuple[nn.Parameter, Tensor]]:
        """Every parameter that is trained, with its place in the flat gradients."""
        return self.flat.trainable if self.flat else ()

    @property
    def integer_buffers(self) -> Sequence[Tensor]:
        return self.flat.integer_buffers if self.flat else ()

    @property
    def parameter_count(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    def forward_backward(self, batch: Batch, scale: float) -> float:
        """The gradient of `scale` times the mean loss of this batch; returns the mean loss."""
        if self.flat:
            self.flat.forget_gradients()
        else:
            self.optimizer.zero_grad()
        value = 0.0
        if batch.inputs is not None:
            loss = self.loss(self.forward(self.formatted(batch.inputs)), batch.targets)
            if loss.dim():
                raise BadRequest(
                    "the loss must be one number, the mean over the rows; it has shape"
                    f" {tuple(loss.shape)}"
                )
            value = loss.item()
            if not value - value == 0.0:
                raise NotFinite(
                    f"the loss is {value} at step {batch.step + 1}: try a smaller lr, or look for"
                    " bad numbers in the data"
                )
            (loss if scale == 1.0 else loss * scale).backward()
        if self.flat:
            self.flat.settle_gradients()
        self.samples_seen += batch.weight
        return value

    def infer(self, inputs: Any) -> Any:
        """The model's answer, without whatever a strategy has wrapped around it for training."""
        return self.model(self.formatted(inputs))

    def formatted(self, inputs: Any) -> Any:
        """In the memory format that was chosen."""
        if self.channels_last and isinstance(inputs, Tensor) and inputs.dim() == 4:
            return inputs.contiguous(memory_format=torch.channels_last)
        return inputs

    def exchange_in_buckets(self, exchange: Callable[[Tensor], None]) -> None:
        """From now on gradients are exchanged while the backward pass runs; `await_exchange` before
        they are used.
        """
        assert self.flat is not None
        self.flat.buckets = Buckets(self.flat.regions, exchange)

    def await_exchange(self) -> None:
        if self.flat is not None and self.flat.buckets is not None:
            self.flat.buckets.finish()

    def attach_gradients(self) -> None:
        """The flat gradients are the parameters', whatever was there: for who has filled them from
        elsewhere.
        """
        if self.flat:
            for parameter, place in self.flat.trainable:
                parameter.grad = place

    def update(self, marked: bool = True) -> None:
        """One step of the optimizer on the gradients that are there now.

        `marked` says that the marks of untouched parameters have survived the exchange; after a
        lossy codec they have not, and every parameter counts as touched.
        """
        if self.flat and marked:
            self.flat.skip_untouched()
        if self.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
        self.optimizer.step()

    @property
    def lrs(self) -> list[float]:
        """The learning rates of the optimizer's groups, now."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def set_lrs(self, lrs: Sequence[float]) -> None:
        for group, lr in zip(self.optimizer.param_groups, lrs, strict=True):
            group["lr"] = lr

    def live_in(self, index: int, flat: Tensor) -> None:
        assert self.flat is not None
        self.flat.live_in(index, flat)

    def set_lr_factor(self, factor: float) -> None:
        for group, initial in zip(self.optimizer.param_groups, self._initial_lrs, strict=True):
            group["lr"] = initial * factor

    def gather_buffers(self) -> None:
        if self.flat:
            self.flat.gather_buffers()

    def weights(self) -> list[Tensor]:
        """All parameters as flat tensors (a copy where the replica is not flat)."""
        if self.flat:
            return [r.params for r in self.flat.regions]
        return [torch.cat([p.detach().reshape(-1).double() for p in self.model.parameters()])]

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """For a while in evaluation mode; then every module is in the mode that it was in."""
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        try:
            yield
        finally:
            self.model.train(modes[0][1])
            for module, mode in modes:
                module.training = mode

    @contextmanager
    def holding(self, weights: Sequence[Tensor] | None) -> Iterator[None]:
        """For a while, these weights (one flat tensor per region) instead of its own; None: its
        own.
        """
        if weights is None:
            yield
            return
        kept = [r.params.clone() for r in self.regions]
        for region, other in zip(self.regions, weights, strict=True):
            region.params.copy_(other)
        try:
            yield
        finally:
            for region, own in zip(self.regions, kept, strict=True):
                region.params.copy_(own)

    def checksum(self) -> int:
        """63 bits of everything that must be equal on all workers at the start."""
        digest = hashlib.blake2b(digest_size=8)
        self.gather_buffers()
        for tensor in self.model.state_dict().values():
            if isinstance(tensor, Tensor):
                digest.update(
                    tensor.detach()
                    .cpu()
                    .contiguous()
                    .reshape(-1)
                    .view(torch.uint8)
                    .numpy()
                    .tobytes()
                )
        return int.from_bytes(digest.digest(), "little") >> 1

    def state_dict(self) -> dict[str, Tensor]:
        """As the plain model's: own storage, contiguous, on the CPU; names without torch.compile's
        prefix.
        """
        self.gather_buffers()
        return {
            k.removeprefix("_orig_mod."): v.detach().cpu().contiguous().clone()
            for k, v in self.model.state_dict().items()
            if isinstance(v, Tensor)  # a module's extra state is not weights
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        prefix = (
            "_orig_mod." if any(k.startswith("_orig_mod.") for k in self.model.state_dict()) else ""
        )
        found = self.model.load_state_dict({prefix + k: v for k, v in state.items()}, strict=False)
        missing = [
            k
            for k in (*found.missing_keys, *found.unexpected_keys)
            if not k.endswith("_extra_state")
        ]
        if missing:
            raise BadRequest(f"these weights do not fit the model: {', '.join(missing[:3])}")


def refuse_closures(optimizer: torch.optim.Optimizer) -> None:
    if isinstance(optimizer, torch.optim.LBFGS):
        raise BadRequest(
            "LBFGS evaluates the loss several times per step, which no strategy can keep together:"
            " choose another"
        )


def refuse_foreign_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """An optimizer may hold parameters of the model only: others would be each worker's own, and
    nothing would reset them.
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
                    f" {tuple(parameter.shape)}. Workers exchange the model's parameters: register"
                    " it in the model (self.x = nn.Parameter(...)), or give it an optimizer of"
                    " its own"
                )


def has_batch_norm(model: nn.Module) -> bool:
    """Whether statistics over the rows of a batch are needed in training."""
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
