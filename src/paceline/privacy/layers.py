"""Rules by which layers measure and sum the gradients of samples without computing each of them.

From a layer's inputs `a` and the gradients `g` of its outputs follow the length of each sample's
gradient G_i, and afterwards the weighted sum of all:

    Linear      |G_i|^2 = |g_i|^2 (|a_i|^2 + 1)           sum_i c_i G_i = (c g)^T a
                with T places in a sequence: |G_i|^2 = sum over s, t of (a_s . a_t)(g_s . g_t)
    Embedding   the same, where a_s . a_t is 1 for the same word and 0 otherwise
    norms       G_i = sum over places of g * normalised a; one number per channel, so it is kept

(Goodfellow, 2015; Li et al., "Large Language Models Can Be Strong Differentially Private Learners",
2022; Bu et al., "Differentially Private Optimization on Large Foundation Models at Small Cost",
2023.) Convolutions are in convolution.py, everything else in anything.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.errors import BadRequest
from paceline.privacy.native import loops_for

# A squared length below this share of its largest possible value has lost its digits.
CANCELLED = 1e-3
CHUNK_BYTES = 2 << 20  # temporary memory while lengths are measured


class Call:
    """One use of a layer in a forward pass: its inputs, and the gradient of its output."""

    __slots__ = ("_versions", "grads", "input", "inputs", "named", "which")

    def __init__(self, inputs: tuple[Any, ...], named: dict[str, Any], which: int | None) -> None:
        self.inputs, self.named = inputs, named
        self.which = which  # the place of the tensor among several outputs; None: one output
        self.input: Any = inputs[0] if inputs else next(iter(named.values()), None)
        self._versions = [
            (v, v._version) for v in (*inputs, *named.values()) if isinstance(v, Tensor)
        ]
        self.grads: Tensor | None = None

    @property
    def was_changed(self) -> bool:
        """Whether an input was changed in place since the layer used it."""
        return any(tensor._version != version for tensor, version in self._versions)


class Booked(ABC):
    """A layer's rule. `places` says, by parameter name, where the sum of the gradients goes."""

    def __init__(self, name: str, module: nn.Module, places: Mapping[str, Tensor]) -> None:
        self.name, self.module, self.places = name, module, dict(places)

    @abstractmethod
    def book(self, calls: list[Call]) -> Tensor:
        """Return the squared length of each sample's gradient, and keep what `add_up` needs."""

    @abstractmethod
    def add_up(self, factors: Tensor) -> None:
        """Set places <- sum_i factors_i G_i."""

    @abstractmethod
    def forget(self) -> None:
        """Drop what was kept for this step."""

    def skip(self) -> None:
        """Set the sums to 0: the layer had no part in this step."""
        for place in self.places.values():
            place.zero_()


class Linear(Booked):
    """A linear layer; it never holds one gradient per sample."""

    _a: Tensor | None = None
    _g: Tensor | None = None

    def book(self, calls: list[Call]) -> Tensor:
        a, g = calls[0].input, calls[0].grads
        assert g is not None
        weight: Any = self.module.weight
        # The loops in C do not check shapes.
        if a.shape[:-1] != g.shape[:-1] or g.shape[-1] != weight.shape[0]:
            raise BadRequest(
                f"privacy: a hook changes the shape of the output of layer {self.name}: use"
                " clipping=loop"
            )
        if len(calls) == 1 and a.dim() == 2:
            self._a, self._g = a, g
            if "weight" not in self.places:
                return row_squares(g)
            if (quick := loops_for(a, g)) is not None:
                rows, out = g.shape
                squares, bias = torch.empty(rows, dtype=g.dtype), float("bias" in self.places)
                quick.linear_squares(
                    a.data_ptr(), g.data_ptr(), rows, a.shape[1], out, bias, squares.data_ptr()
                )
                return squares
            squares = row_squares(g)
            own = row_squares(a)
            return (
                torch.addcmul(squares, squares, own) if "bias" in self.places else squares.mul_(own)
            )
        self._a, self._g = a, g = joined([c.input for c in calls]), joined([c.grads for c in calls])
        squares = sequence_squares(a, g) if "weight" in self.places else g.new_zeros(len(g))
        return squares.add_(g.sum(1).square().sum(1)) if "bias" in self.places else squares

    def add_up(self, factors: Tensor) -> None:
        assert self._a is not None
        assert self._g is not None
        a, g = self._a, self._g
        if g.dim() == 3:
            factors = factors.repeat_interleave(g.shape[1])
            a, g = a.reshape(-1, a.shape[-1]), g.reshape(-1, g.shape[-1])
        if "weight" not in self.places:
            torch.mv(g.t(), factors, out=self.places["bias"])
            return
        sums = self.places.get("bias")
        if (quick := loops_for(g, factors)) is not None:
            rows, out = g.shape
            weighted = torch.empty(rows, out, dtype=g.dtype)
            sums = torch.empty(out, dtype=g.dtype) if sums is None else sums
            quick.weigh_rows(
                g.data_ptr(), factors.data_ptr(), rows, out, weighted.data_ptr(), sums.data_ptr()
            )
        else:
            weighted = g * factors.unsqueeze(1)
            if sums is not None:
                torch.sum(weighted, 0, out=sums)
        torch.mm(weighted.t(), a, out=self.places["weight"])

    def forget(self) -> None:
        self._a = self._g = None


class Embedding(Booked):
    """An embedding; a sample's gradient has one row for each of its words."""

    _words: Tensor | None = None
    _g: Tensor | None = None

    def book(self, calls: list[Call]) -> Tensor:
        words = torch.cat([c.input.reshape(len(c.input), -1) for c in calls], 1)
        g = torch.cat([_sequence(c.grads, 1) for c in calls], 1)
        padding: Any = self.module.padding_idx
        if padding is not None:
            g = g.masked_fill(torch.eq(words, int(padding)).unsqueeze(-1), 0.0)
        self._words, self._g = words, g
        parts = slices(len(g), g.shape[1] ** 2 * g.element_size())
        squares = torch.cat([self._squares(words[i], g[i]) for i in parts])
        return with_digits(
            squares,
            torch.linalg.vector_norm(g, dim=2).sum(1),
            lambda row: self._plainly(words[row], g[row]),
        )

    def _squares(self, words: Tensor, g: Tensor) -> Tensor:
        same = torch.eq(words.unsqueeze(1), words.unsqueeze(2))
        return (torch.bmm(g, g.transpose(1, 2)) * same).sum((1, 2))

    def _plainly(self, words: Tensor, g: Tensor) -> Tensor:
        """Return one sample's squared length from its gradient, in double precision."""
        different, which = words.unique(return_inverse=True)
        rows = torch.zeros(len(different), g.shape[1], dtype=torch.float64, device=g.device)
        return rows.index_add_(0, which, g.double()).square().sum()

    def add_up(self, factors: Tensor) -> None:
        assert self._words is not None
        assert self._g is not None
        weighted = self._g * factors.view(-1, 1, 1)
        place = self.places["weight"].zero_()
        place.index_add_(0, self._words.reshape(-1), weighted.reshape(-1, weighted.shape[-1]))

    def forget(self) -> None:
        self._words = self._g = None


class Kept(Booked):
    """A layer with so few parameters that the gradients of all samples are kept."""

    def __init__(self, name: str, module: nn.Module, places: Mapping[str, Tensor]) -> None:
        super().__init__(name, module, places)
        self._kept: dict[str, Tensor] = {}

    @abstractmethod
    def gradients(self, call: Call) -> dict[str, Tensor]:
        """Return one gradient per sample, by parameter."""

    def book(self, calls: list[Call]) -> Tensor:
        for call in calls:
            for name, gradients in self.gradients(call).items():
                self._kept[name] = self._kept[name] + gradients if name in self._kept else gradients
        return torch.stack(
            [g.reshape(len(g), -1).square().sum(1) for g in self._kept.values()]
        ).sum(0)

    def add_up(self, factors: Tensor) -> None:
        for name, gradients in self._kept.items():
            self.places[name].copy_(torch.tensordot(factors, gradients, 1))

    def forget(self) -> None:
        self._kept = {}


class Normalising(Kept):
    """The scale and shift of LayerNorm and GroupNorm."""

    def gradients(self, call: Call) -> dict[str, Tensor]:
        g, found = call.grads, {}
        assert g is not None
        for name in self.places:
            found[name] = self._over_places(
                g if name == "bias" else g * self._normalised(call.input)
            )
        return found

    def _normalised(self, a: Tensor) -> Tensor:
        module: Any = self.module
        if isinstance(module, nn.LayerNorm):
            return F.layer_norm(a, module.normalized_shape, None, None, module.eps)
        return F.group_norm(a, module.num_groups, None, None, module.eps)

    def _over_places(self, g: Tensor) -> Tensor:
        if isinstance(self.module, nn.LayerNorm):
            between = g.dim() - len(self.module.normalized_shape)
            return g.flatten(1, between - 1).sum(1) if between > 1 else g
        return g.flatten(2).sum(2) if g.dim() > 2 else g


def row_squares(rows: Tensor) -> Tensor:
    """Return the squared length of each row."""
    if (quick := loops_for(rows, rows)) is not None:
        count, width = rows.shape
        squares = torch.empty(count, dtype=rows.dtype)
        quick.row_squares(rows.data_ptr(), count, width, squares.data_ptr())
        return squares
    lengths: Tensor = torch.linalg.vector_norm(rows, 2, 1)
    return lengths.square_()


def sequence_squares(a: Tensor, g: Tensor) -> Tensor:
    """Return the squared lengths of gradients that are sums of T outer products.

    It uses two T x T matrices per sample where those are smaller than a gradient, and gradients
    otherwise. It takes a few samples at a time, so it never holds the gradients of all samples.
    """
    places, weights = a.shape[1], a.shape[2] * g.shape[2]
    size = a.element_size()
    if 2 * places**2 < weights:
        parts = slices(len(a), 2 * places**2 * size)
        found = [
            (torch.bmm(a[i], a[i].transpose(1, 2)) * torch.bmm(g[i], g[i].transpose(1, 2))).sum(
                (1, 2)
            )
            for i in parts
        ]
    else:
        parts = slices(len(a), weights * size)
        found = [torch.bmm(g[i].transpose(1, 2), a[i]).square().sum((1, 2)) for i in parts]
    most = (torch.linalg.vector_norm(a, dim=2) * torch.linalg.vector_norm(g, dim=2)).sum(1)
    return with_digits(
        torch.cat(found),
        most,
        lambda row: torch.mm(g[row].double().t(), a[row].double()).square().sum(),
    )


def with_digits(squares: Tensor, most: Tensor, plainly: Callable[[int], Tensor]) -> Tensor:
    """Measure again, in double precision, the squared lengths that have lost their digits.

    That happens where nearly everything cancels, and a length that is too small would clip too
    little. The largest rounding error of the later sum is added. `most` is the length without
    cancellation.
    """
    lost = ~(squares > CANCELLED * most.square()) & (most > 0)
    if bool(lost.any()):
        rounding = 8 * torch.finfo(squares.dtype).eps
        for row in lost.nonzero().flatten().tolist():
            squares[row] = (
                (plainly(row).sqrt() + rounding * most[row].double()).square().to(squares.dtype)
            )
    return squares


def slices(samples: int, bytes_each: int) -> list[slice]:
    """Divide the samples so that each slice needs at most about CHUNK_BYTES."""
    step = max(1, CHUNK_BYTES // max(1, bytes_each))
    return [slice(i, i + step) for i in range(0, samples, step)]


def _sequence(tensor: Any, keep: int) -> Tensor:
    """Return the tensor as samples x places x its last dimensions."""
    return tensor.reshape(len(tensor), -1, *tensor.shape[tensor.dim() - keep :])  # type: ignore[no-any-return]


def joined(tensors: list[Any]) -> Tensor:
    """Join the uses of a layer to one longer sequence."""
    return (
        torch.cat([_sequence(t, 1) for t in tensors], 1)
        if len(tensors) > 1
        else _sequence(tensors[0], 1)
    )


def uses_its_own_forward(module: nn.Module, kind: type[nn.Module]) -> bool:
    return isinstance(module, kind) and type(module).forward is kind.forward


Rule = Callable[[str, nn.Module, Mapping[str, Tensor]], Booked]
SIMPLE: dict[type[nn.Module], Rule] = {
    nn.Linear: Linear,
    nn.Embedding: Embedding,
    nn.LayerNorm: Normalising,
    nn.GroupNorm: Normalising,
}
