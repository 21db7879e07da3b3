"""Adopt the user's own data: tensors, a Dataset, a DataLoader, an IterableDataset, or a pair."""

from __future__ import annotations

from collections.abc import Callable
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
from paceline.errors import BadRequest

STREAM_NOTICE = (
    "Your data is a stream: every worker reads all of it and keeps one batch of each round of P"
    " batches. Every worker knows the sizes of all P batches, so gradients are weighted exactly."
)
LOADER_NOTICE = (
    "Your DataLoader's data set, collate function, batch size ({size} for each worker) and"
    " drop_last ({drop}) are used. Paceline's shards decide which samples a worker sees and in"
    " which order, so that no sample is seen twice."
)
# Settings of a DataLoader that are not used, with their defaults.
UNUSED = {
    "num_workers": 0,
    "pin_memory": False,
    "worker_init_fn": None,
    "generator": None,
}
# If nothing else tells the number of classes, the labels are read, but only of so few samples:
# decoding a large set of images could take an hour.
FEW = 1000


class DatasetSamples:
    """A map-style Dataset whose samples are read one by one and collated."""

    def __init__(
        self, dataset: Dataset[Any], collate: Callable[[list[Any]], Any] = default_collate
    ) -> None:
        self.dataset, self.collate = dataset, collate

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def batch(self, indices: Tensor) -> tuple[Any, Any]:
        wanted = indices.tolist()
        fetch = getattr(self.dataset, "__getitems__", None)
        return pair(self.collate(fetch(wanted) if fetch else [self.dataset[i] for i in wanted]))

    def labels(self) -> Tensor | None:
        return labels_of(self.dataset)


def labels_of(dataset: Any) -> Tensor | None:
    """Return the class numbers that a Dataset holds in memory, without reading a sample.

    torchvision's data sets hold them as `targets`.
    """
    if isinstance(dataset, Subset):
        whole = labels_of(dataset.dataset)
        return None if whole is None else whole[torch.as_tensor(dataset.indices)]
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


def pair(batch: Any) -> tuple[Any, Any]:
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    raise BadRequest(f"a sample must be a pair (input, target); this data gives {_describe(batch)}")


def adopt(value: Any, name: str = "own", count_classes: bool = True) -> Data:
    """Return the user's data as Data.

    A pair of data sets is (train, test); a pair of tensors is (inputs, targets).
    """
    if isinstance(value, Data):
        return value
    train, test = (value[0], value[1]) if _is_train_test(value) else (value, None)
    notices: list[str] = []
    training = _training(train, notices)
    batch_size = train.batch_size if isinstance(train, DataLoader) else None
    testing = None if test is None else adopt_test(test)
    shape, classes, counted, labelled = _look(training, count_classes)
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
    drop_last = (
        isinstance(train, DataLoader) and not isinstance(training, Stream) and train.drop_last
    )
    return Data(
        name,
        training,
        testing,
        shape,
        classes,
        " ".join(notices),
        batch_size,
        labelled,
        drop_last=drop_last,
        classes_counted=counted,
    )


def _is_train_test(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and len(value) == 2 and not _is_tensors(value)


def _is_tensors(value: Any) -> bool:
    return (
        isinstance(value, (tuple, list))
        and len(value) == 2
        and all(hasattr(v, "__array__") or isinstance(v, Tensor) for v in value)
    )


def _training(value: Any, notices: list[str]) -> Samples | Stream:
    if isinstance(value, DataLoader):
        if _plain(value):
            notices.append(_about_loader(value))
            return DatasetSamples(value.dataset, value.collate_fn)
        notices.append(STREAM_NOTICE)
        return Stream(value)
    if isinstance(value, IterableDataset):
        notices.append(STREAM_NOTICE)
        return Stream(value)
    return _indexed(value)


def _plain(loader: DataLoader[Any]) -> bool:
    """Return whether a loader's order is one of PyTorch's own, so that shards can replace it.

    A DistributedSampler would cut the data for this worker; Paceline cuts the whole data set
    instead, once.
    """
    return (
        not isinstance(loader.dataset, IterableDataset)
        and type(loader.sampler) in (RandomSampler, SequentialSampler, DistributedSampler)
        and (not isinstance(loader.sampler, RandomSampler) or _draws_each_once(loader.sampler))
        and type(loader.batch_sampler) is BatchSampler
    )


def _draws_each_once(sampler: RandomSampler) -> bool:
    return not sampler.replacement and sampler.num_samples == len(sampler.data_source)


def _about_loader(loader: DataLoader[Any]) -> str:
    """Return a notice that says which settings of a loader are used and which are not."""
    told = LOADER_NOTICE.format(size=loader.batch_size, drop="on" if loader.drop_last else "off")
    unused = [name for name, default in UNUSED.items() if getattr(loader, name) != default]
    unused = [
        f"{name}={getattr(loader, name)}" if name in ("num_workers", "pin_memory") else name
        for name in unused
    ]
    if isinstance(loader.sampler, (SequentialSampler, DistributedSampler)):
        unused.append(
            "shuffle=False"
            if isinstance(loader.sampler, SequentialSampler)
            else "its DistributedSampler"
        )
    return f"{told} Not used: {', '.join(unused)}." if unused else told


def adopt_test(value: Any) -> Samples:
    """Return a data set of the user's to evaluate on."""
    if isinstance(value, DataLoader) and not isinstance(value.dataset, IterableDataset):
        return DatasetSamples(
            value.dataset, value.collate_fn if value.batch_size is not None else default_collate
        )
    # A stream is read into memory once, so that each sample is counted once.
    if isinstance(value, (DataLoader, IterableDataset)):
        loader = value if isinstance(value, DataLoader) else DataLoader(value, batch_size=256)
        batches = [pair(b) for b in loader]
        if not batches:
            raise BadRequest("the test stream gave no batch")
        if not all(isinstance(part, Tensor) for b in batches for part in b):
            raise BadRequest("a test stream must give tensors; pass a Dataset for anything else")
        return TensorSamples(torch.cat([b[0] for b in batches]), torch.cat([b[1] for b in batches]))
    return _indexed(value)


def _indexed(value: Any) -> Samples:
    if _is_tensors(value):
        return TensorSamples(_tensor(value[0]), _tensor(value[1]))
    if isinstance(value, TensorDataset) and len(value.tensors) == 2:
        return TensorSamples(*value.tensors)
    if hasattr(value, "__getitem__") and hasattr(value, "__len__"):
        return DatasetSamples(value)
    raise BadRequest(
        f"data cannot be {_describe(value)}: give a name, a pair of tensors, a Dataset, a"
        " DataLoader, an IterableDataset, or a pair (train, test) of them"
    )


def _look(
    samples: Samples | Stream, count_classes: bool
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
        inputs, targets = pair(first)
        shape = (
            tuple(inputs.shape[1:])
            if isinstance(iterable, DataLoader)
            else tuple(torch.as_tensor(inputs).shape)
        )
        return shape, None, False, False
    if not len(samples):
        raise BadRequest("the training set is empty")
    inputs, targets = samples.batch(torch.tensor([0]))
    shape = tuple(inputs.shape[1:]) if isinstance(inputs, Tensor) else ()
    labels = samples.labels()
    labelled = (
        isinstance(targets, Tensor) and not targets.is_floating_point() and targets.dim() == 1
    )
    said = classes_of(samples.dataset) if isinstance(samples, DatasetSamples) and labelled else None
    if labels is None and said is None and labelled and count_classes and len(samples) <= FEW:
        labels = samples.batch(torch.arange(len(samples)))[1]
    counted = int(labels.max()) + 1 if labels is not None and len(labels) else None
    classes = max(counted or 0, said or 0) or None
    return shape, classes, (counted or 0) > (said or 0), labelled


def _tensor(value: Any) -> Tensor:
    """Convert NumPy's default float64 to PyTorch's default dtype; leave tensors unchanged."""
    tensor = torch.as_tensor(value)
    return (
        tensor.to(torch.get_default_dtype())
        if not isinstance(value, Tensor) and tensor.dtype is torch.float64
        else tensor
    )


def _describe(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"
