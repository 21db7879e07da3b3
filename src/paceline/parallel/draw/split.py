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
    back = needs_gradients(built.model)
    made: list[Part] = []
    for layer, role in zip(built.layers, roles, strict=True):
        if role == "block":
            assert isinstance(layer.module, Block)
            made += _block(built, layer.name, layer.module, workers)
        else:
            needed = back[layer.name]
            made.append(_part(built, layer.name, layer.module, role, workers, needed))
    if len(made) > MOST_LAYERS:
        raise BadRequest(
            f"{built.name} has {len(made)} layers: up to {MOST_LAYERS} can be drawn legibly"
        )
    return tuple(made)


def _part(
    built: Built, name: str, module: nn.Module, role: Role, workers: int, back: bool = True
) -> Part:
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
    return Part(name, _described(module), role, weights, _held(module, role, workers), forward,
                backward)  # fmt: skip


def _block(built: Built, name: str, block: Block, workers: int) -> Iterator[Part]:
    """Attention by heads, and the two layers after it by outputs and by inputs."""
    roles: dict[str, Role] = {
        "norm1": "whole", "attention.qkv": "outputs", "attention.out": "inputs", "norm2": "whole",
        "mlp.0": "outputs", "mlp.1": "along", "mlp.2": "inputs",
    }  # fmt: skip
    for own, role in roles.items():
        module = block.get_submodule(own)
        part = _part(built, f"{name}.{own}", module, role, workers)
        if own.startswith("attention"):
            heads = block.attention.heads
            share = even(heads, workers)[0][1] / heads
            weight, bias = (p.numel() for p in module.parameters())
            held = round(weight * share + bias * (share if role == "outputs" else 1))
            part = replace(part, held=held, heads=True)
        yield part


def _held(module: nn.Module, role: Role, workers: int) -> int:
    """The weights of a layer that worker 0 has."""
    total = sum(p.numel() for p in module.parameters())
    if role == "whole" or not total:
        return total
    if role == "inputs":
        weight = module.weight
        bias = total - weight.numel()  # type: ignore[union-attr,operator]
        count = weight.shape[1]  # type: ignore[union-attr,index]
        return int((total - bias) * even(count, workers)[0][1] // count) + bias
    dim = 1 if isinstance(module, nn.Embedding) else 0
    count = module.weight.shape[dim]  # type: ignore[union-attr,index]
    return int(total * even(count, workers)[0][1] // count)


def _described(module: nn.Module) -> str:
    if isinstance(module, nn.Linear):
        return f"Linear {module.in_features} -> {module.out_features}"
    if isinstance(module, nn.Conv2d):
        return f"{kind_of(module)}, {module.in_channels} -> {module.out_channels}"
    return kind_of(module)


def table(built: Built, found: tuple[Part, ...], workers: int) -> Table:
    """Splits and exchanges by layer."""
    lines = [
        (p.layer, p.kind, p.split, p.forward.words if p.forward else "",
         p.backward.words if p.backward else "")
        for p in found
    ]  # fmt: skip
    sizes, sent = [], []
    for exchanges in ([p.forward for p in found], [p.backward for p in found]):
        sizes.append(sum(e.size_bytes for e in exchanges if e))
        sent.append(sum(e.sent_bytes for e in exchanges if e))
    lines.append(("all", "", "", *map(size_words, sizes)))
    held, total = sum(p.held for p in found), sum(p.weights for p in found)
    return Table(
        ("layer", "kind", "split", "forward exchange", "backward exchange"),
        tuple(lines),
        f"Bytes are those of one sample. If sums go around a ring, a worker sends"
        f" {size_words(sent[0])} forward and {size_words(sent[1])} backward per sample."
        f" Worker 0 has {held:,} of {total:,} weights.",
        f"How {built.title} is split over {counted(workers, 'worker')}",
        words=5,
    )
