"""Encode rows as numbers, with the statistics of the training part. All engines use this code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from paceline.data.prepare.counts import TEST, TRAIN, Counts, numpy, transformed
from paceline.data.prepare.exact import mean_and_spread
from paceline.data.prepare.expressions import Kind
from paceline.data.prepare.recipe import Categorical, Numeric, Recipe
from paceline.errors import BadRequest

LARGEST = 3e38  # about the largest float32


@dataclass(frozen=True)
class Scaled:
    """One numeric column: (x - middle) / spread; `fill` where x is missing."""

    name: str
    group: Numeric
    middle: float
    spread: float
    fill: float
    constant: bool = False

    def names(self) -> list[str]:
        own = (
            [f"{self.name} (sin)", f"{self.name} (cos)"]
            if self.group.transform == "cyclic"
            else [self.name]
        )
        return own + ([f"{self.name} is missing"] if self.group.flag else [])

    def write(self, column: Any, out: npt.NDArray[np.float32]) -> None:
        values = transformed(self.group, numpy(column))
        gone = ~np.isfinite(values)
        if self.group.transform == "cyclic":
            angle = np.where(gone, 0.0, values) * (2 * np.pi / self.group.period)
            out[:, 0], out[:, 1] = (
                np.where(gone, 0.0, np.sin(angle)),
                np.where(gone, 0.0, np.cos(angle)),
            )
        else:
            out[:, 0] = np.clip(
                (np.where(gone, self.fill, values) - self.middle) / self.spread, -LARGEST, LARGEST
            )
        if self.group.flag:
            out[:, -1] = gone

    def described(self) -> dict[str, Any]:
        about = {"from": self.name, "kind": "numeric", "transform": self.group.transform}
        return (
            about
            if self.group.transform == "cyclic"
            else {**about, "middle": self.middle, "spread": self.spread, "fill": self.fill}
        )


@dataclass(frozen=True)
class Worded:
    """One column of words, or of numbers that stand for words."""

    name: str
    group: Categorical
    words: tuple[Any, ...]

    def names(self) -> list[str]:
        return (
            [self.name]
            if self.group.encode == "index"
            else [f"{self.name}={shown(w)}" for w in self.words]
        )

    def write(self, column: Any, out: npt.NDArray[np.float32]) -> None:
        if not self.words:
            return
        kind = pa.float64() if isinstance(self.words[0], float) else pa.string()
        found = pc.index_in(column.cast(kind), value_set=pa.array(self.words, kind))
        places = (
            pc.fill_null(found, -1).to_numpy(zero_copy_only=False)
            if isinstance(found, pa.Array)
            else found.fill_null(-1).to_numpy()
        )
        if self.group.encode == "index":
            out[:, 0] = places + 1
            return
        out[:] = 0.0
        rows = np.flatnonzero(places >= 0)
        out[rows, places[rows]] = 1.0

    def described(self) -> dict[str, Any]:
        return {
            "from": self.name,
            "kind": self.group.encode,
            "words": [shown(w) for w in self.words],
        }


class Encoder:
    """Encode batches of rows. It is small, so that Spark can send it to the executors."""

    def __init__(self, recipe: Recipe, counts: Counts, kinds: Mapping[str, Kind]) -> None:
        self.recipe = recipe
        self.columns: list[Scaled | Worded] = []
        for group in recipe.numeric:
            self.columns += [_scaled(name, group, counts) for name in group.columns]
        for words in recipe.categorical:
            self.columns += [_worded(name, words, counts, kinds[name]) for name in words.columns]
        self.classes = (
            _classes(recipe, counts, kinds[recipe.target.column])
            if recipe.target.kind == "class"
            else None
        )
        self.width = sum(len(c.names()) for c in self.columns)
        if not self.width:
            raise BadRequest(
                f"recipe {recipe.name}: no feature is left, because its columns have no values in"
                " the training part"
            )

    @property
    def target_dtype(self) -> str:
        return "int64" if self.classes is not None else "float32"

    def __call__(self, batch: Any) -> tuple[npt.NDArray[np.float32], npt.NDArray[Any]]:
        inputs = np.empty((batch.num_rows, self.width), dtype=np.float32)
        at = 0
        for column in self.columns:
            end = at + len(column.names())
            column.write(batch.column(column.name), inputs[:, at:end])
            at = end
        return inputs, self._targets(batch.column(self.recipe.target.column))

    def _targets(self, column: Any) -> npt.NDArray[Any]:
        if self.classes is None:
            return np.clip(numpy(column), -LARGEST, LARGEST).astype(np.float32)  # type: ignore[no-any-return]
        kind = pa.float64() if isinstance(self.classes[0], float) else pa.string()
        found = pc.index_in(column.cast(kind), value_set=pa.array(self.classes, kind))
        places = np.asarray(pc.fill_null(found, -1)).astype(np.int64)
        if len(places) and places.min() < 0:
            word = column.filter(pc.is_null(found))[0].as_py()
            known = ", ".join(shown(c) for c in self.classes[:8])
            raise BadRequest(
                f"target {self.recipe.target.column}: class {shown(word)!r} is not among the"
                f" training part's: {known}"
            )
        return places

    def described(self) -> list[dict[str, Any]]:
        return [{**column.described(), "names": column.names()} for column in self.columns]

    def constants(self) -> Iterator[str]:
        """Yield the columns that have the same value in all rows."""
        for column in self.columns:
            if isinstance(column, Scaled) and column.constant:
                yield column.name
            if isinstance(column, Worded) and len(column.words) < 2:
                yield column.name

    @property
    def learnt(self) -> bool:
        """Whether statistics, a vocabulary or the classes come from the rows."""
        numbers = any(
            g.middle is None
            and (g.scale == "standard" or g.missing == "mean")
            and g.transform != "cyclic"
            for g in self.recipe.numeric
        )
        words = any(not g.words for g in self.recipe.categorical)
        return (
            numbers
            or words
            or (self.recipe.target.kind == "class" and not self.recipe.target.classes)
        )


def shown(word: Any) -> str:
    if isinstance(word, float):
        return str(int(word)) if word.is_integer() else repr(word)
    return str(word)


def _scaled(name: str, group: Numeric, counts: Counts) -> Scaled:
    own = counts.numbers.get(name)
    mean, spread = (
        mean_and_spread(own.known, own.total, own.squares) if own is not None else (0.0, 1.0)
    )
    middle, width = (mean, spread) if group.scale == "standard" else (0.0, 1.0)
    if group.middle is not None and group.spread is not None:
        middle, width = group.middle, group.spread
    constant = width == 0.0
    width = width or 1.0
    fill = 0.0 if group.missing == "zero" else group.middle if group.middle is not None else mean
    return Scaled(name, group, middle, width, fill, constant)


def _worded(name: str, group: Categorical, counts: Counts, kind: Kind) -> Worded:
    if group.words:
        return Worded(name, group, _as_kind(group.words, kind, f"words of {name}"))
    found = counts.words.get(name) or Counter()
    most = sorted(found, key=lambda w: (-found[w], w))[: group.most]
    return Worded(name, group, tuple(sorted(most)))


def _as_kind(words: tuple[str, ...], kind: Kind, where: str) -> tuple[Any, ...]:
    """Convert the words of a recipe to the kind of the column."""
    if kind == "text":
        return words
    try:
        return tuple(float(w) for w in words)
    except ValueError:
        raise BadRequest(
            f"{where}: the column has numbers, and {', '.join(words)} are not all numbers"
        ) from None


def _classes(recipe: Recipe, counts: Counts, kind: Kind) -> tuple[Any, ...]:
    target, seen = recipe.target, counts.targets[TRAIN]
    given = _as_kind(target.classes, kind, f"classes of {target.column}")
    found = set(seen) | set(counts.targets[TEST])
    if given:
        extra = sorted(shown(w) for w in found - set(given))
        if extra:
            raise BadRequest(
                f"target {target.column}: {extra[0]!r} is not one of the recipe's classes"
                f" {', '.join(target.classes)}"
            )
    only_test = sorted(shown(w) for w in found - set(seen) - set(given))
    if only_test:
        raise BadRequest(f"target {target.column}: class {only_test[0]!r} is in the test part only")
    if len(seen) < 2:
        held = f"has only the class {shown(next(iter(seen)))!r}" if seen else "has no value"
        raise BadRequest(
            f"target {target.column} {held} in the training part, and training needs two classes."
            " Check the filters and the target"
        )
    return given or tuple(sorted(seen))
