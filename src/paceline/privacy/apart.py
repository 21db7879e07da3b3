"""Batches in which each row depends on one person only.

Clipping bounds the influence of a *row*. That bounds the influence of a *person* only if no row
depends on two people. A collate function that mixes samples (mixup, CutMix), centres them by the
batch, or makes two rows of one sample would put a person into several rows. So a private run reads
and collates each sample by itself. It takes a batch at once only where the code that makes batches
is known to make each row from one sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset, default_collate

from paceline.data.adopt import DatasetSamples
from paceline.data.augment import Augment
from paceline.data.base import Samples, Scale, SomeSamples, TensorSamples
from paceline.data.content import split
from paceline.data.imagefolder import ImageFiles
from paceline.data.sharded import ShardedSamples
from paceline.errors import BadRequest

NOTICE = (
    "privacy: samples are read and collated one at a time, so that no row depends on two people;"
    " code that mixes the samples of a batch (mixup, centring by the batch) has no effect"
)


class OneByOne:
    """Fetches and collates each sample alone, then joins the rows."""

    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def batch(self, indices: Tensor) -> tuple[Any, Any]:
        alone = [split(self.samples.batch(index)) for index in indices.split(1)]
        return together([one[0] for one in alone]), together([one[1] for one in alone])

    def labels(self) -> Tensor | None:
        return self.samples.labels()


def apart(samples: Samples) -> Samples:
    """Return samples whose rows are the same in any batch as alone."""
    return samples if rows_apart(samples) else OneByOne(samples)


def rows_apart(samples: Samples) -> bool:
    """Whether these samples are known to make each row from one sample.

    A subclass of a known class may do anything, so it is not known.
    """
    if type(samples) is SomeSamples:
        return rows_apart(samples.samples)
    if type(samples) is TensorSamples:
        return _row_by_row(samples.scale)
    if type(samples) is ShardedSamples or type(samples) is ImageFiles:
        return _row_by_row(samples.change)
    return (
        type(samples) is DatasetSamples
        and samples.collate is default_collate
        and not _fetches_many(samples.dataset)
    )


def _row_by_row(change: Any) -> bool:
    """Whether a transform of a whole batch is one of Paceline's, which treat rows separately."""
    return (
        change is None
        or type(change) is Scale
        or (type(change) is Augment and type(change.scale) is Scale)
    )


def _fetches_many(dataset: Any) -> bool:
    """Whether a Dataset has code of its own that reads several samples at once."""
    while type(dataset) is Subset:  # its `__getitems__` only calls the data set's
        dataset = dataset.dataset
    return hasattr(dataset, "__getitems__")


def together(rows: Sequence[Any]) -> Any:
    """Join batches of one sample to one batch, also inside tuples, lists and dictionaries."""
    first = rows[0]
    if any(type(row) is not type(first) for row in rows):
        raise _unequal(first, next(row for row in rows if type(row) is not type(first)))
    if isinstance(first, Tensor):
        for row in rows:
            if row.dim() == 0 or len(row) != 1:
                count = f"{len(row)} rows" if row.dim() else "a number without a row"
                raise BadRequest(
                    f"privacy: the collate function makes {count} of one sample, and clip bounds"
                    " each row: make one row per sample, with the samples as the first dimension"
                )
            if row.shape != first.shape:
                raise _unequal(first, row)
        return torch.cat(list(rows))
    if isinstance(first, dict):
        if any(row.keys() != first.keys() for row in rows):
            raise _unequal(first, next(row for row in rows if row.keys() != first.keys()))
        return {key: together([row[key] for row in rows]) for key in first}
    if isinstance(first, (tuple, list)):
        if any(len(row) != len(first) for row in rows):
            raise _unequal(first, next(row for row in rows if len(row) != len(first)))
        return type(first)(together(each) for each in zip(*rows, strict=True))
    if any(row != first for row in rows):
        raise _unequal(first, next(row for row in rows if row != first))
    return first


def _unequal(one: Any, other: Any) -> BadRequest:
    return BadRequest(
        f"privacy: collated by itself, one sample gives {_shape(one)} and another {_shape(other)}."
        " A private run collates each sample by itself, so that none depends on another: pad all"
        " samples to one fixed length, and return tensors"
    )


def _shape(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"shape {tuple(value.shape)}"
    if isinstance(value, dict):
        return f"a dictionary of {', '.join(map(str, value))}"
    return f"a {type(value).__name__}" + (
        f" of {len(value)}" if isinstance(value, (tuple, list)) else ""
    )
