"""Where a row goes: its part (train or test), its shard, and its place in the shard.

The row's key decides all three.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from paceline.data.manifest import ShardWriter
from paceline.data.prepare.columns import Columns
from paceline.data.prepare.counts import BROKEN, KEPT, KEY, PART, SHARD
from paceline.data.prepare.expressions import Operations
from paceline.data.prepare.keys import mixed, row_keys
from paceline.data.prepare.recipe import Categorical, Numeric, Recipe
from paceline.errors import BadRequest

IN_TRAIN, IN_TEST = "__in_train", "__in_test"  # the row's shard if it is in that part
BROKEN_LINE = "__broken"  # not missing in a row that stands for a broken line
KEYS_SCHEMA = ((KEY, pa.int64()), (PART, pa.int32()), (IN_TRAIN, pa.int32()), (IN_TEST, pa.int32()))


def marker(number: int) -> str:
    """Return the name of a column that is missing where join `number` found no row."""
    return f"__joined{number}"


@dataclass(frozen=True)
class Placing:
    """The number of shards, and the seeds that place rows in them."""

    recipe: Recipe
    train_shards: int
    test_shards: int
    row_seed: int
    split_seed: int
    shard_seed: int

    @classmethod
    def of(cls, recipe: Recipe, shards: int) -> Placing:
        if not 1 <= shards <= 99_999:
            raise BadRequest(f"shards={shards}: 1 to 99,999")
        share = recipe.split.test or 0.2
        # Imported here, because it imports torch, which executors do not need.
        from paceline.common.seeding import derive

        seeds = (derive(recipe.split.seed, what) for what in ("rows", "split", "shard"))
        return cls(recipe, shards, max(1, round(shards * share)), *seeds)

    @property
    def shards(self) -> int:
        return self.train_shards + self.test_shards

    def part(self, shard: int) -> tuple[str, int]:
        """Return the part of a shard, and its number in that part."""
        return (
            ("train", shard) if shard < self.train_shards else ("test", shard - self.train_shards)
        )

    def keys(self, batch: Any, used: list[str], file_part: int) -> list[Any]:
        """Return the columns of KEYS_SCHEMA for a batch of rows as they were read."""
        split = self.recipe.split
        keys = row_keys([batch.column(name) for name in used], self.row_seed)
        if self.recipe.source.test:
            parts = np.full(len(keys), file_part, dtype=np.int32)
        else:
            groups = (
                row_keys([batch.column(n) for n in split.by], self.row_seed) if split.by else keys
            )
            side = mixed(groups ^ np.uint64(self.split_seed))
            parts = (side < np.uint64(int(split.test * 2.0**63) * 2)).astype(np.int32)
        spread = mixed(keys ^ np.uint64(self.shard_seed))
        in_train = (spread % np.uint64(self.train_shards)).astype(np.int32)
        in_test = (spread % np.uint64(self.test_shards)).astype(np.int32) + np.int32(
            self.train_shards
        )
        return [
            pa.array(keys.view(np.int64)),
            pa.array(parts),
            pa.array(in_train),
            pa.array(in_test),
        ]

    def reasons(self) -> list[str]:
        """Return the reasons to drop a row: WHY's values from 2 on, in `_conditions`' order."""
        partners = [
            f"no row in {j.source.path} for its {', '.join(j.on)}"
            for j in self.recipe.joins
            if j.how == "inner"
        ]
        return [
            *partners,
            *(f"not {f.text}" for f in self.recipe.filters),
            *(f"{name} is missing" for name in self._needed()),
        ]

    def _needed(self) -> list[str]:
        """Return the columns without which a row is dropped."""
        groups: list[Numeric | Categorical] = [*self.recipe.numeric, *self.recipe.categorical]
        return [
            self.recipe.target.column,
            *(name for group in groups if group.missing == "drop" for name in group.columns),
        ]

    def _conditions(self, operations: Operations, columns: Columns) -> list[Any]:
        """Return the conditions for a row to stay, as an engine's expressions.

        A condition whose value is missing does not hold.
        """
        known = [marker(i) for i, join in enumerate(self.recipe.joins) if join.how == "inner"]
        filters = [f.build(operations, columns.kinds) for f in self.recipe.filters]
        exists, needed = (
            [operations.apply("known", operations.column(n)) for n in names]
            for names in (known, self._needed())
        )
        return [*exists, *filters, *needed]

    def why(self, operations: Operations, columns: Columns, broken: Any) -> Any:
        """Return the value of WHY as an engine's expression."""
        apply, constant = operations.apply, operations.constant
        found = constant(float(KEPT))
        for number, condition in reversed(
            list(enumerate(self._conditions(operations, columns), start=2))
        ):
            found = apply("when", apply("surely", condition), found, constant(float(number)))
        return found if broken is None else apply("when", broken, constant(float(BROKEN)), found)


class Writing:
    """Encode rows that are sorted by shard, and write them: one shard is open at a time."""

    def __init__(
        self, placing: Placing, encoder: Any, rows: dict[int, int], folder: Path, id: str
    ) -> None:
        self.placing, self.encoder, self.rows, self.folder, self.id = (
            placing,
            encoder,
            rows,
            folder,
            id,
        )

    def __call__(self, batches: Any) -> Any:
        """Yield each shard when it is written."""
        current: int | None = None
        writer: ShardWriter | None = None
        try:
            for batch in batches:
                numbers = np.asarray(batch.column(SHARD))
                bounds = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(numbers)]
                for start, end in pairwise(bounds):
                    if start == end:
                        continue
                    if int(numbers[start]) != current:
                        if writer is not None:
                            yield writer.close()
                        current = int(numbers[start])
                        writer = self.open(current)
                    assert writer is not None
                    writer.write(*self.encoder(batch.slice(start, end - start)))
            if writer is not None:
                done, writer = writer, None
                yield done.close()
        finally:
            if writer is not None:
                writer.__exit__(None, None, None)

    def open(self, shard: int) -> ShardWriter:
        part, number = self.placing.part(shard)
        shape, dtypes = (self.encoder.width,), ("float32", self.encoder.target_dtype)
        return ShardWriter(self.folder, self.id, part, number, self.rows[shard], shape, dtypes)
