"""What a data source returns: samples that are indexed by batch and held once per host."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from paceline.errors import BadRequest, DataCorrupt


class Samples(Protocol):
    """Samples that any worker can index."""

    def __len__(self) -> int: ...
    def batch(self, indices: Any) -> Any:
        """Return a batch: a pair (inputs, targets), or what a user's collate function makes."""
        ...

    def labels(self) -> Tensor | None: ...


@dataclass(frozen=True)
class Scale:
    """Convert bytes to numbers, per channel: (x / 255 - mean) / std."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, images: Tensor) -> Tensor:
        shape = (-1, *([1] * (images.dim() - 2)))
        factor = torch.tensor([1 / (255 * s) for s in self.std]).view(shape)
        offset = torch.tensor([m / s for m, s in zip(self.mean, self.std, strict=True)]).view(shape)
        return images.to(torch.float32).mul_(factor).sub_(offset)


class TensorSamples:
    """Inputs and targets as tensors. Bytes stay bytes in memory; each batch is scaled."""

    def __init__(
        self, inputs: Tensor, targets: Tensor, scale: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        if len(inputs) != len(targets):
            raise DataCorrupt(
                f"{len(inputs)} inputs and {len(targets)} targets: both must have the same length"
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
    """A selection of samples, in the order of `indices`."""

    def __init__(self, samples: Samples, indices: Tensor) -> None:
        self.samples, self.indices = samples, indices

    def __len__(self) -> int:
        return len(self.indices)

    def batch(self, indices: Tensor) -> Any:
        return self.samples.batch(self.indices.index_select(0, indices))

    def labels(self) -> Tensor | None:
        labels = self.samples.labels()
        return None if labels is None else labels.index_select(0, self.indices)


def some_of(samples: Samples, count: int) -> Samples:
    """Draw `count` samples without replacement.

    All ranks draw the same samples, and a smaller draw is a subset of a larger one.
    """
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(0))
    return part_of(samples, order[:count])


def split_off(samples: Samples, count: int) -> tuple[Samples, Samples]:
    """Draw `count` samples without replacement; return the other samples, and those.

    All ranks draw the same samples. Both parts keep the order of the whole.
    """
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(0))
    drawn, rest = order[:count].sort().values, order[count:].sort().values
    return part_of(samples, rest), part_of(samples, drawn)


def part_of(samples: Samples, indices: Tensor) -> Samples:
    """Return a selection of samples, in the order of `indices`."""
    own: Callable[[Tensor], Samples] | None = getattr(samples, "part", None)
    return SomeSamples(samples, indices) if own is None else own(indices)


@dataclass
class Stream:
    """Batches in the order of the user's IterableDataset, or of a DataLoader without batch sampler.

    Every worker reads the whole stream and keeps one batch of each round of P batches. So every
    worker knows the sizes of all batches, and gradients are weighted exactly.
    """

    batches: Iterable[Any]

    def __len__(self) -> int:
        return len(self.batches)  # type: ignore[arg-type]


@dataclass
class Data:
    """A training set, a test set (or none), and what a model must know about them."""

    name: str
    train: Samples | Stream
    test: Samples | None
    input_shape: tuple[int, ...]
    classes: int | None
    notice: str = ""  # tells the user how their data is used
    batch_size: int | None = None  # of the user's own DataLoader
    labelled: bool = False  # targets are class numbers, even if `classes` is not known
    # Where prepared data came from, for the record of a run.
    origin: dict[str, Any] = field(default_factory=dict)
    drop_last: bool = False  # the user's DataLoader leaves out a last batch that is not full
    validation: Samples | None = None  # decides when to stop, and which weights are the best
    classes_counted: bool = False  # `classes` is known from the training labels only
    loader: DataLoader[Any] | None = None  # the user's own, whose batch sampler gives the order

    def __post_init__(self) -> None:
        self.labelled = self.labelled or self.classes is not None
        if not isinstance(self.train, Stream) and len(self.train) == 0:
            raise BadRequest(
                f"data {self.name!r} has no training samples: its training set is empty"
            )
        if self.test is not None and len(self.test) == 0:
            raise BadRequest(f"data {self.name!r} has an empty test set: pass None instead")
