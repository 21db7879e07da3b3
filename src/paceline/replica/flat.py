"""A model's parameters, gradients and buffers in flat memory: the model's tensors are views of it.

Flattening serves communication: a strategy exchanges one long tensor per (device, dtype), whatever
the model looks like. The person's optimizer keeps stepping its own parameters. Tensors lie back to
back without padding (aligning them was measured to buy nothing), so a buffer's length is its
payload.

A parameter that no worker touched in a step must be skipped by the optimizer (no weight decay, no
momentum), as it is in a plain loop where its `.grad` is None. Nothing extra is sent to find out: an
untouched gradient is filled with *negative* zero, a touched one never starts with it, and sums keep
that apart: -0 + -0 = -0, but -0 + x = x. So after the exchange every worker reads off the sum
whether anybody touched the parameter.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from paceline.errors import BadRequest
from paceline.replica.buckets import Buckets
from paceline.types import Layout, Slot

Allocate = Callable[[int, torch.dtype, torch.device], Tensor]


def allocate_plainly(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(numel, dtype=dtype, device=device)


class Region:
    """The flat buffers of one (device, dtype), with the layout of each. Trainable parameters come
    first in `params`.
    """

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
        self.owners: list[
            nn.Parameter
        ] = []  # of the gradients that have elements; `heads` are their first ones
        sized = [s.offset for s in trainable if s.numel]
        self.heads = torch.tensor(sized, device=device, dtype=torch.int64)
        self.zeros = torch.zeros(len(sized), device=device, dtype=dtype)


class FlatModel:
    """Moves a model's tensors into flat buffers and keeps every gradient in its place."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        allocate: Allocate = allocate_plainly,
    ) -> None:
        self.model = model
        groups = {
            id(p): i
            for i, g in enumerate(optimizer.param_groups if optimizer else [])
            for p in g["params"]
        }
        parameters = list(model.named_parameters())  # tied parameters appear once
        named_buffers = list(model.named_buffers())
        for name, tensor in (*parameters, *named_buffers):
            if tensor.layout is not torch.strided:
                raise BadRequest(
                    f"{name} is stored as {tensor.layout}; only dense tensors can be shared among"
                    " workers"
                )
        self.integer_buffers = [b for _, b in named_buffers if not _is_float(b)]
        float_buffers = [(n, b) for n, b in named_buffers if _is_float(b)]
        homes = _homes(model)

        self.regions: list[Region] = []
        self.trainable: list[
            tuple[nn.Parameter, Tensor]
        ] = []  # each with its place in the gradient buffer
        self._buffers: list[tuple[list[tuple[nn.Module, str]], Tensor]] = []
        for device, dtype in dict.fromkeys(
            (t.device, t.dtype) for _, t in (*parameters, *float_buffers)
        ):
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
        """Before a backward pass: gradients start from nothing, so that their first write is a
        copy, not an addition.
        """
        self._touched.clear()
        for parameter, _ in self.trainable:
            parameter.grad = None
        if self.buckets is not None:
            self.buckets.begin()

    def _keep(self, parameter: Tensor) -> None:
        """As soon as a gradient is complete it goes into its place: hot in the cache, its own
        memory free again.
        """
        place, grad = self._place[id(parameter)], parameter.grad
        self._touched.add(id(parameter))
        if grad is not None and grad is not place:
            if grad.layout is not torch.strided:
                if not self.notices:
                    self.notices.append(
                        "A gradient is sparse; it is made dense, because workers exchange flat"
                        " buffers."
                    )
                grad = grad.to_dense()
            place.copy_(grad)
            parameter.grad = place
        if self.buckets is not None and place.numel():
            place[(0,) * place.dim()] += (
                0.0  # its first number is not negative zero: it has been touched
            )
            self.buckets.complete(self._names[id(parameter)])

    def settle_gradients(self) -> None:
        """After the backward pass: every gradient is its view, and untouched ones say so (negative
        zero).
        """
        if self.buckets is not None:  # some may have been exchanged already
            for parameter, place in self.trainable:
                if id(parameter) not in self._touched:
                    place.fill_(-0.0)
                    parameter.grad = place
            return
        for parameter, place in self.trainable:
            if parameter.grad is not place:
                if (
                    parameter.grad is not None
                ):  # somebody put another tensor there after the backward pass
                    self._touched.add(id(parameter))
                    place.copy_(parameter.grad)
                parameter.grad = place
        for region in self.regions:
            if len(region.heads):
                region.grads.index_add_(
                    0, region.heads, region.zeros
                )  # -0 becomes +0; nothing else changes
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


def layout_of(model: nn.Module) -> Layout:
    """Where a model's trainable parameters will lie (also of a model without memory)."""
    return Layout(
        tuple(_slots([(n, p) for n, p in model.named_parameters() if p.requires_grad], {}, 0)[0])
    )


def _slots(
    tensors: list[tuple[str, Tensor]], groups: dict[int, int], offset: int
) -> tuple[list[Slot], int]:
    slots = []
    for name, tensor in tensors:
        stride = (
            tensor.stride() if _dense(tensor) else torch.empty(tensor.shape, device="meta").stride()
        )
        slots.append(
            Slot(
                name,
                tuple(tensor.shape),
                tuple(stride),
                offset,
                tensor.numel(),
                groups.get(id(tensor), -1),
            )
        )
        offset += tensor.numel()
    return slots, offset


def _dense(tensor: Tensor) -> bool:
    """Whether the strides are a permutation of a contiguous tensor's (channels_last is): then they
    fit a flat stretch.
    """
    expected = 1
    for size, stride in sorted(
        zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: (pair[1], pair[0])
    ):
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
