"""One worker's copy: model, optimizer, and flat buffers that the model's tensors are views of.

Flattening serves communication: a strategy exchanges one long tensor per (device, dtype), whatever the model looks like.
The person's optimizer keeps stepping its own parameters. Tensors lie back to back without padding (aligning them was
measured to buy nothing), so a buffer's length is its payload.

A parameter that no worker touched in a step must be skipped by the optimizer (no weight decay, no momentum), as it is in a
plain loop where its `.grad` is None. Nothing extra is sent to find out: an untouched gradient is filled with *negative*
zero, a touched one never starts with it, and sums keep that apart: -0 + -0 = -0, but -0 + x = x. So after the exchange
every worker reads off the sum whether anybody touched the parameter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from paceline.buckets import Buckets
from paceline.errors import BadRequest, NotFinite
from paceline.types import Batch, Layout, Slot

Allocate = Callable[[int, torch.dtype, torch.device], Tensor]


def allocate_plainly(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(numel, dtype=dtype, device=device)


class Region:
    """The flat buffers of one (device, dtype), with the layout of each. Trainable parameters come first in `params`."""

    def __init__(
        self,
        trainable: list[Slot],
        frozen: list[Slot],
        buffers: list[Slot],
        device: torch.device,
        dtype: torch.dtype,
        allocate: Allocate,
    ) -> None:
        self.grad_layout = Layout(tuple(trainable))
        self.param_layout = Layout((*trainable, *frozen))
        self.buffer_layout = Layout(tuple(buffers))
        self.params = allocate(self.param_layout.numel, dtype, device)
        self.grads = allocate(self.grad_layout.numel, dtype, device)
        self.buffers = allocate(self.buffer_layout.numel, dtype, device)
        self.owners: list[nn.Parameter] = []  # of the gradients that have elements; `heads` are their first ones
        sized = [s.offset for s in trainable if s.numel]
        self.heads = torch.tensor(sized, device=device, dtype=torch.int64)
        self.zeros = torch.zeros(len(sized), device=device, dtype=dtype)


class FlatModel:
    """Moves a model's tensors into flat buffers and keeps every gradient in its place."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, allocate: Allocate = allocate_plainly
    ) -> None:
        self.model = model
        groups = {id(p): i for i, g in enumerate(optimizer.param_groups if optimizer else []) for p in g["params"]}
        parameters = list(model.named_parameters())  # tied parameters appear once
        named_buffers = list(model.named_buffers())
        for name, tensor in (*parameters, *named_buffers):
            if tensor.layout is not torch.strided:
                raise BadRequest(f"{name} is stored as {tensor.layout}; only dense tensors can be shared among workers")
        self.integer_buffers = [b for _, b in named_buffers if not _is_float(b)]
        float_buffers = [(n, b) for n, b in named_buffers if _is_float(b)]
        homes = _homes(model)

        self.regions: list[Region] = []
        self.trainable: list[tuple[nn.Parameter, Tensor]] = []  # each with its place in the gradient buffer
        self._buffers: list[tuple[list[tuple[nn.Module, str]], Tensor]] = []
        for device, dtype in dict.fromkeys((t.device, t.dtype) for _, t in (*parameters, *float_buffers)):
            here = [(n, p) for n, p in parameters if (p.device, p.dtype) == (device, dtype)]
            trainable, end = _slots([(n, p) for n, p in here if p.requires_grad], groups, 0)
            frozen, _ = _slots([(n, p) for n, p in here if not p.requires_grad], groups, end)
            stats = [(n, b) for n, b in float_buffers if (b.device, b.dtype) == (device, dtype)]
            region = Region(trainable, frozen, _slots(stats, {}, 0)[0], device, dtype, allocate)
            self.regions.append(region)
            tensors = dict(here)
            with torch.no_grad():
                for slot in region.param_layout.slots:
                    view = slot.view(region.params)
                    view.copy_(tensors[slot.name])
                    tensors[slot.name].data = view
                for slot, (_, buffer) in zip(region.buffer_layout.slots, stats, strict=True):
                    view = slot.view(region.buffers)
                    view.copy_(buffer)
                    self._buffers.append((homes[id(buffer)], view))
            for slot in trainable:
                parameter, place = tensors[slot.name], slot.view(region.grads)
                self.trainable.append((parameter, place))
                if slot.numel:
                    region.owners.append(parameter)
                parameter.register_post_accumulate_grad_hook(self._keep)
        for owners, view in self._buffers:
            for module, leaf in owners:
                module._buffers[leaf] = view
        self._place = {id(p): g for p, g in self.trainable}
        self._parameters = dict(parameters)
        self._names = {id(p): n for n, p in parameters}
        self.buckets: Buckets | None = None  # gradients are exchanged while the backward pass runs
        self._touched: set[int] = set()
        self.notices: list[str] = []

    def forget_gradients(self) -> None:
        """Before a backward pass: gradients start from nothing, so that their first write is a copy, not an addition."""
        self._touched.clear()
        for parameter, _ in self.trainable:
            parameter.grad = None
        if self.buckets is not None:
            self.buckets.begin()

    def _keep(self, parameter: Tensor) -> None:
        """As soon as a gradient is complete it goes into its place: hot in the cache, its own memory free again."""
        place, grad = self._place[id(parameter)], parameter.grad
        self._touched.add(id(parameter))
        if grad is not None and grad is not place:
            if grad.layout is not torch.strided:
                if not self.notices:
                    self.notices.append("A gradient is sparse; it is made dense, because workers exchange flat buffers.")
                grad = grad.to_dense()
            place.copy_(grad)
            parameter.grad = place
        if self.buckets is not None and place.numel():
            place[(0,) * place.dim()] += 0.0  # its first number is not negative zero: it has been touched
            self.buckets.complete(self._names[id(parameter)])

    def settle_gradients(self) -> None:
        """After the backward pass: every gradient is its view, and untouched ones say so (negative zero)."""
        if self.buckets is not None:  # some may have been exchanged already
            for parameter, place in self.trainable:
                if id(parameter) not in self._touched:
                    place.fill_(-0.0)
                    parameter.grad = place
            return
        for parameter, place in self.trainable:
            if parameter.grad is not place:
                if parameter.grad is not None:  # somebody put another tensor there after the backward pass
                    self._touched.add(id(parameter))
                    place.copy_(parameter.grad)
                parameter.grad = place
        for region in self.regions:
            if len(region.heads):
                region.grads.index_add_(0, region.heads, region.zeros)  # -0 becomes +0; nothing else changes
        if len(self._touched) < len(self.trainable):
            for parameter, place in self.trainable:
                if id(parameter) not in self._touched:
                    place.fill_(-0.0)

    def skip_untouched(self) -> None:
        """Before the optimizer: what nobody touched has no gradient."""
        for region in self.regions:
            heads = region.grads.index_select(0, region.heads)
            if heads.is_complex():
                heads = heads.real
            untouched = torch.signbit(heads) & (heads == 0)
            if bool(untouched.any()):
                for index in untouched.nonzero().flatten().tolist():
                    region.owners[index].grad = None

    def live_in(self, index: int, flat: Tensor) -> None:
        """From now on a region's parameters are in this memory, with what it holds."""
        region = self.regions[index]
        region.params = flat
        for slot in region.param_layout.slots:
            self._parameters[slot.name].data = slot.view(flat)

    def gather_buffers(self) -> None:
        """Buffers that a module replaced instead of changing go back into their place."""
        for owners, place in self._buffers:
            for module, leaf in owners:
                current = module._buffers[leaf]
                if current is not None and current.data_ptr() != place.data_ptr():
                    place.copy_(current)
                    module._buffers[leaf] = place


class Replica:
    """Model, loss and optimizer of one worker. `forward` is what is called; a strategy may wrap it (DDP)."""

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
        if not model.training:  # otherwise it is as its author made it: a frozen batch norm stays frozen
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
                raise BadRequest(f"the loss must be one number, the mean over the rows; it has shape {tuple(loss.shape)}")
            value = loss.item()
            if not value - value == 0.0:
                raise NotFinite(
                    f"the loss is {value} at step {batch.step + 1}: try a smaller lr, or look for bad numbers in the data"
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
        """From now on gradients are exchanged while the backward pass runs; `await_exchange` before they are used."""
        assert self.flat is not None
        self.flat.buckets = Buckets(self.flat.regions, exchange)

    def await_exchange(self) -> None:
        if self.flat is not None and self.flat.buckets is not None:
            self.flat.buckets.finish()

    def attach_gradients(self) -> None:
        """The flat gradients are the parameters', whatever was there: for who has filled them from elsewhere."""
        if self.flat:
            for parameter, place in self.flat.trainable:
                parameter.grad = place

    def update(self, marked: bool = True) -> None:
        """One step of the optimizer on the gradients that are there now.

        `marked` says that the marks of untouched parameters have survived the exchange; after a lossy codec they have
        not, and every parameter counts as touched.
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
        """For a while, these weights (one flat tensor per region) instead of its own; None: its own."""
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
                digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return int.from_bytes(digest.digest(), "little") >> 1

    def state_dict(self) -> dict[str, Tensor]:
        """As the plain model's: own storage, contiguous, on the CPU; names without torch.compile's prefix."""
        self.gather_buffers()
        return {
            k.removeprefix("_orig_mod."): v.detach().cpu().contiguous().clone()
            for k, v in self.model.state_dict().items()
            if isinstance(v, Tensor)  # a module's extra state is not weights
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        prefix = "_orig_mod." if any(k.startswith("_orig_mod.") for k in self.model.state_dict()) else ""
        found = self.model.load_state_dict({prefix + k: v for k, v in state.items()}, strict=False)
        missing = [k for k in (*found.missing_keys, *found.unexpected_keys) if not k.endswith("_extra_state")]
        if missing:
            raise BadRequest(f"these weights do not fit the model: {', '.join(missing[:3])}")


def refuse_closures(optimizer: torch.optim.Optimizer) -> None:
    if isinstance(optimizer, torch.optim.LBFGS):
        raise BadRequest("LBFGS evaluates the loss several times per step, which no strategy can keep together: choose another")


def refuse_foreign_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """An optimizer may hold parameters of the model only: others would be each worker's own, and nothing would reset them."""
    own = {id(p) for p in model.parameters()}
    for number, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            if id(parameter) not in own:
                names = group.get("param_names") or []
                name = names[index] if index < len(names) else f"parameter {index} of group {number}"
                raise BadRequest(
                    f"the optimizer holds a parameter that is not the model's: {name}, of shape {tuple(parameter.shape)}. "
                    "Workers exchange the model's parameters: register it in the model (self.x = nn.Parameter(...)), "
                    "or give it an optimizer of its own"
                )


def has_batch_norm(model: nn.Module) -> bool:
    """Whether statistics over the rows of a batch are needed in training."""
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())


def layout_of(model: nn.Module) -> Layout:
    """Where a model's trainable parameters will lie (also of a model without memory)."""
    return Layout(tuple(_slots([(n, p) for n, p in model.named_parameters() if p.requires_grad], {}, 0)[0]))


def _slots(tensors: list[tuple[str, Tensor]], groups: dict[int, int], offset: int) -> tuple[list[Slot], int]:
    slots = []
    for name, tensor in tensors:
        stride = tensor.stride() if _dense(tensor) else torch.empty(tensor.shape, device="meta").stride()
        slots.append(Slot(name, tuple(tensor.shape), tuple(stride), offset, tensor.numel(), groups.get(id(tensor), -1)))
        offset += tensor.numel()
    return slots, offset


def _dense(tensor: Tensor) -> bool:
    """Whether the strides are a permutation of a contiguous tensor's (channels_last is): then they fit a flat stretch."""
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: (pair[1], pair[0])):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _is_float(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _homes(model: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """Where each buffer is registered (a buffer may be shared by modules)."""
    homes: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for leaf, buffer in module._buffers.items():
            if buffer is not None:
                homes.setdefault(id(buffer), []).append((module, leaf))
    return homes
