"""Split weights (Shoeybi et al., 2019): each worker has some outputs, or some inputs, of a layer.

A layer that is split by outputs gives each worker a part of the features; the next one is split by
inputs, takes that part, and its results are summed. So a pair of layers costs one exchange forward
and one backward. What lies between them (activations, pooling, batch norm, dropout) works on each
part by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from paceline.errors import BadRequest
from paceline.models.transformer import Attention, Block
from paceline.parallel.base import Form, Given, Part
from paceline.parallel.cut import Layer, layers_of
from paceline.parallel.dropout import Place, PlacedDropout, with_placed_dropout
from paceline.parallel.exchange import Exchange
from paceline.parallel.pieces import Piece
from paceline.parallel.rows import Span, even
from paceline.registry import forms

Role = Literal["whole", "outputs", "inputs", "along", "stacked", "block"]
ALONG = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh, nn.Softplus,
    nn.Hardtanh, nn.Identity, nn.Dropout, nn.Dropout2d, PlacedDropout, nn.MaxPool2d, nn.AvgPool2d,
    nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d, nn.BatchNorm1d, nn.BatchNorm2d, nn.Flatten,
)  # fmt: skip
ALONE = 1 << 16  # a layer without a partner is split if it has so many weights


def splittable(module: nn.Module) -> bool:
    if type(module) is nn.Conv2d:
        return module.groups == 1 and module.padding_mode == "zeros"
    return type(module) is nn.Linear


def roles_of(layers: Sequence[Layer], parts: int) -> list[Role]:
    """What becomes of each layer: pairs of layers are split by outputs and by inputs."""
    roles: list[Role] = ["whole"] * len(layers)
    at = 0
    while at < len(layers):
        module = layers[at].module
        if isinstance(module, Block) and module.attention.heads >= parts:
            roles[at] = "block"
        elif type(module) is nn.Embedding and module.embedding_dim >= parts:
            roles[at] = "stacked"
        elif splittable(module) and _outputs(module) >= parts:
            partner = _partner(layers, at)
            if partner is not None:
                roles[at] = "outputs"
                roles[at + 1 : partner] = ["along"] * (partner - at - 1)
                roles[partner] = "inputs"
                at = partner
            elif sum(p.numel() for p in module.parameters()) >= ALONE:
                roles[at] = "stacked"
        at += 1
    return roles


def _outputs(module: nn.Module) -> int:
    return int(getattr(module, "out_features", 0) or getattr(module, "out_channels", 0))


def _partner(layers: Sequence[Layer], at: int) -> int | None:
    """The next layer that can take the parts of this one's outputs as inputs."""
    features = type(layers[at].module) is nn.Linear  # else channels, until they are flattened
    for number in range(at + 1, len(layers)):
        module = layers[number].module
        if splittable(module):
            return number if features == (type(module) is nn.Linear) else None
        if not isinstance(module, ALONG):
            return None
        if isinstance(module, nn.Flatten):
            if features or (module.start_dim, module.end_dim) != (1, -1):
                return None
            features = True
    return None


@forms.register("tensor")
@dataclass
class TensorForm(Form):
    """Weights split by outputs (stacked) or by inputs (summed); two layers cost one exchange."""

    slices = True

    def check(self, model: nn.Module, parts: int) -> None:
        layers = layers_of(model)
        if all(role == "whole" for role in roles_of(layers, parts)):
            kinds = ", ".join(dict.fromkeys(type(layer.module).__name__ for layer in layers))
            raise BadRequest(
                f"tensor splits the weights of Linear, Conv2d, Embedding and transformer blocks;"
                f" none of this model's layers ({kinds}) can be split over {parts} workers"
            )

    def split(self, model: nn.Module, given: Given) -> TensorPart:
        model, place = with_placed_dropout(model, given.seed)
        return TensorPart(model, given, place)


class TensorPart(Part):
    """The whole model with some layers replaced by this rank's part of them."""

    def __init__(self, model: nn.Module, given: Given, place: Place) -> None:
        super().__init__(model, given.group)
        self.place, self._pieces = place, {name: Piece() for name in model.state_dict()}
        layers = layers_of(model)
        self.roles = roles_of(layers, self.size)
        self.exchange = Exchange(given.group)
        channels: tuple[int, tuple[Span, ...]] | None = None  # of the features that are split
        for layer, role in zip(layers, self.roles, strict=True):
            module = layer.module
            if role in ("outputs", "stacked"):
                channels = self._by_outputs(model, layer, role == "stacked")
            elif role == "inputs":
                assert channels is not None
                self._by_inputs(model, layer, channels)
            elif role == "block":
                assert isinstance(module, Block)
                self._block(layer.name, module)
            elif role == "along":
                assert channels is not None
                self._along(layer, channels)

    # --- splitting

    def _by_outputs(
        self, model: nn.Module, layer: Layer, stacked: bool
    ) -> tuple[int, tuple[Span, ...]]:
        module = layer.module
        if isinstance(module, nn.Embedding):
            count, dim = module.embedding_dim, 1
        else:
            count, dim = _outputs(module), 0
        spans = even(count, self.size)
        low, high = spans[self.rank]
        for name in ("weight", "bias"):
            if getattr(module, name, None) is not None:
                along = dim if name == "weight" else 0
                self._take(module, layer.name, name, Piece(along, ((low, high),)))
        _resized(module, outputs=high - low)
        _replace(model, layer.name, Outputs(module, self.exchange, spans if stacked else None))
        return count, spans

    def _by_inputs(
        self, model: nn.Module, layer: Layer, channels: tuple[int, tuple[Span, ...]]
    ) -> None:
        module, (count, spans) = layer.module, channels
        weight: Tensor = module.weight  # type: ignore[assignment]
        times = weight.shape[1] // count  # features of one channel, where channels were flattened
        low, high = (n * times for n in spans[self.rank])
        self._take(module, layer.name, "weight", Piece(1, ((low, high),)))
        _resized(module, inputs=high - low)
        _replace(model, layer.name, Inputs(module, self.exchange))

    def _along(self, layer: Layer, channels: tuple[int, tuple[Span, ...]]) -> None:
        module, (count, spans) = layer.module, channels
        low, high = spans[self.rank]
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)):
            times = module.num_features // count
            piece = Piece(0, ((low * times, high * times),))
            for name in ("weight", "bias", "running_mean", "running_var"):
                if getattr(module, name, None) is not None:
                    self._take(module, layer.name, name, piece)
            module.num_features = (high - low) * times
        elif isinstance(module, PlacedDropout):
            module.cut = (1, low, high - low, count)

    def _block(self, name: str, block: Block) -> None:
        """Attention by heads, the two layers after it by outputs and by inputs."""
        attention = block.attention
        width = attention.heads * attention.each
        first, last = even(attention.heads, self.size)[self.rank]
        low, high = first * attention.each, last * attention.each
        spans = tuple((k * width + low, k * width + high) for k in range(3))
        path = f"{name}.attention"
        for own in ("weight", "bias"):
            self._take(attention.qkv, f"{path}.qkv", own, Piece(0, spans))
        _resized(attention.qkv, outputs=3 * (high - low))
        self._take(attention.out, f"{path}.out", "weight", Piece(1, ((low, high),)))
        _resized(attention.out, inputs=high - low)
        attention.heads = last - first
        _wrap_attention(attention, self.exchange)
        up, down = block.mlp[0], block.mlp[2]
        low, high = even(_outputs(up), self.size)[self.rank]
        for own in ("weight", "bias"):
            self._take(up, f"{name}.mlp.0", own, Piece(0, ((low, high),)))
        self._take(down, f"{name}.mlp.2", "weight", Piece(1, ((low, high),)))
        _resized(up, outputs=high - low)
        _resized(down, inputs=high - low)
        block.mlp[0] = Outputs(up, self.exchange, None)
        block.mlp[2] = Inputs(down, self.exchange)

    def _take(self, module: nn.Module, path: str, name: str, piece: Piece) -> None:
        """Keep only a piece of a parameter or a buffer."""
        whole: Tensor = getattr(module, name)
        own = piece.of(whole.detach()).clone(memory_format=torch.contiguous_format)
        if isinstance(whole, nn.Parameter):
            setattr(module, name, nn.Parameter(own, requires_grad=whole.requires_grad))
        else:
            setattr(module, name, own)
        self._pieces[f"{path}.{name}"] = piece

    # --- as a part

    def begin(self, step: int, first: int) -> None:
        self.place.step, self.place.first = step, first

    def pieces(self) -> Mapping[str, Piece]:
        return self._pieces

    def gives(self, name: str) -> bool:
        return self.rank == 0 or not self._pieces[name].whole

    def norm(self) -> float | None:
        if self.size == 1:
            return None
        return whole_norm(self, self.model.named_parameters())

    def described(self) -> dict[str, Any]:
        return {"split_layers": sum(role not in ("whole", "along") for role in self.roles)}


def whole_norm(part: Part, parameters: Iterable[tuple[str, nn.Parameter]]) -> float:
    """The norm of the whole gradient; what several ranks hold is counted once."""
    assert part.group is not None
    squares = torch.zeros(1, dtype=torch.float64)
    for name, parameter in parameters:
        if parameter.grad is not None and part.gives(name):
            squares += parameter.grad.detach().double().square().sum().cpu()
    part.group.uncounted().control.all_reduce(squares)
    return float(squares.sqrt())


class Outputs(nn.Module):
    """A layer with some of its outputs; `spans`: they are stacked to all of them."""

    def __init__(
        self, layer: nn.Module, exchange: Exchange, spans: tuple[Span, ...] | None
    ) -> None:
        super().__init__()
        self._adopt(layer)
        self.exchange, self.spans = exchange, spans

    def _adopt(self, layer: nn.Module) -> None:
        """The layer's parameters keep their names: `fc.weight`, not `fc.layer.weight`."""
        self.__dict__["layer"] = layer
        self._parameters, self._buffers = layer._parameters, layer._buffers
        self.training = layer.training

    def forward(self, x: Tensor) -> Tensor:
        layer: nn.Module = self.__dict__["layer"]
        x = self.exchange.copied(x) if x.is_floating_point() and x.requires_grad else x
        made: Tensor = layer(x)
        if self.spans is None:
            return made
        dim = 1 if isinstance(layer, nn.Conv2d) else made.dim() - 1
        return self.exchange.stacked(made, dim, self.spans)


class Inputs(Outputs):
    """A layer that takes some of its inputs; the ranks' results are summed, then biased."""

    def __init__(self, layer: nn.Module, exchange: Exchange) -> None:
        super().__init__(layer, exchange, None)

    def forward(self, x: Tensor) -> Tensor:
        layer: Any = self.__dict__["layer"]
        if isinstance(layer, nn.Conv2d):
            made = self.exchange.summed(layer._conv_forward(x, layer.weight, None))
            return made if layer.bias is None else made + layer.bias.view(1, -1, 1, 1)
        made = self.exchange.summed(nn.functional.linear(x, layer.weight))
        return made if layer.bias is None else made + layer.bias


def _wrap_attention(attention: Attention, exchange: Exchange) -> None:
    attention.qkv = Outputs(attention.qkv, exchange, None)  # type: ignore[assignment]
    attention.out = Inputs(attention.out, exchange)  # type: ignore[assignment]


def _resized(module: nn.Module, outputs: int | None = None, inputs: int | None = None) -> None:
    """Let a layer's own numbers, which people print, fit its part."""
    for count, names in (
        (outputs, ("out_features", "out_channels", "embedding_dim")),
        (inputs, ("in_features", "in_channels")),
    ):
        for name in names:
            if count is not None and hasattr(module, name):
                setattr(module, name, count)


def _replace(model: nn.Module, path: str, made: nn.Module) -> None:
    *outer, last = path.split(".")
    setattr(model.get_submodule(".".join(outer)), last, made)
