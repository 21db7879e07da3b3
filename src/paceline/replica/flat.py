"""A model's parameters, gradients and buffers in flat memory: the model's tensors are views of it.

Flattening serves communication: a strategy exchanges one long tensor per (device, dtype) for any
model. The user's optimizer keeps stepping the model's parameters. Tensors lie back to back without
padding (measurements showed no gain from alignment), so a buffer's length is its payload.

The optimizer must skip a parameter that no worker touched in a step (no weight decay, no momentum),
as it does in a plain loop where the parameter's `.grad` is None. No extra message is needed for
that. An untouched gradient is filled with *negative* zero, and a touched one never starts with it.
Sums keep the two apart: -0 + -0 = -0, but -0 + x = x. So after the exchange the sum tells every
worker whether any worker touched the parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor, nn

from paceline.errors import BadRequest
from paceline.replica.buckets import Buckets
from paceline.types import Layout, Slot

Allocate = Callable[[int, torch.dtype, torch.device], Tensor]


def allocate_plainly(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(numel, dtype=dtype, device=device)


class Region:
    """The flat buffers of one (device, dtype), with the layout of each.

    Trainable parameters come first in `params`.
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
        # The parameters whose gradients have elements; `heads` are their first elements.
        self.owners: list[nn.Parameter] = []
        sized = [s.offset for s in trainable if s.numel]
        self.heads = torch.tensor(sized, device=device, dtype=torch.int64)
        self.zeros = torch.zeros(len(sized), device=device, dtype=dtype)

    @property
    def trained(self) -> Tensor:
        """The trainable parameters, in the order of the gradients."""
        return self.params[: self.grads.numel()]


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
                    f"{name} is stored as {tensor.layout}; workers can exchange dense tensors only:"
                    " call .to_dense()"
                )
        float_buffers = [(n, b) for n, b in named_buffers if _is_float(b)]
        homes = _homes(model)
        self._integers = [homes[id(b)] for _, b in named_buffers if not _is_float(b)]

        self.regions: list[Region] = []
        # Each trainable parameter with its view of the gradient buffer.
        self.trainable: list[tuple[nn.Parameter, Tensor]] = []
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
                    buffer.data = view  # the same object: other references to it stay valid
                    self._buffers.append((homes[id(buffer)], buffer))
            for slot in trainable:
                parameter, place = tensors[slot.name], slot.view(region.grads)
                self.trainable.append((parameter, place))
                if slot.numel:
                    region.owners.append(parameter)
                parameter.register_post_accumulate_grad_hook(self._keep)
        self._place = {id(p): g for p, g in self.trainable}
        self._parameters = dict(parameters)
        self._names = {id(p): n for n, p in parameters}
        self.buckets: Buckets | None = None  # set: gradients are summed during the backward pass
        self.incomplete = False  # set: further backward passes add to these gradients
        self._touched: set[int] = set()
        self.notices: list[str] = []

    def forget_gradients(self) -> None:
        """Set all gradients to None before a backward pass.

        The backward pass then writes each gradient instead of adding to it.
        """
        self._touched.clear()
        for parameter, _ in self.trainable:
            parameter.grad = None
        if self.buckets is not None:
            self.buckets.begin()

    def _keep(self, parameter: Tensor) -> None:
        """Copy a gradient to its place in the flat buffer as soon as it is final.

        It is still in the cache then, and its own memory is freed.
        """
        place, grad = self._place[id(parameter)], parameter.grad
        self._touched.add(id(parameter))
        if grad is not None and grad is not place:
            if grad.layout is not torch.strided:
                if not self.notices:
                    self.notices.append(
                        f"The gradient of {self._names[id(parameter)]} is sparse. It is made dense,"
                        " because workers exchange flat buffers."
                    )
                grad = grad.to_dense()
            place.copy_(grad)
            parameter.grad = place
        if self.buckets is not None and place.numel():
            place[(0,) * place.dim()] += 0.0  # -0 becomes +0: this gradient is touched
            if not self.incomplete:
                self.buckets.complete(self._names[id(parameter)])

    def take_gradients(self, muted: Collection[int] = ()) -> bool:
        """Settle the gradients of a loop of the user's own; return whether all are touched.

        As for a plain optimizer, a parameter whose `.grad` is None is untouched. So are those whose
        ids are in `muted`.
        """
        self._touched = {
            id(p) for p, _ in self.trainable if p.grad is not None and id(p) not in muted
        }
        self.settle_gradients()
        return len(self._touched) == len(self.trainable)

    def settle_gradients(self) -> None:
        """After a backward pass, make every `.grad` its view and mark untouched ones by -0."""
        if self.buckets is not None:  # touched gradients may have been summed already
            for parameter, place in self.trainable:
                if id(parameter) not in self._touched:
                    place.fill_(-0.0)
                    parameter.grad = place
            return
        for parameter, place in self.trainable:
            if parameter.grad is not place:
                if parameter.grad is not None:  # replaced after the backward pass
                    self._touched.add(id(parameter))
                    place.copy_(parameter.grad)
                parameter.grad = place
        for region in self.regions:
            if len(region.heads):
                # -0 becomes +0; no other number changes.
                region.grads.index_add_(0, region.heads, region.zeros)
        if len(self._touched) < len(self.trainable):
            for parameter, place in self.trainable:
                if id(parameter) not in self._touched:
                    place.fill_(-0.0)

    def skip_untouched(self) -> None:
        """Set the gradients that no worker touched to None, so that the optimizer skips them."""
        for region in self.regions:
            heads = region.grads.index_select(0, region.heads)
            if heads.is_complex():
                heads = heads.real
            untouched = torch.signbit(heads) & (heads == 0)
            if bool(untouched.any()):
                for index in untouched.nonzero().flatten().tolist():
                    region.owners[index].grad = None

    @property
    def integer_buffers(self) -> list[Tensor]:
        """Buffers that are no floats, as the modules have them now: a module may replace one."""
        found = [module._buffers[leaf] for owners in self._integers for module, leaf in owners]
        return list({id(b): b for b in found if b is not None}.values())

    def live_in(self, index: int, flat: Tensor) -> None:
        """Make a region's parameters views of this memory, with the values that it holds."""
        region = self.regions[index]
        region.params = flat
        for slot in region.param_layout.slots:
            self._parameters[slot.name].data = slot.view(flat)

    def gather_buffers(self) -> None:
        """Copy buffers that a module has replaced back to their place in the flat buffer."""
        for owners, place in self._buffers:
            for module, leaf in owners:
                current = module._buffers[leaf]
                if current is not None and current.data_ptr() != place.data_ptr():
                    place.copy_(current)
                    module._buffers[leaf] = place


def layout_of(model: nn.Module) -> Layout:
    """The layout of a model's trainable parameters (also of a model on the meta device)."""
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
    """Whether the strides are a permutation of a contiguous tensor's, as channels_last's are.

    Such a tensor fits a span of a flat buffer.
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
    """The modules and names under which each buffer is registered (modules may share a buffer)."""
    homes: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for leaf, buffer in module._buffers.items():
            if buffer is not None:
                homes.setdefault(id(buffer), []).append((module, leaf))
    return homes
