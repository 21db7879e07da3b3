"""What a data source gives: samples that can be indexed by batch, held once per host."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.errors import BadRequest, DataCorrupt


class Samples(Protocol):
    """Samples that any worker can index."""

    def __len__(self) -> int: ...
    def batch(self, indices: Tensor) -> tuple[Any, Any]: ...
    def labels(self) -> Tensor | None: ...


@dataclass(frozen=True)
class Scale:
    """Bytes to numbers, per channel: (x / 255 - mean) / std."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, images: Tensor) -> Tensor:
        shape = (-1, *([1] * (images.dim() - 2)))
        factor = torch.tensor([1 / (255 * s) for s in self.std]).view(shape)
        offset = torch.tensor([m / s for m, s in zip(self.mean, self.std, strict=True)]).view(shape)
        return images.to(torch.float32).mul_(factor).sub_(offset)


class TensorSamples:
    """Inputs and targets as tensors. Bytes stay bytes in memory and become numbers batch
    by batch.
    """

    def __init__(
        self, inputs: Tensor, targets: Tensor, scale: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        if len(inputs) != len(targets):
            raise DataCorrupt(
                f"{len(inputs)} inputs and {len(targets)} targets: they must be as many"
            )
        self.inputs, self.targets, self.scale = inputs, targets, scale

    def __len__(self) -> int:
        return len(self.inputs)

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        inputs = self.inputs.index_select(0, indices)
        return (self.scale(inputs) if self.scale else inputs), self.targets.index_select(0, indices)

    def labels(self) -> Tensor | None:
        return (
            self.targets
            if not self.targets.is_floating_point() and self.targets.dim() == 1
            else None
        )


class SomeSamples:
    """Some of the samples, in an order of their own."""

    def __init__(self, samples: Samples, indices: Tensor) -> None:
        self.samples, self.indices = samples, indices

    def __len__(self) -> int:
        return len(self.indices)

    def batch(self, indices: Tensor) -> tuple[Any, Any]:
        return self.samples.batch(self.indices.index_select(0, indices))

    def labels(self) -> Tensor | None:
        labels = self.samples.labels()
        return None if labels is None else labels.index_select(0, self.indices)


def some_of(samples: Samples, count: int) -> Samples:
    """So many, drawn without replacement: the same ones for everybody, and fewer are always among
    more.
    """
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(0))
    return SomeSamples(samples, order[:count])


@dataclass
class Stream:
    """Batches that come in an order of their own: a person's IterableDataset, or a DataLoader with
    its own sampler.

    Every worker reads the whole stream and keeps its part of each round of P batches, so the sizes
    of the others' batches are known to it too, and gradients are weighted exactly.
    """

    batches: Iterable[Any]

    def __len__(self) -> int:
        return len(self.batches)  # type: ignore[arg-type]


@dataclass
class Data:
    """A training set, a test set (or none), and what a model must know of them."""

    name: str
    train: Samples | Stream
    test: Samples | None
    input_shape: tuple[int, ...]
    classes: int | None
    notice: str = ""  # what a person should be told about how their data is used
    batch_size: int | None = None  # the batch size that came with a person's own DataLoader
    labelled: bool = False  # targets are class numbers, whether or not they have been counted
    origin: dict[str, Any] = field(
        default_factory=dict
    )  # where prepared data came from, for the record
    drop_last: bool = (
        False  # an epoch ends before a batch that is not full, as a person's DataLoader asks
    )

    def __post_init__(self) -> None:
        self.labelled = self.labelled or self.classes is not None
        if not isinstance(self.train, Stream) and len(self.train) == 0:
            raise BadRequest(f"data {self.name!r} has no training samples")
        if self.test is not None and len(self.test) == 0:
            raise BadRequest(f"data {self.name!r} has an empty test set: give None for none")
