"""Statistics of all rows that the encoding needs.

They are counted batch by batch on any executor, and added up in any order.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from paceline.data.prepare.exact import exact_sums
from paceline.data.prepare.recipe import Numeric, Recipe
from paceline.errors import BadRequest

# Columns that Paceline adds to the table.
PART, SHARD, WHY, BAD, KEY = "__part", "__shard", "__why", "__bad", "__key"
KEPT, BROKEN = 0, 1  # values of WHY; values from 2 on are the recipe's reasons to drop a row
TRAIN, TEST = 0, 1
MOST_WORDS, MOST_CLASSES = 1_000_000, 10_000


@dataclass
class Column:
    """The exact sums of a numeric column over the training part."""

    known: int = 0  # values that are not missing
    total: int = 0  # in units of 2^-UNIT (see exact.py), as are the squares
    squares: int = 0


@dataclass
class Counts:
    rows: int = 0
    bad_numbers: int = 0
    broken_joined: int = 0  # broken lines of the tables that are joined
    why: Counter[int] = field(default_factory=Counter)
    shards: Counter[int] = field(default_factory=Counter)  # kept rows
    parts: Counter[int] = field(default_factory=Counter)
    missing: Counter[str] = field(default_factory=Counter)  # kept rows of either part
    targets: dict[int, Counter[Any]] = field(
        default_factory=lambda: {TRAIN: Counter(), TEST: Counter()}
    )
    numbers: dict[str, Column] = field(default_factory=dict)
    words: dict[str, Counter[Any]] = field(default_factory=dict)  # of the training part

    def see(self, batch: pa.RecordBatch | pa.Table, recipe: Recipe) -> None:
        self.rows += batch.num_rows
        self.bad_numbers += pc.sum(batch.column(BAD)).as_py() or 0
        _add(self.why, batch.column(WHY))
        batch = batch.filter(pc.equal(batch.column(WHY), KEPT))
        _add(self.shards, batch.column(SHARD))
        _add(self.parts, batch.column(PART))
        for name in recipe.features():
            self.missing[name] += batch.column(name).null_count
        training = batch.filter(pc.equal(batch.column(PART), TRAIN))
        if recipe.target.kind == "class":
            _add(self.targets[TRAIN], training.column(recipe.target.column))
            others = batch.filter(pc.equal(batch.column(PART), TEST))
            _add(self.targets[TEST], others.column(recipe.target.column))
        for group in recipe.numeric:
            if (
                group.scale == "standard" and group.middle is None and group.transform != "cyclic"
            ) or group.missing == "mean":
                for name in group.columns:
                    self._add_numbers(name, group, training.column(name))
        for words in recipe.categorical:
            for name in words.columns if not words.words else ():
                _add(self.words.setdefault(name, Counter()), training.column(name))
        self.check()

    def check(self) -> None:
        """Refuse vocabularies that are too large for memory, here and in the driver."""
        for name, counter in self.words.items():
            if len(counter) > MOST_WORDS:
                raise BadRequest(
                    f"categorical column {name!r} has more than {MOST_WORDS:,} different words: is"
                    " it a number or an id?"
                )
        if len(self.targets[TRAIN]) > MOST_CLASSES:
            raise BadRequest(
                f"the target has more than {MOST_CLASSES:,} classes: if it is a number, write kind"
                ' = "number"'
            )

    def _add_numbers(self, name: str, group: Numeric, column: Any) -> None:
        found, times = counted(pc.drop_null(column))
        values = transformed(group, numpy(found))
        finite = np.isfinite(values)
        values, times = values[finite], numpy(times)[finite]
        total, squares = exact_sums(values, times)
        own = self.numbers.setdefault(name, Column())
        own.known += int(times.sum())
        own.total += total
        own.squares += squares

    def add(self, other: Counts) -> None:
        self.rows += other.rows
        self.bad_numbers += other.bad_numbers
        for mine, its in (
            (self.why, other.why),
            (self.shards, other.shards),
            (self.parts, other.parts),
        ):
            mine.update(its)
        self.missing.update(other.missing)
        for part, counter in other.targets.items():
            self.targets[part].update(counter)
        for name, column in other.numbers.items():
            own = self.numbers.setdefault(name, Column())
            own.known += column.known
            own.total += column.total
            own.squares += column.squares
        for name, counter in other.words.items():
            self.words.setdefault(name, Counter()).update(counter)
        self.check()

    def packed(self) -> str:
        """Return the counts as text, to send them from an executor to the driver."""
        pairs = lambda counter: list(counter.items())  # noqa: E731
        return json.dumps(
            {
                "rows": self.rows,
                "bad_numbers": self.bad_numbers,
                "why": pairs(self.why),
                "shards": pairs(self.shards),
                "parts": pairs(self.parts),
                "missing": pairs(self.missing),
                "targets": [[part, pairs(c)] for part, c in self.targets.items()],
                "numbers": [
                    [n, c.known, hex(c.total), hex(c.squares)] for n, c in self.numbers.items()
                ],
                "words": [[n, pairs(c)] for n, c in self.words.items()],
            }
        )

    @classmethod
    def unpacked(cls, text: str) -> Counts:
        found = json.loads(text)
        counter = lambda pairs: Counter(dict(pairs))  # noqa: E731
        return cls(
            found["rows"],
            found["bad_numbers"],
            0,
            counter(found["why"]),
            counter(found["shards"]),
            counter(found["parts"]),
            counter(found["missing"]),
            {part: counter(c) for part, c in found["targets"]},
            {
                n: Column(known, int(total, 16), int(squares, 16))
                for n, known, total, squares in found["numbers"]
            },
            {n: counter(c) for n, c in found["words"]},
        )


def transformed(group: Numeric, values: Any) -> Any:
    """Apply log1p where the recipe wants it. Values of -1 or less become missing (nan)."""
    if group.transform != "log1p":
        return values
    return np.log1p(np.where(values > -1.0, values, np.nan))


def numpy(column: Any) -> Any:
    """Return a column as float64, with nan for missing values."""
    return (
        column.cast(pa.float64()).to_numpy(zero_copy_only=False)
        if isinstance(column, pa.Array)
        else column.cast(pa.float64()).to_numpy()
    )


def _add(counter: Counter[Any], column: Any) -> None:
    values, times = counted(column)
    for value, count in zip(values.to_pylist(), times.to_pylist(), strict=True):
        if value is not None:
            counter[value] += count


def counted(column: Any) -> tuple[Any, Any]:
    """Return the distinct values of a column, and how often each occurs."""
    found = pc.value_counts(column)
    if isinstance(found, pa.StructArray):
        return found.field("values"), found.field("counts")
    return pc.struct_field(found, "values"), pc.struct_field(found, "counts")
