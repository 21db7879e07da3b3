"""The rule for convolutions: a sample's gradient is the sum of outer products over all places.

    G_i = sum over places t of g_t (patch_t)^T

patch_t is the part of the input that the kernel covers at place t, g_t the gradient of the output
there. Where the gradients of all samples fit into KEEP_BYTES they are kept, and their weighted sum
is one product. Otherwise their lengths come from two places x places matrices per sample (or from a
few gradients at a time), and the sum from a second, weighted pass. Patches are copied in the order
that has the longer contiguous runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.privacy.layers import Booked, Call, row_squares, slices, with_digits

KEEP_BYTES = 64 << 20  # the gradients of all samples are kept up to this size


class Convolution(Booked):
    """A convolution of one or two dimensions, with any stride, padding, dilation and groups."""

    def __init__(self, name: str, module: nn.Module, places: Mapping[str, Tensor]) -> None:
        super().__init__(name, module, places)
        weight: Any = module.weight
        self.kernel = tuple(weight.shape[2:]) if weight.dim() == 4 else (1, weight.shape[2])
        self.channels = (int(weight.shape[0]), int(weight.shape[1]))  # out; in, per group
        self.weights = weight.numel()
        given: Any = module
        self._groups = int(given.groups)
        self._stride, self._dilation = _pair(given.stride), _pair(given.dilation)
        self._gradients: Tensor | None = None  # samples x weights, in the order of `_as_weight`
        self._bias: Tensor | None = None
        self._calls: list[tuple[Tensor, Tensor]] = []
        self._by_channel = False
        self._buffer = torch.empty(0)

    def book(self, calls: list[Call]) -> Tensor:
        pairs = [(self._padded(c.input), self._flat(c.grads)) for c in calls]
        x, g = pairs[0]
        bias: Tensor | None = None
        if "bias" in self.places:
            self._bias = (
                g.sum((2, 3))
                if len(pairs) == 1
                else torch.stack([g.sum((2, 3)) for _, g in pairs]).sum(0)
            )
            bias = row_squares(self._bias)
        if "weight" not in self.places:
            assert bias is not None
            return bias
        if len(calls) > 1 or x.shape[0] * self.weights * x.element_size() <= KEEP_BYTES:
            self._gradients = self._all_gradients(pairs)
            squares = row_squares(self._gradients)
        else:
            self._calls = pairs
            squares = self._lengths(x, g)
        return squares if bias is None else squares.add_(bias)

    def _all_gradients(self, pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
        x, g = pairs[0]
        samples = x.shape[0]
        self._by_channel = self._runs_by_channel(x, g)
        found = torch.empty(samples, self.weights, dtype=g.dtype, device=g.device)
        places = g.shape[2] * g.shape[3]
        parts = slices(
            samples, places * self.weights // self.channels[0] * self._groups * g.element_size()
        )
        for number, (x, g) in enumerate(pairs):
            windows, outs = self._windows(x, g.shape[2:], self._by_channel), self._outs(g)
            for i in parts:
                if number:
                    found[i] += self._product(windows[i], outs[i])
                else:
                    self._product(windows[i], outs[i], found[i])
        return found

    def _lengths(self, x: Tensor, g: Tensor) -> Tensor:
        places = g.shape[2] * g.shape[3]
        self._by_channel = self._runs_by_channel(x, g)
        patches = places * self.weights // self.channels[0] * self._groups
        if self._groups == 1 and 2 * places**2 < self.weights:
            parts = slices(len(x), max(2 * places**2, patches) * g.element_size())
            squares = torch.cat([self._by_places(x[i], g[i]) for i in parts])
        else:
            parts = slices(len(x), max(self.weights, patches) * g.element_size())
            squares = torch.cat([row_squares(self._few(x[i], g[i])) for i in parts])
        most = torch.cat([self._most(x[i], g[i]) for i in parts])

        def plainly(row: int) -> Tensor:
            made: Tensor = self._few(x[row : row + 1].double(), g[row : row + 1].double())
            return made.square().sum()

        return with_digits(squares, most, plainly)

    def _by_places(self, x: Tensor, g: Tensor) -> Tensor:
        grads = _last(g)
        patches = self._copied(self._windows(x, g.shape[2:], by_channel=False)).view(
            len(x), grads.shape[1], -1
        )
        mine, others = (
            torch.bmm(patches, patches.transpose(1, 2)),
            torch.bmm(grads, grads.transpose(1, 2)),
        )
        return (mine * others).sum((1, 2))

    def _most(self, x: Tensor, g: Tensor) -> Tensor:
        """Return the lengths without cancellation: the sum of |patch_t| |g_t| over all places."""
        ones = torch.ones(1, 1, *self.kernel, dtype=x.dtype, device=x.device)
        patches = F.conv2d(
            x.square().sum(1, keepdim=True), ones, stride=self._stride, dilation=self._dilation
        ).clamp_(min=0.0)
        lengths: Tensor = torch.linalg.vector_norm(g, dim=1)
        return (patches[:, 0].sqrt() * lengths).sum((1, 2))

    def _few(self, x: Tensor, g: Tensor) -> Tensor:
        """Return the gradients of some samples, one row each."""
        return self._product(self._windows(x, g.shape[2:], self._by_channel), self._outs(g))

    def _product(self, windows: Tensor, outs: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the product of patches and output gradients, one row per sample."""
        made = (
            torch.empty(outs.shape[0], self.weights, dtype=outs.dtype, device=outs.device)
            if out is None
            else out
        )
        patches = self._copied(windows)
        if self._by_channel:
            outs = outs.reshape(-1, *outs.shape[2:])  # samples * groups
            many, places, each = outs.shape
            torch.bmm(patches.view(many, -1, places), outs, out=made.view(many, -1, each))
        else:
            many, each, places = outs.shape
            torch.bmm(outs, patches.view(many, places, -1), out=made.view(many, each, -1))
        return made

    def _outs(self, g: Tensor) -> Tensor:
        """Return g in the layout that `_product` needs.

        By channel: samples x groups x places x channels of a group.
        Otherwise: samples x channels x places.
        """
        if self._by_channel:
            return (
                _last(g)
                .view(len(g), -1, self._groups, self.channels[0] // self._groups)
                .transpose(1, 2)
            )
        return _last(g).transpose(1, 2)

    def _windows(self, x: Tensor, places: Any, by_channel: bool) -> Tensor:
        """Return a view of the patches, without a copy.

        By channel: samples x patch x places. Otherwise: samples x places x patch.
        """
        samples, channels = x.shape[:2]
        high, wide = places
        (down, right), (far, wider) = self._stride, self._dilation
        s_n, s_c, s_h, s_w = x.stride()
        kh, kw = self.kernel
        if by_channel:
            shape = (samples, channels, kh, kw, high, wide)
            return x.as_strided(
                shape,
                (s_n, s_c, far * s_h, wider * s_w, down * s_h, right * s_w),
                x.storage_offset(),
            )
        shape = (samples, high, wide, kh, kw, channels)
        return x.as_strided(
            shape, (s_n, down * s_h, right * s_w, far * s_h, wider * s_w, s_c), x.storage_offset()
        )

    def _copied(self, windows: Tensor) -> Tensor:
        """Copy a view into contiguous memory, which the next call uses again."""
        count = windows.numel()
        if (
            self._buffer.numel() < count
            or self._buffer.dtype != windows.dtype
            or self._buffer.device != windows.device
        ):
            self._buffer = torch.empty(count, dtype=windows.dtype, device=windows.device)
        return self._buffer[:count].view(windows.shape).copy_(windows)

    def _runs_by_channel(self, x: Tensor, g: Tensor) -> bool:
        """Whether the layout by channel has the longer contiguous runs; groups need it always."""
        return self._groups > 1 or x.shape[1] * self.kernel[1] < g.shape[3]

    def add_up(self, factors: Tensor) -> None:
        if self._bias is not None:
            torch.mv(self._bias.t(), factors, out=self.places["bias"])
        if self._gradients is not None:
            self.places["weight"].copy_(self._as_weight(torch.mv(self._gradients.t(), factors)))
        for x, g in self._calls:
            weighted = g * factors.view(-1, 1, 1, 1)
            weight: Any = self.module.weight
            kernel = weight.view(*self.channels, *self.kernel)
            plain = torch.ops.aten.convolution_backward(
                weighted, x, kernel, None, list(self._stride), [0, 0], list(self._dilation),
                False, [0, 0], self._groups, [False, True, False],
            )[1]  # fmt: skip
            self.places["weight"].copy_(plain.reshape(weight.shape))

    def _as_weight(self, flat: Tensor) -> Tensor:
        """Return a flat gradient in the shape of the layer's weight."""
        out, into = self.channels
        kh, kw = self.kernel
        if self._by_channel:
            groups = self._groups
            weight = (
                flat.view(groups, into, kh, kw, out // groups)
                .permute(0, 4, 1, 2, 3)
                .reshape(out, into, kh, kw)
            )
        else:
            weight = flat.view(out, kh, kw, into).permute(0, 3, 1, 2)
        return weight if self.places["weight"].dim() == 4 else weight[:, :, 0]

    def forget(self) -> None:
        self._gradients = self._bias = None
        self._calls = []

    def _padded(self, x: Tensor) -> Tensor:
        """Return the input with the layer's padding, in the memory format that patches need."""
        module: Any = self.module
        if any(module._reversed_padding_repeated_twice):
            mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
            x = F.pad(x, module._reversed_padding_repeated_twice, mode=mode)
        if x.dim() == 3:
            return x.unsqueeze(2)
        many = x.shape[1] > 1 and self._groups == 1
        return x.contiguous(memory_format=torch.channels_last) if many else x

    def _flat(self, g: Tensor | None) -> Tensor:
        assert g is not None
        return g.unsqueeze(2) if g.dim() == 3 else g


def _pair(given: tuple[int, ...]) -> tuple[int, int]:
    return (1, given[0]) if len(given) == 1 else (given[0], given[1])


def _last(g: Tensor) -> Tensor:
    """Return g as samples x places x channels."""
    return g.permute(0, 2, 3, 1).reshape(g.shape[0], -1, g.shape[1])
