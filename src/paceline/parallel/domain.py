"""Split images: each worker has some rows of every image (Dryden et al., 2019).

Convolutions and pooling need rows of their neighbours: rows.py says which, and each layer fetches
them. The model's first layer that is no image layer begins its head. The head gets whole images,
and all workers compute it. After the backward pass the gradients of the image layers are summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline.errors import BadRequest
from paceline.models.resnet import Bottleneck
from paceline.parallel.base import Form, Given, Part
from paceline.parallel.cut import Layer, layers_of
from paceline.parallel.dropout import Place, PlacedDropout, with_placed_dropout
from paceline.parallel.exchange import Exchange
from paceline.parallel.rows import Halo, Window, even, halo
from paceline.parallel.shapes import shapes_of
from paceline.registry import forms

POINTWISE = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh, nn.Softplus,
    nn.Hardtanh, nn.Identity, nn.Dropout, nn.Dropout2d, PlacedDropout,
)  # fmt: skip
BLOCKS = (Bottleneck,)  # modules of several layers, all of which work on rows


def why_not(module: nn.Module) -> str | None:
    """Why a layer cannot work on some rows of an image; None: it can."""
    if isinstance(module, POINTWISE):
        return None
    if isinstance(module, BLOCKS):
        reasons = (why_not(m) for m in module.modules() if not list(m.children()))
        return next((r for r in reasons if r is not None), None)
    if type(module) is nn.Conv2d:
        if module.padding_mode != "zeros":
            return f"padding_mode={module.padding_mode}"
        return "padding by name" if isinstance(module.padding, str) else None
    if type(module) is nn.MaxPool2d:
        return "return_indices" if module.return_indices else None
    if type(module) is nn.AvgPool2d:
        uneven = module.ceil_mode or module.divisor_override is not None
        padded = bool(_first(module.padding)) and not module.count_include_pad
        return "an average over fewer pixels at the edge" if uneven or padded else None
    if type(module) is nn.BatchNorm2d:
        return None
    return f"{type(module).__name__} is no layer of images"


def window_of(module: nn.Module) -> Window | None:
    """How a layer looks at rows; None: at each row by itself."""
    if type(module) not in (nn.Conv2d, nn.MaxPool2d, nn.AvgPool2d):
        return None
    numbers = [
        _first(getattr(module, name, 1) or 1) for name in ("kernel_size", "stride", "dilation")
    ]
    kernel, stride, dilation = numbers
    padding = _first(getattr(module, "padding", 0))
    return Window(kernel, stride, padding, dilation, bool(getattr(module, "ceil_mode", False)))


def _first(value: Any) -> int:
    return int(value[0] if isinstance(value, (tuple, list)) else value)


@forms.register("domain")
@dataclass
class Domain(Form):
    """Each worker has some rows of every image; neighbours send the rows at the borders."""

    def check(self, model: nn.Module, parts: int) -> None:
        layers = layers_of(model)
        first = layers[0].module if layers else model
        if not layers or (reason := why_not(first)) is not None:
            raise BadRequest(f"domain splits images, and the model's first layer cannot: {reason}")
        if not any(type(m) is nn.Conv2d for layer in layers for m in layer.module.modules()):
            raise BadRequest("domain splits the images of convolutions, and the model has none")

    def split(self, model: nn.Module, given: Given) -> DomainPart:
        model, place = with_placed_dropout(model, given.seed)
        return DomainPart(model, given, place)


@dataclass(frozen=True)
class Step:
    """One layer that moves rows: for `paceline explain`, for the plan, and to be run."""

    layer: str
    window: Window
    rows: int  # of its input
    movement: Halo


def heights_of(model: nn.Module, layers: Sequence[Layer], inputs: Any) -> dict[str, int]:
    """The rows of each module's input, by running the model once on a sample."""
    shapes = shapes_of(model, inputs[:1])
    return {name: given[2] for name, (given, _) in shapes.items() if len(given) == 4}


def steps_of(
    model: nn.Module, layers: Sequence[Layer], heights: dict[str, int], parts: int
) -> tuple[int, list[Step]]:
    """How many layers work on rows, and the movements before them.

    A layer whose rows are too few for the workers begins the head, as one that is no image layer.
    """
    steps: list[Step] = []
    for number, layer in enumerate(layers):
        if why_not(layer.module) is not None or heights.get(layer.name, 0) < parts:
            return number, steps
        own: list[Step] = []
        for name, module in layer.module.named_modules(prefix=layer.name):
            window = window_of(module)
            if window is None:
                continue
            rows = heights[name]
            outputs = window.outputs(rows)
            if outputs < parts:
                return number, steps
            needed = [window.needs(span, rows) for span in even(outputs, parts)]
            own.append(Step(name, window, rows, halo(even(rows, parts), needed)))
        steps += own
    return len(layers), steps


class DomainPart(Part):
    """The whole model; its image layers work on this rank's rows."""

    def __init__(self, model: nn.Module, given: Given, place: Place) -> None:
        super().__init__(model, given.group)
        self.place, self.exchange = place, Exchange(given.group)
        inputs = given.inputs
        if not isinstance(inputs, Tensor) or inputs.dim() != 4:
            raise BadRequest("domain splits images: samples x channels x height x width")
        layers = layers_of(model)
        heights = heights_of(model, layers, inputs)
        self.trunk, self.steps = steps_of(model, layers, heights, self.size)
        if self.size > 1 and not self.steps:
            raise BadRequest(
                f"domain: the first layer's {heights.get(layers[0].name, 0)} rows cannot be split"
                f" over {self.size} workers"
            )
        self.rows = even(inputs.shape[2], self.size)
        self._names = [
            f"{layer.name}.{name}"
            for layer in layers[: self.trunk]
            for name, _ in layer.module.named_parameters()
        ]
        if self.size > 1:
            self._split(model, layers, heights)

    def _split(self, model: nn.Module, layers: Sequence[Layer], heights: dict[str, int]) -> None:
        """Put layers that fetch rows in place of the image layers."""
        by_name = {step.layer: step for step in self.steps}
        for layer in layers[: self.trunk]:
            for name, module in list(layer.module.named_modules(prefix=layer.name)):
                step, rows = by_name.get(name), heights.get(name, 0)
                if step is not None:
                    _fetch_rows(module, self.exchange, step, self.rank)
                elif type(module) is nn.BatchNorm2d:
                    _over_all_rows(module, self.exchange, rows)
                elif isinstance(module, PlacedDropout):
                    low, high = even(rows, self.size)[self.rank]
                    module.cut = (2, low, high - low, rows)
        low, high = self.rows[self.rank]
        first = layers[0].module
        whole_rows = self.rows[-1][1]

        def enter(_: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
            x = given[0]
            if x.shape[2] != whole_rows:
                raise BadRequest(
                    f"domain: images of {whole_rows} rows were split, and this one has {x.shape[2]}"
                )
            return (x[:, :, low:high], *given[1:])

        first.register_forward_pre_hook(enter)
        last = layers[self.trunk - 1].module

        def leave(_: nn.Module, given: Any, made: Tensor) -> Tensor:
            spans = even(self._out_rows, self.size)
            return self.exchange.stacked(made, 2, spans)

        step = self.steps[-1]
        self._out_rows = heights_after(layers, self.trunk, heights, step)
        last.register_forward_hook(leave)

    def begin(self, step: int, first: int) -> None:
        self.place.step, self.place.first = step, first

    def complete(self) -> int:
        """Sum the gradients of the image layers over the workers of this copy, packed together."""
        if self.size == 1:
            return 0
        before = self._sent()
        found = dict(self.model.named_parameters())
        own = [g for n in self._names if n in found and (g := found[n].grad) is not None]
        kinds = dict.fromkeys((g.dtype, g.device) for g in own)
        for kind in kinds:
            same = [g for g in own if (g.dtype, g.device) == kind]
            total = self.exchange.all_reduce(torch.cat([g.reshape(-1) for g in same]))
            for gradient, part in zip(same, total.split([g.numel() for g in same]), strict=True):
                gradient.copy_(part.view_as(gradient))
        return self._sent() - before

    def _sent(self) -> int:
        counted = self.exchange.group.counted("train")
        return 0 if counted is None else int(counted.sent_bytes)

    def gives(self, name: str) -> bool:
        return self.rank == 0

    def described(self) -> dict[str, Any]:
        return {
            "image_layers": self.trunk,
            "halo_rows": sum(step.movement.sent(self.rank) for step in self.steps),
        }


def heights_after(layers: Sequence[Layer], trunk: int, heights: dict[str, int], last: Step) -> int:
    """The rows of the last image layer's output."""
    if trunk < len(layers) and layers[trunk].name in heights:
        return heights[layers[trunk].name]
    return last.window.outputs(last.rows)


def _fetch_rows(module: nn.Module, exchange: Exchange, step: Step, rank: int) -> None:
    """Make a convolution or a pooling fetch the rows that it needs before it computes."""
    made = even(step.window.outputs(step.rows), exchange.group.size)[rank]
    (low, high), (first, last) = step.movement.held[rank], step.window.looked_at(made)
    above, below = low - first, last - high
    plain: Any = module
    side = plain.padding[1] if isinstance(plain.padding, tuple) else plain.padding
    empty = float("-inf") if isinstance(module, nn.MaxPool2d) else 0.0

    def forward(x: Tensor) -> Tensor:
        x = exchange.moved(x, step.movement)
        if above or below:
            x = functional.pad(x, (0, 0, above, below), value=empty)
        if isinstance(module, nn.Conv2d):
            return functional.conv2d(
                x, module.weight, module.bias, module.stride, (0, side), module.dilation,
                module.groups,
            )  # fmt: skip
        if isinstance(module, nn.MaxPool2d):
            return functional.max_pool2d(
                x, module.kernel_size, module.stride, (0, side), module.dilation, module.ceil_mode
            )
        return functional.avg_pool2d(
            x, plain.kernel_size, plain.stride, (0, side), False, plain.count_include_pad
        )

    module.__dict__["forward"] = forward


def _over_all_rows(module: nn.BatchNorm2d, exchange: Exchange, rows: int) -> None:
    """Make batch norm use the statistics of whole images."""
    group = exchange.group

    def forward(x: Tensor) -> Tensor:
        if not module.training and module.running_mean is not None:
            return functional.batch_norm(
                x, module.running_mean, module.running_var, module.weight, module.bias, False, 0.0,
                module.eps,
            )  # fmt: skip
        count = x.shape[0] * rows * x.shape[3]
        mean = exchange.over_all(x.sum((0, 2, 3))) / count
        centred = x - mean.view(1, -1, 1, 1)
        variance = exchange.over_all(centred.square().sum((0, 2, 3))) / count
        if module.training and module.track_running_stats and module.running_mean is not None:
            with torch.no_grad():
                assert module.num_batches_tracked is not None
                module.num_batches_tracked.add_(1)
                momentum = module.momentum
                if momentum is None:
                    momentum = 1.0 / float(module.num_batches_tracked)
                module.running_mean.lerp_(mean.detach(), momentum)
                assert module.running_var is not None
                unbiased = variance.detach() * (count / max(1, count - 1))
                module.running_var.lerp_(unbiased, momentum)
        made = centred * (variance + module.eps).rsqrt().view(1, -1, 1, 1)
        if module.weight is not None:
            made = made * module.weight.view(1, -1, 1, 1)
        if module.bias is not None:
            made = made + module.bias.view(1, -1, 1, 1)
        return made

    assert group.size > 1
    module.__dict__["forward"] = forward
