"""Adopt the user's own data: tensors, a Dataset, a DataLoader, an IterableDataset, or a pair."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
)

from paceline.data.base import Data, Samples, Stream, TensorSamples
from paceline.data.content import Split, describe, split
from paceline.data.order import LoaderOrder
from paceline.data.shards import Cursor
from paceline.errors import BadRequest

STREAM_NOTICE = (
    "Your data is a stream: every worker reads all of it and keeps one batch of each round of P"
    " batches. Every worker knows the sizes of all P batches, so gradients are weighted exactly."
)
DISTRIBUTED_NOTICE = (
    "Your DataLoader's DistributedSampler is replaced by the order of its whole data set: Paceline"
    " deals its batches out to the workers, each batch once."
)
# Settings of a DataLoader that only its own reading of samples uses, with their defaults.
READING = {
    "num_workers": 0,
    "pin_memory": False,
    "worker_init_fn": None,
    "persistent_workers": False,
    "timeout": 0,
}
# If nothing else tells the number of classes, the labels are read, but only of so few samples:
# decoding a large set of images could take an hour.
FEW = 1000


class DatasetSamples:
    """A map-style Dataset whose samples are read one by one and collated.

    `loader`: the DataLoader that it came in, whose settings say how samples are read.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        collate: Callable[[list[Any]], Any] = default_collate,
        loader: DataLoader[Any] | None = None,
    ) -> None:
        self.dataset, self.collate, self.loader = dataset, collate, loader

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def batch(self, indices: Tensor | Sequence[Any]) -> Any:
        wanted = indices.tolist() if isinstance(indices, Tensor) else list(indices)
        fetch = getattr(self.dataset, "__getitems__", None)
        return self.collate(fetch(wanted) if fetch else [self.dataset[i] for i in wanted])

    def labels(self) -> Tensor | None:
        return labels_of(self.dataset)

    def part(self, indices: Tensor) -> DatasetSamples:
        """Return a selection of the samples, which is read with the same settings."""
        chosen = Subset(self.dataset, indices.tolist())
        return DatasetSamples(chosen, self.collate, self.loader)


def labels_of(dataset: Any) -> Tensor | None:
    """Return the class numbers that a Dataset holds in memory, without reading a sample.

    torchvision's data sets hold them as `targets`.
    """
    if isinstance(dataset, Subset):
        whole, chosen = labels_of(dataset.dataset), dataset.indices
        if whole is None or not all(isinstance(i, (int, Integral)) for i in chosen):
            return None
        return whole[torch.as_tensor(chosen)]
    if isinstance(dataset, ConcatDataset):
        parts = [labels_of(part) for part in dataset.datasets]
        known = [part for part in parts if part is not None]
        return torch.cat(known) if len(known) == len(parts) else None
    if isinstance(dataset, TensorDataset):
        targets: Any = dataset.tensors[-1]
    else:
        targets = getattr(dataset, "targets", None)
    if targets is None:
        return None
    labels = torch.as_tensor(targets)
    return labels if labels.dim() == 1 and not labels.is_floating_point() else None


def classes_of(dataset: Any) -> int | None:
    """Return the number of classes that a Dataset declares, without reading a sample.

    Its attribute `classes` is a collection or a number.
    """
    if isinstance(dataset, Subset):
        return classes_of(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        counts = [classes_of(part) for part in dataset.datasets]
        return None if None in counts else max(c for c in counts if c is not None)
    said = getattr(dataset, "classes", None)
    return (
        said
        if isinstance(said, int)
        else len(said)
        if isinstance(said, (list, tuple, dict, set))
        else None
    )


def adopt(value: Any, name: str = "own", count_classes: bool = True, split: Split = split) -> Data:
    """Return the user's data as Data.

    A pair of data sets is (train, test); a pair of tensors is (inputs, targets). `split` is
    `content.whole` where a training step of your own takes batches as they are.
    """
    if isinstance(value, Data):
        return value
    train, test = training_part(value), value[1] if _is_train_test(value) else None
    training = in_its_order(train)
    testing = None if test is None else adopt_test(test)
    shape, classes, counted, labelled = _look(training.train, training.loader, count_classes, split)
    said = classes_of(train.dataset if isinstance(train, DataLoader) else train)
    if classes is not None and said is not None:  # a TensorDataset may say it, too
        classes, counted = max(classes, said), counted and classes > said
    if (
        classes is not None
        and testing is not None
        and (labels := testing.labels()) is not None
        and len(labels)
    ):
        counted = counted and classes > int(labels.max()) + 1
        classes = max(classes, int(labels.max()) + 1)
    return replace(
        training,
        name=name,
        test=testing,
        input_shape=shape,
        classes=classes,
        labelled=labelled,
        classes_counted=counted,
    )


def in_its_order(value: Any) -> Data:
    """Return a training set as Data, without reading a sample: a loader keeps its order."""
    if isinstance(value, DataLoader):
        if not _is_indexed(value):
            return Data(
                "own", Stream(value), None, (), None, STREAM_NOTICE, batch_size=value.batch_size
            )
        distributed = isinstance(value.sampler, DistributedSampler)
        return Data(
            "own",
            DatasetSamples(value.dataset, value.collate_fn, value),
            None,
            (),
            None,
            DISTRIBUTED_NOTICE if distributed else "",
            batch_size=getattr(value.batch_sampler, "batch_size", None) or value.batch_size,
            drop_last=value.drop_last,
            loader=value,
        )
    if isinstance(value, IterableDataset):
        return Data("own", Stream(value), None, (), None, STREAM_NOTICE)
    return Data("own", _indexed(value), None, (), None)


def training_part(value: Any) -> Any:
    """Return the training set of what may be a pair (train, test)."""
    return value[0] if _is_train_test(value) else value


def _is_train_test(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and len(value) == 2 and not _is_tensors(value)


def _is_tensors(value: Any) -> bool:
    return (
        isinstance(value, (tuple, list))
        and len(value) == 2
        and all(hasattr(v, "__array__") or isinstance(v, Tensor) for v in value)
    )


def _is_indexed(loader: DataLoader[Any]) -> bool:
    """Return whether a batch sampler says which samples make a batch, and PyTorch reads them."""
    return (
        not isinstance(loader.dataset, IterableDataset)
        and loader.batch_sampler is not None
        and hasattr(loader.dataset, "__len__")
        and type(loader).__iter__ is DataLoader.__iter__
    )


def own_sampler(loader: DataLoader[Any]) -> str | None:
    """Return the name of a sampler whose order shards cannot replace; None for PyTorch's own."""
    if type(loader.batch_sampler) is not BatchSampler:
        return type(loader.batch_sampler).__name__
    sampler = loader.sampler
    plain = isinstance(sampler, DistributedSampler) or type(sampler) is SequentialSampler
    if type(sampler) is RandomSampler:
        plain = not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    return None if plain else type(sampler).__name__


def not_used(loader: DataLoader[Any], reading: bool) -> list[str]:
    """Return the settings of a loader that shards replace; with `reading`, also those of reading.

    Shards shuffle, and a run whose batches are not known ahead reads samples itself.
    """
    unused = []
    for name in (n for n, default in READING.items() if reading and getattr(loader, n) != default):
        value = getattr(loader, name)
        unused.append(name if callable(value) else f"{name}={value}")
    if loader.generator is not None:
        unused.append("generator")
    if isinstance(loader.sampler, SequentialSampler):
        unused.append("shuffle=False")
    return unused


def adopt_test(value: Any) -> Samples:
    """Return a data set of the user's to evaluate on."""
    if isinstance(value, DataLoader) and not isinstance(value.dataset, IterableDataset):
        if value.batch_sampler is None:
            return DatasetSamples(value.dataset)
        return DatasetSamples(_chosen(value), value.collate_fn, value)
    # A stream is read into memory once, so that each sample is counted once.
    if isinstance(value, (DataLoader, IterableDataset)):
        loader = value if isinstance(value, DataLoader) else DataLoader(value, batch_size=256)
        only = "a test stream must give pairs of tensors; pass a Dataset for anything else"
        try:
            batches = [split(b) for b in loader]
        except BadRequest:
            raise BadRequest(only) from None
        if not batches:
            raise BadRequest("the test stream gave no batch")
        if not all(isinstance(part, Tensor) for b in batches for part in b):
            raise BadRequest(only)
        return TensorSamples(torch.cat([b[0] for b in batches]), torch.cat([b[1] for b in batches]))
    return _indexed(value)


def _chosen(loader: DataLoader[Any]) -> Dataset[Any]:
    """Return the samples that a loader evaluates on: those that a sampler of its own gives once."""
    if own_sampler(loader) is None:
        return loader.dataset
    order, cursor, keys = LoaderOrder(loader, 1), Cursor(), []
    if order.steps_per_epoch is None:
        raise BadRequest("the sampler of a test loader must know its length")
    while cursor.epoch == 0:
        keys += list(order.take(cursor, 0))
        cursor = order.advance(cursor)
    return Subset(loader.dataset, keys)


def _indexed(value: Any) -> Samples:
    if _is_tensors(value):
        return TensorSamples(_tensor(value[0]), _tensor(value[1]))
    if isinstance(value, TensorDataset) and len(value.tensors) == 2:
        return TensorSamples(*value.tensors)
    if hasattr(value, "__getitem__") and hasattr(value, "__len__"):
        return DatasetSamples(value)
    raise BadRequest(
        f"data cannot be {describe(value)}: give a name, a pair of tensors, a Dataset, a"
        " DataLoader, an IterableDataset, or a pair (train, test) of them"
    )


def _shape_of(sample: Any) -> tuple[int, ...]:
    """Return the shape of a tensor, an array or a number; () for anything else."""
    try:
        return tuple(torch.as_tensor(sample).shape)
    except (ValueError, TypeError, RuntimeError):
        return ()


def _look(
    samples: Samples | Stream, loader: DataLoader[Any] | None, count_classes: bool, split: Split
) -> tuple[tuple[int, ...], int | None, bool, bool]:
    """Return the shape of one input, the number of classes, whether that was counted from the
    labels, and whether targets are classes.

    The number of classes is None where it is not known.
    """
    if isinstance(samples, Stream):
        iterable = samples.batches
        first = next(iter(iterable), None)
        if first is None:
            raise BadRequest("the training stream gave nothing")
        inputs, targets = split(first)
        if isinstance(iterable, DataLoader):
            shape = tuple(inputs.shape[1:]) if isinstance(inputs, Tensor) else ()
        else:
            shape = _shape_of(inputs)
        return shape, None, False, False
    inputs, targets = split(samples.batch(some_indices(samples, loader, 1)))
    shape = tuple(inputs.shape[1:]) if isinstance(inputs, Tensor) else ()
    labels = samples.labels()
    labelled = (
        isinstance(targets, Tensor) and not targets.is_floating_point() and targets.dim() == 1
    )
    said = classes_of(samples.dataset) if isinstance(samples, DatasetSamples) and labelled else None
    plain = loader is None or own_sampler(loader) is None
    few = plain and len(samples) <= FEW
    if labels is None and said is None and labelled and count_classes and few:
        labels = split(samples.batch(torch.arange(len(samples))))[1]
    counted = int(labels.max()) + 1 if labels is not None and len(labels) else None
    classes = max(counted or 0, said or 0) or None
    return shape, classes, (counted or 0) > (said or 0), labelled


def some_indices(
    samples: Samples, loader: DataLoader[Any] | None, count: int
) -> Tensor | Sequence[Any]:
    """Return indices of `count` samples or fewer: the first, or the first that a sampler gives."""
    if loader is None or own_sampler(loader) is None:
        return torch.arange(min(count, len(samples)))
    return LoaderOrder(loader, 1).take(Cursor(), 0)[:count]


def _tensor(value: Any) -> Tensor:
    """Convert NumPy's default float64 to PyTorch's default dtype; leave tensors unchanged."""
    tensor = torch.as_tensor(value)
    return (
        tensor.to(torch.get_default_dtype())
        if not isinstance(value, Tensor) and tensor.dtype is torch.float64
        else tensor
    )
