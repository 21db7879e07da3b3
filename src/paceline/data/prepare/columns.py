"""The columns of a recipe's tables: which there are, of what kind, and which are used."""

from __future__ import annotations

import csv
from pathlib import Path

from paceline.data.prepare.expressions import Expression, Kind
from paceline.data.prepare.recipe import Recipe, Source
from paceline.errors import BadRequest, DataCorrupt, UnknownName


class Columns:
    """The columns of a recipe and their kinds. All names in the recipe are checked."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.main = self._of(recipe.source)
        kinds: dict[str, Kind] = dict(self.main)
        self.joined: list[dict[str, Kind]] = []
        for join in recipe.joins:
            there = self._of(join.source)
            for name in join.on:
                if name not in kinds:
                    raise UnknownName(f"column to join on in {recipe.source.path}:", name, kinds)
                if name not in there:
                    raise UnknownName(f"column to join on in {join.source.path}:", name, there)
                if kinds[name] != there[name]:
                    raise BadRequest(
                        f"join on {name}: a {kinds[name]} here, a {there[name]} in"
                        f" {join.source.path}"
                    )
            for name in join.take:
                if name not in there:
                    raise UnknownName(f"column in {join.source.path}:", name, there)
                if join.prefix + name in kinds:
                    raise BadRequest(
                        f"join with {join.source.path}: there is a column {join.prefix + name!r}"
                        " already: set a prefix"
                    )
                kinds[join.prefix + name] = there[name]
            self.joined.append(there)
        self.read = frozenset(kinds)
        for name, expression in recipe.derive:
            if name in kinds:
                raise BadRequest(f"derive {name}: there is a column of that name already")
            kinds[name] = expression.kind(kinds, f"derive {name}")
        for i, expression in enumerate(recipe.filters):
            if expression.kind(kinds, f"filter {i + 1}") != "boolean":
                raise BadRequest(f"filter {expression.text!r} is not a condition")
        self.where = (
            Expression.parse(recipe.split.where, "split.where") if recipe.split.where else None
        )
        if self.where is not None and self.where.kind(kinds, "split.where") != "boolean":
            raise BadRequest(f"split.where {recipe.split.where!r} is not a condition")
        for name in recipe.split.by:
            if name not in self.main:
                raise UnknownName(f"column in {recipe.source.path} to split by:", name, self.main)
        own = next((n for n in kinds if n.startswith("__")), None)
        if own is not None:
            raise BadRequest(
                f"column {own!r}: Paceline reserves names that begin with two underscores"
            )
        self.kinds = kinds
        for group in recipe.numeric:
            self._want(group.columns, ("number", "boolean"), "numeric")
        for group in recipe.categorical:  # type: ignore[assignment]
            self._want(group.columns, ("text", "number"), "categorical")
        wanted: tuple[Kind, ...] = (
            ("number", "boolean")
            if recipe.target.kind == "number"
            else ("number", "boolean", "text")
        )
        self._want((recipe.target.column,), wanted, "target")

    def _want(self, names: tuple[str, ...], allowed: tuple[Kind, ...], what: str) -> None:
        for name in names:
            if name not in self.kinds:
                raise UnknownName(f"{what} column", name, self.kinds)
            if self.kinds[name] not in allowed:
                hint = (
                    " (a CSV's columns are text: add it to its `numbers`)"
                    if self.kinds[name] == "text"
                    else ""
                )
                raise BadRequest(
                    f"{what} column {name!r} is {self.kinds[name]}, not"
                    f" {' or '.join(allowed)}{hint}"
                )

    def used(self) -> list[str]:
        """Return the columns of the main table that the recipe uses. They make a row's key."""
        wanted = (
            set(self.recipe.features()) | {self.recipe.target.column} | set(self.recipe.split.by)
        )
        for join in self.recipe.joins:
            wanted |= set(join.on)
        for expression in (
            *(e for _, e in self.recipe.derive),
            *self.recipe.filters,
            *([self.where] if self.where else []),
        ):
            wanted |= expression.columns
        return [name for name in self.main if name in wanted]

    def _of(self, source: Source) -> dict[str, Kind]:
        path = self.recipe.path(source.path)
        if source.is_parquet:
            return parquet_kinds(path)
        names = list(source.columns) or header(path, source)
        for name in source.numbers:
            if name not in names:
                raise UnknownName(f"column in {source.path}:", name, names)
        return {name: "number" if name in source.numbers else "text" for name in names}


def header_line(path: Path, source: Source) -> bytes:
    """Return the first line that is neither a comment nor blank."""
    try:
        with path.open("rb") as file:
            for line in file:
                text = line.rstrip(b"\r\n")
                if text.strip() and not (
                    source.comment and text.startswith(source.comment.encode())
                ):
                    return text
    except OSError as error:
        raise DataCorrupt(f"{path} cannot be read: {error.strerror}") from None
    raise DataCorrupt(f"{path} is empty: its first line must have the names of its columns")


def header(path: Path, source: Source) -> list[str]:
    try:
        text = header_line(path, source).decode("utf-8-sig")
        names = [n.strip() for n in next(csv.reader([text], delimiter=source.delimiter), [])]
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataCorrupt(f"{path} cannot be read: {error}") from None
    twice = next((n for n in names if names.count(n) > 1), None)
    if twice is not None:
        raise DataCorrupt(f"{path} has two columns {twice!r}")
    return names


def parquet_kinds(path: Path) -> dict[str, Kind]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = next(iter(sorted(path.glob("*.parquet"))), path) if path.is_dir() else path
    try:
        schema = pq.read_schema(file)
    except (OSError, pa.ArrowInvalid) as error:
        raise DataCorrupt(f"{path} cannot be read as a Parquet file: {error}") from None
    kinds: dict[str, Kind] = {}
    for field in schema:
        kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
        if (
            pa.types.is_boolean(kind)
            or pa.types.is_integer(kind)
            or pa.types.is_floating(kind)
            or pa.types.is_decimal(kind)
        ):
            kinds[field.name] = "number"
        elif (
            pa.types.is_string(kind)
            or pa.types.is_large_string(kind)
            or pa.types.is_string_view(kind)
        ):
            kinds[field.name] = "text"
        else:
            kinds[field.name] = "something else"
    return kinds
