"""A replica: one worker's model, optimizer, and flat buffers, of which the model's tensors are
views (flat.py).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from paceline.data.content import call, describe
from paceline.errors import BadRequest, NotFinite
from paceline.parallel.base import Part
from paceline.replica.buckets import Buckets
from paceline.replica.flat import Allocate, FlatModel, Region, allocate_plainly
from paceline.replica.precision import Precision
from paceline.replica.refusals import refuse_foreign_parameters
from paceline.types import Batch


class Replica:
    """Model, loss and optimizer of one worker.

    Training calls `forward`, which is the model unless a strategy wraps it (DDP).
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Callable[[Any, Any], Tensor],
        *,
        flat: bool = True,
        channels_last: bool = False,
        precision: Precision | None = None,
        clip_norm: float | None = None,
        step: Callable[[Any, Any], Tensor] | None = None,
        allocate: Allocate = allocate_plainly,
        part: Part | None = None,
    ) -> None:
        self.part = part or Part(model)  # of a model that is split over workers
        self.model, self.optimizer, self.loss, self.step = model, optimizer, loss, step
        self.forward: Callable[..., Any] = model
        # Where the backward pass exchanges gradients: a backward pass that does not.
        self.without_exchange: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.channels_last = channels_last
        self.precision = precision or Precision()
        self.samples_seen = 0.0
        self.clip_norm = clip_norm  # clips the gradients after their exchange
        self._skips = False  # an update does nothing
        self.gradient_bytes = 0  # sent inside the last forward_backward, where the model is split
        # The optimizer's own step: a loop of the user's own replaces `optimizer.step`.
        self._step: Callable[[], Any] = optimizer.step
        # The float buffers as all workers last agreed on them, and memory for their changes.
        self.common_buffers: list[Tensor] = []
        self.moved_buffers: list[Tensor] = []
        refuse_foreign_parameters(model, optimizer)
        if not model.training:  # otherwise keep the modules' modes: batch norm may be frozen
            model.train()
        self.flat = FlatModel(model, optimizer, allocate) if flat else None
        self._initial_lrs = [g["lr"] for g in optimizer.param_groups]

    @property
    def regions(self) -> Sequence[Region]:
        return self.flat.regions if self.flat else ()

    @property
    def places(self) -> Sequence[tuple[nn.Parameter, Tensor]]:
        """Every trainable parameter with its view of the flat gradients."""
        return self.flat.trainable if self.flat else ()

    @property
    def float_buffers(self) -> Sequence[Tensor]:
        """Batch statistics and the like: one flat tensor per region, or the model's own."""
        if self.flat:
            return [region.buffers for region in self.flat.regions]
        return [b for b in self.model.buffers() if b.is_floating_point() or b.is_complex()]

    @property
    def integer_buffers(self) -> Sequence[Tensor]:
        if self.flat:
            return self.flat.integer_buffers
        kept = {id(b) for b in self.float_buffers}
        return [b for b in self.model.buffers() if id(b) not in kept]

    @property
    def parameter_count(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    def forward_backward(self, batch: Batch, scale: float) -> float:
        """Compute the gradient of `scale` times the batch's mean loss; return the mean loss.

        The gradients of a batch's parts are added up, each by its share of the rows.
        """
        if self.flat:
            self.flat.forget_gradients()
        else:
            self.optimizer.zero_grad()
        parts = [part for part in batch.parts or (batch,) if part.inputs is not None]
        value = 0.0
        for part in parts[:-1]:
            share = part.weight / batch.weight if batch.weight else 0.0
            with self._apart():
                value += share * self.part.backward(self, part, scale * share)
        for part in parts[-1:]:
            share = part.weight / batch.weight if batch.parts and batch.weight else 1.0
            value += share * self.part.backward(self, part, scale * share)
        if self.flat:
            self.flat.settle_gradients()
            self.gradient_bytes = self.part.complete()
        self.samples_seen += batch.weight
        return value

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """A backward pass whose gradients are not complete: they must not be exchanged yet."""
        with self.without_exchange():
            if self.flat is None:
                yield
                return
            self.flat.incomplete = True
            try:
                yield
            finally:
                self.flat.incomplete = False

    def plain_backward(self, part: Batch, scale: float) -> float:
        """Add the gradient of `scale` times the mean loss of some rows; return the mean loss."""
        with self.precision.computing():
            loss, _ = self.objective(self.forward, part.inputs, part.targets)
        if loss.dim():
            raise BadRequest(
                "the loss must be one number, the mean over the rows; it has shape"
                f" {tuple(loss.shape)}"
            )
        value = loss.item()
        factor = self.precision.scale
        if factor is not None:
            scale = scale * factor.factor
        elif not math.isfinite(value):
            raise NotFinite(
                f"the loss is {value} at step {part.step + 1}: try a smaller lr, or look for"
                " bad numbers in the data"
            )
        (loss if scale == 1.0 else loss * scale).backward()
        return value

    def computing(self) -> AbstractContextManager[Any]:
        """The context of forward passes: their precision."""
        return self.precision.computing()

    def compile(self, backend: str) -> None:
        """Compile what training calls; evaluations call the model itself."""
        self.forward = torch.compile(self.forward, backend=backend)

    def unscale(self) -> bool:
        """Divide the gradients by the loss scale, if there is one. Returns whether they are finite.

        Call it once, after the backward pass and before the exchange.
        """
        scale = self.precision.scale
        if scale is None:
            return True
        own = [p.grad for p in self.model.parameters() if p.grad is not None]
        return scale.unscale([r.grads for r in self.regions] if self.flat else own)

    @contextmanager
    def skipping(self) -> Iterator[None]:
        """Updates do nothing in a `with` block."""
        self._skips = True
        try:
            yield
        finally:
            self._skips = False

    def objective(self, model: Callable[..., Any], inputs: Any, targets: Any) -> tuple[Tensor, Any]:
        """The mean loss of a batch, and the outputs; a step of the user's own gives only the loss.

        That step gets the whole batch as `inputs`.
        """
        if self.step is None:
            outputs = call(model, self.formatted(inputs))
            return self.loss(outputs, targets), outputs
        loss = self.step(model, inputs)
        if not isinstance(loss, Tensor):
            raise BadRequest(
                f"step returned {describe(loss)}: it must return the loss, a tensor with one number"
            )
        return loss, None

    def infer(self, inputs: Any) -> Any:
        """The output of the model itself, without a strategy's wrapper."""
        with self.precision.computing():
            return call(self.model, self.formatted(inputs))

    def evaluate(self, inputs: Any, targets: Any) -> tuple[Tensor, Any]:
        """The loss and the outputs of the model itself, without a strategy's wrapper."""
        with self.precision.computing():
            return self.objective(self.model, inputs, targets)

    def formatted(self, inputs: Any) -> Any:
        """The inputs in the chosen memory format."""
        if self.channels_last and isinstance(inputs, Tensor) and inputs.dim() == 4:
            return inputs.contiguous(memory_format=torch.channels_last)
        return inputs

    def all_reduce_in_buckets(self, all_reduce: Callable[[Tensor], None]) -> Sequence[Tensor]:
        """From now on, all-reduce gradients while the backward pass runs; return the buckets.

        Call `await_buckets` before using them.
        """
        assert self.flat is not None
        self.flat.buckets = Buckets(self.flat.regions, all_reduce)
        return self.flat.buckets.spans

    def await_buckets(self) -> None:
        if self.flat is not None and self.flat.buckets is not None:
            self.flat.buckets.finish()

    def attach_gradients(self) -> None:
        """Make every parameter's `.grad` its view of the flat buffer.

        For callers that wrote the flat buffer themselves (servers, private gradients).
        """
        if self.flat:
            for parameter, place in self.flat.trainable:
                parameter.grad = place

    def update(self, marked: bool = True) -> None:
        """Take one step of the optimizer with the current gradients.

        `marked`: untouched parameters are still marked by negative zeros. A lossy codec destroys
        the marks; then every parameter counts as touched.
        """
        if self._skips:
            return
        if self.flat and marked:
            self.flat.skip_untouched()
        self.apply()

    def apply(self) -> None:
        """Clip the gradients, if asked to, and take the optimizer's own step."""
        if self.clip_norm is not None:
            whole = self.part.norm()
            if whole is None:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
            else:
                torch.nn.utils.clip_grads_with_norm_(
                    self.model.parameters(),
                    self.clip_norm,
                    torch.tensor(whole, dtype=torch.float64),
                )
        self._step()

    @property
    def lrs(self) -> list[float]:
        """The current learning rates of the optimizer's groups."""
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
        """Set evaluation mode for a `with` block; restore every module's mode after it."""
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        try:
            yield
        finally:
            self.model.train(modes[0][1])
            for module, mode in modes:
                module.training = mode

    @property
    def held(self) -> list[Tensor]:
        """The memory of all parameters: one flat tensor per region, or each parameter's own."""
        if self.flat:
            return [r.params for r in self.flat.regions]
        return [p.detach() for p in self.model.parameters()]

    @contextmanager
    def holding(self, weights: Sequence[Tensor] | None) -> Iterator[None]:
        """Use these weights (one flat tensor per region) in a `with` block; None: its own."""
        if weights is None:
            yield
            return
        kept = [held.clone() for held in self.held]
        for held, other in zip(self.held, weights, strict=True):
            held.copy_(other)
        try:
            yield
        finally:
            for held, own in zip(self.held, kept, strict=True):
                held.copy_(own)

    def checksum(self) -> int:
        """A 63-bit hash of all state that must be equal on all workers at the start."""
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
        """A copy of the model's state_dict: contiguous, on the CPU, with the plain model's names.

        torch.compile's prefix is removed.
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
            raise BadRequest(
                "these weights do not fit the model; missing or unexpected:"
                f" {', '.join(missing[:3])}"
            )

    def load_optimizer(self, state: dict[str, Any]) -> None:
        """Load the optimizer's memory; the options that are given now replace those of then."""
        groups = self.optimizer.param_groups
        asked = [{k: v for k, v in group.items() if k != "params"} for group in groups]
        self.optimizer.load_state_dict(state)
        for group, options in zip(self.optimizer.param_groups, asked, strict=True):
            group.update(options)


def enter_training(model: nn.Module) -> None:
    """Call `train()` of the modules that have one of their own, as a plain loop does.

    It may keep a part of them in evaluation mode. Other modules keep the modes that they have.
    """
    for module in model.modules():
        if type(module).train is not nn.Module.train and module.training:
            module.train()


def has_batch_norm(model: nn.Module) -> bool:
    """Whether the model has batch norm, which needs statistics over the rows of a batch."""
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
