"""Weights that are split: which part of each layer a worker has, and what the workers exchange."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from torch import nn

from paceline.collectives.base import schedule_of
from paceline.collectives.cost import sent_shares
from paceline.collectives.draw.frames import counted
from paceline.errors import BadRequest
from paceline.models.transformer import Block
from paceline.parallel.draw.built import NUMBER_BYTES, Built, kind_of, needs_gradients, size_words
from paceline.parallel.draw.scene import Table
from paceline.parallel.rows import even
from paceline.parallel.tensor import Role, TensorForm, roles_of

MOST_WORKERS = 16
MOST_LAYERS = 120
ROLES: dict[Role, str] = {
    "outputs": "by outputs",
    "inputs": "by inputs",
    "stacked": "by outputs",
    "along": "on its part",
    "whole": "whole",
}


@dataclass(frozen=True)
class Exchange:
    """What the workers exchange for one sample: a sum, or parts that each worker stacks."""

    how: str  # "sum" or "stack"
    numbers: int  # of the whole tensor
    workers: int

    @property
    def size_bytes(self) -> int:
        return self.numbers * NUMBER_BYTES

    @property
    def sent_bytes(self) -> float:
        """What the busiest worker sends: sums go around a ring, parts to every other worker."""
        if self.how == "sum":
            return max(sent_shares(schedule_of("ring", self.workers))) * self.size_bytes
        largest = max(high - low for low, high in even(self.numbers, self.workers))
        return float(largest * NUMBER_BYTES * (self.workers - 1))

    @property
    def words(self) -> str:
        return f"{self.how} {self.numbers:,} numbers, {size_words(self.size_bytes)}"

    @property
    def short(self) -> str:
        return f"{self.how} {size_words(self.size_bytes)}"


@dataclass(frozen=True)
class Part:
    """One layer: how it is split, and its exchanges for one sample."""

    layer: str
    kind: str
    role: Role
    weights: int  # of the whole layer
    held: int  # by worker 0
    forward: Exchange | None = None  # of its output
    backward: Exchange | None = None  # of the gradient of its input
    heads: bool = False  # whether it is split by heads of attention

    @property
    def split(self) -> str:
        return ROLES[self.role] + (" (heads)" if self.heads else "")


def parts(built: Built, workers: int) -> tuple[Part, ...]:
    """What becomes of each layer of a model."""
    if workers > MOST_WORKERS:
        raise BadRequest(f"--workers {workers}: up to {MOST_WORKERS} workers can be drawn legibly")
    TensorForm().check(built.model, workers)
    roles = roles_of(built.layers, workers)
    back, features = needs_gradients(built.model), 1
    made: list[Part] = []
    for layer, role in zip(built.layers, roles, strict=True):
        if role == "block":
            assert isinstance(layer.module, Block)
            made += _block(built, layer.name, layer.module, workers)
            continue
        if role in ("outputs", "stacked"):
            features = _features(layer.module)
        needed = back[layer.name]
        made.append(_part(built, layer.name, layer.module, role, features, workers, needed))
    if len(made) > MOST_LAYERS:
        raise BadRequest(
            f"{built.name} has {len(made)} layers: up to {MOST_LAYERS} can be drawn legibly"
        )
    return tuple(made)


def _part(
    built: Built, name: str, module: nn.Module, role: Role, features: int, workers: int, back: bool
) -> Part:
    """A layer; `features` are those that are split over the workers."""
    given, out = (prod(shape) for shape in built.shapes[name])
    weights = sum(p.numel() for p in module.parameters())
    forward = backward = None
    if role == "inputs":
        forward = Exchange("sum", out, workers)
    if role == "stacked":
        forward = Exchange("stack", out, workers)
    if role in ("outputs", "stacked") and back and not isinstance(module, nn.Embedding):
        backward = Exchange("sum", given, workers)
    if workers == 1:
        forward = backward = None
    held = _held(module, role, features, workers)
    return Part(name, _described(module), role, weights, held, forward, backward)


def _block(built: Built, name: str, block: Block, workers: int) -> Iterator[Part]:
    """Attention by heads, and the two layers after it by outputs and by inputs."""
    roles: dict[str, Role] = {
        "norm1": "whole", "attention.qkv": "outputs", "attention.out": "inputs", "norm2": "whole",
        "mlp.0": "outputs", "mlp.1": "along", "mlp.2": "inputs",
    }  # fmt: skip
    for own, role in roles.items():
        module, heads = block.get_submodule(own), own.startswith("attention")
        features = block.attention.heads if heads else _features(block.mlp[0])
        part = _part(built, f"{name}.{own}", module, role, features, workers, True)
        yield replace(part, heads=heads)


def _held(module: nn.Module, role: Role, features: int, workers: int) -> int:
    """The weights of a layer that worker 0 has, if it has its part of so many features."""
    sizes = {name: p.numel() for name, p in module.named_parameters()}
    if role == "whole" or not sizes:
        return sum(sizes.values())
    whole = sizes.pop("bias", 0) if role == "inputs" else 0  # the bias is added to the sum
    return sum(sizes.values()) * even(features, workers)[0][1] // features + whole


def _features(module: nn.Module) -> int:
    """How many outputs a layer has that is split by outputs."""
    names = ("out_features", "out_channels", "embedding_dim")
    return int(next(getattr(module, name) for name in names if hasattr(module, name)))


def _described(module: nn.Module) -> str:
    if isinstance(module, nn.Linear):
        return f"Linear {module.in_features}->{module.out_features}"
    if isinstance(module, nn.Conv2d):
        return f"{kind_of(module)}, {module.in_channels}->{module.out_channels}"
    return kind_of(module)


def table(built: Built, found: tuple[Part, ...], workers: int) -> Table:
    """Splits and exchanges by layer."""
    lines: list[tuple[str, ...]] = [
        (p.layer, p.kind, p.split, p.forward.short if p.forward else "",
         p.backward.short if p.backward else "")
        for p in found
    ]  # fmt: skip
    sizes, sent = [], []
    for exchanges in ([p.forward for p in found], [p.backward for p in found]):
        sizes.append(sum(e.size_bytes for e in exchanges if e))
        sent.append(sum(e.sent_bytes for e in exchanges if e))
    lines.append(("all", "", "", *map(size_words, sizes)))
    held, total = sum(p.held for p in found), sum(p.weights for p in found)
    return Table(
        ("layer", "kind", "split", "forward", "backward"),
        tuple(lines),
        "forward, backward: what the workers exchange for one sample. If sums go around a ring, a"
        f" worker sends {size_words(sent[0])} forward and {size_words(sent[1])} backward."
        f" Worker 0 has {held:,} of {total:,} weights.",
        f"How {built.title} is split over {counted(workers, 'worker')}",
        words=5,
    )
