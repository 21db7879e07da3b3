"""A recipe: a TOML file that says how a table becomes shards.

It has sources, joins, filters, derived columns, features, a target and a split. All errors in it
are found before an engine starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

from paceline.common.files import read_toml
from paceline.common.places import find
from paceline.data.prepare.expressions import Expression
from paceline.errors import BadRequest, DataUnavailable, UnknownName

BUILTIN = Path(__file__).parent / "recipes"
TRANSFORMS = ("none", "log1p", "cyclic")
T = TypeVar("T")


@dataclass(frozen=True)
class Source:
    """A CSV file (text, one record per line) or a Parquet file."""

    path: str
    test: str = ""  # another file, which is the test part
    columns: tuple[str, ...] = ()  # the names of the columns, if a CSV has no header line
    numbers: tuple[str, ...] = ()  # the columns of a CSV that are numbers
    missing: tuple[str, ...] = ()  # words that mean a missing value, as an empty field does
    delimiter: str = ","
    comment: str = ""  # lines that begin with this character are skipped
    strip_end: str = ""  # a character that is removed from the end of text

    @property
    def is_parquet(self) -> bool:
        return self.path.endswith((".parquet", ".pq"))


@dataclass(frozen=True)
class Join:
    """A table whose columns are added to the rows with the same key."""

    source: Source
    on: tuple[str, ...]
    take: tuple[str, ...]  # the columns that are added
    prefix: str = ""
    how: Literal["left", "inner"] = "left"


@dataclass(frozen=True)
class Numeric:
    """Columns of numbers, which are transformed, centred and scaled."""

    columns: tuple[str, ...]
    transform: str = "none"  # none, log1p, cyclic (a sine and a cosine; needs `period`)
    period: float = 0.0
    # standard: by mean and standard deviation of the training part, or by `middle` and `spread`
    scale: str = "standard"  # or none
    middle: float | None = None
    spread: float | None = None
    missing: Literal["mean", "zero", "drop"] = "mean"
    flag: bool = False  # adds a column that is 1 where a value was missing


@dataclass(frozen=True)
class Categorical:
    """Columns of words: one column per word, or the word's number (0 is unknown or missing)."""

    columns: tuple[str, ...]
    encode: Literal["one-hot", "index"] = "one-hot"
    words: tuple[str, ...] = ()  # if empty, the words of the training part
    most: int = 1000  # so many of the most frequent words; all others are unknown
    missing: Literal["zero", "drop"] = "zero"


@dataclass(frozen=True)
class Target:
    """The column to predict."""

    column: str
    kind: Literal["class", "number"] = "class"
    classes: tuple[str, ...] = ()  # if empty, those of the training part, sorted


@dataclass(frozen=True)
class Split:
    """Which rows are the test part: a share of them, or those that a condition selects."""

    test: float = 0.2
    by: tuple[str, ...] = ()  # rows with equal values in these columns stay in one part
    where: str = ""  # a condition that holds for the rows of the test part
    seed: int = 0


@dataclass(frozen=True)
class Recipe:
    """The content of a recipe file, checked."""

    name: str
    folder: Path  # the paths of sources are relative to it
    source: Source
    joins: tuple[Join, ...]
    derive: tuple[tuple[str, Expression], ...]
    filters: tuple[Expression, ...]
    numeric: tuple[Numeric, ...]
    categorical: tuple[Categorical, ...]
    target: Target
    split: Split

    @classmethod
    def read(cls, file: str | Path) -> Recipe:
        """Read a recipe file. The paths in it are relative to its own folder."""
        path = Path(file)
        content = read_toml(path, "--recipe takes a TOML file; docs/data.md shows one")
        return cls.make(content, path.stem, path.parent, str(path))

    @classmethod
    def named(cls, name: str, data_dir: str | None = None) -> Recipe:
        """Return a built-in recipe. Its files are searched for where data sets are."""
        known = builtin()
        if name not in known:
            raise UnknownName(
                "table to prepare",
                name,
                known,
                "Use --recipe FILE for your own table, imagefolder:PATH for images.",
            )
        content = read_toml(BUILTIN / f"{name}.toml")
        files = [
            content["source"]["path"],
            *([content["source"]["test"]] if "test" in content["source"] else []),
        ]
        files += [j["path"] for j in content.get("join", [])]
        return cls.make(content, name, find(name, data_dir, (name,), files), f"recipe {name}")

    @classmethod
    def make(cls, content: Mapping[str, Any], name: str, folder: Path, where: str) -> Recipe:
        allowed = {
            "name",
            "source",
            "join",
            "derive",
            "filter",
            "numeric",
            "categorical",
            "target",
            "split",
        }
        for key in content:
            if key not in allowed:
                raise UnknownName(f"part of {where}:", key, allowed)
        for key in ("source", "target"):
            if key not in content:
                raise BadRequest(f"{where} has no [{key}]")
        joins = []
        for i, each in enumerate(_tables(content.get("join", []), f"{where}, join")):
            own = {f.name for f in fields(Source)} - {"test"}
            source = _made(
                Source, {k: v for k, v in each.items() if k in own}, f"{where}, join {i + 1}"
            )
            rest = {k: v for k, v in each.items() if k not in own}
            joins.append(_made(Join, {"source": source, **rest}, f"{where}, join {i + 1}"))
        derive = content.get("derive", {})
        if not isinstance(derive, dict):
            raise BadRequest(f"{where}: each line of [derive] must be NAME = EXPRESSION")
        filters = content.get("filter", [])
        if not isinstance(filters, (str, list)) or not all(isinstance(f, str) for f in filters):
            raise BadRequest(f"{where}: filter must be a list of conditions, as text")
        recipe = cls(
            str(content.get("name", name)),
            folder,
            _made(Source, content["source"], f"{where}, source"),
            tuple(joins),
            tuple((str(k), Expression.parse(v, f"{where}, derive {k}")) for k, v in derive.items()),
            tuple(
                Expression.parse(f, f"{where}, filter")
                for f in ([filters] if isinstance(filters, str) else filters)
            ),
            tuple(
                _made(Numeric, n, f"{where}, numeric")
                for n in _tables(content.get("numeric", []), f"{where}, numeric")
            ),
            tuple(
                _made(Categorical, c, f"{where}, categorical")
                for c in _tables(content.get("categorical", []), where)
            ),
            _made(Target, content["target"], f"{where}, target"),
            _made(Split, content.get("split", {}), f"{where}, split"),
        )
        recipe.check(where)
        return recipe

    def check(self, where: str) -> None:
        if not self.numeric and not self.categorical:
            raise BadRequest(
                f"{where} has no features: add columns as [[numeric]] or [[categorical]]"
            )
        if not 0.0 <= self.split.test < 1.0:
            raise BadRequest(
                f"{where}: split.test={self.split.test}: the share of the test part must be 0 or"
                " more and less than 1"
            )
        if self.split.by and (self.source.test or self.split.where):
            raise BadRequest(
                f"{where}: split.by has no effect beside split.where or source.test: leave it out"
            )
        if self.source.test and self.split.where:
            raise BadRequest(
                f"{where}: the test part is a file (source.test) or a condition (split.where), not"
                " both"
            )
        for group in self.numeric:
            if group.transform not in TRANSFORMS:
                raise UnknownName(f"transform in {where}:", group.transform, TRANSFORMS)
            if (group.transform == "cyclic") != (group.period > 0):
                raise BadRequest(
                    f"{where}: transform=cyclic and a period above 0 go together"
                    f" ({', '.join(group.columns)})"
                )
            if group.scale not in ("standard", "none"):
                raise UnknownName(f"scale in {where}:", group.scale, ("standard", "none"))
            if (group.middle is None) != (group.spread is None) or (
                group.spread is not None and group.spread <= 0
            ):
                raise BadRequest(
                    f"{where}: give middle and spread (above 0) together"
                    f" ({', '.join(group.columns)})"
                )
        for words in self.categorical:
            if words.most < 1:
                raise BadRequest(f"{where}: most={words.most}: must be 1 or more")
        for source in (self.source, *(j.source for j in self.joins)):
            if len(source.delimiter) != 1 or len(source.comment) > 1 or len(source.strip_end) > 1:
                raise BadRequest(
                    f"{where}: delimiter, comment and strip_end are one character each"
                )
        for join in self.joins:
            if not join.on or not join.take:
                raise BadRequest(
                    f"{where}: a join needs `on` (the columns of the key) and `take` (the columns"
                    " to add)"
                )
        seen: set[str] = set()
        for column in self.features():
            if column in seen:
                raise BadRequest(f"{where}: column {column!r} is a feature twice")
            seen.add(column)
        if self.target.column in seen:
            raise BadRequest(f"{where}: the target {self.target.column!r} is a feature too")

    def features(self) -> Iterator[str]:
        for numbers in self.numeric:
            yield from numbers.columns
        for words in self.categorical:
            yield from words.columns

    def files(self) -> list[Path]:
        """Return all files that the recipe reads."""
        names = [
            self.source.path,
            *([self.source.test] if self.source.test else []),
            *(j.source.path for j in self.joins),
        ]
        return [self.path(n) for n in names]

    def path(self, name: str) -> Path:
        path = self.folder / name
        if not path.exists():
            raise DataUnavailable(f"recipe {self.name}: {path} does not exist")
        return path.resolve()


def builtin() -> list[str]:
    return sorted(p.stem for p in BUILTIN.glob("*.toml"))


def _tables(value: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(v, dict) for v in value):
        raise BadRequest(f"{where}: write it as a table in double brackets, [[...]]")
    return value


def _made(kind: type[T], given: Any, where: str) -> T:
    """Make a dataclass from a TOML table, and check its names, types and choices."""
    known = {f.name: f for f in fields(kind)}  # type: ignore[arg-type]
    if not isinstance(given, Mapping):
        raise BadRequest(f"{where}: must be a table of settings, not {given!r}")
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name not in known:
            raise UnknownName(f"setting in {where}:", name, known)
        values[name] = _value(value, str(known[name].type), f"{where}: {name}")
    missing = [n for n, f in known.items() if n not in values and f.default is MISSING]
    if missing:
        raise BadRequest(f"{where}: {missing[0]} is not given")
    return kind(**values)


def _value(value: Any, kind: str, where: str) -> Any:
    if kind.startswith("tuple"):
        values = [value] if isinstance(value, str) else value
        if not isinstance(values, (list, tuple)) or not all(isinstance(v, str) for v in values):
            raise BadRequest(f"{where}={value!r}: must be a list of names")
        return tuple(values)
    if kind.startswith("Literal"):
        choices = [
            c.strip("\"' ") for c in kind.removeprefix("Literal[").removesuffix("]").split(",")
        ]
        if value not in choices:
            raise UnknownName(where, str(value), choices)
        return value
    wanted: dict[str, tuple[type, ...]] = {
        "str": (str,),
        "int": (int,),
        "bool": (bool,),
        "float": (int, float),
        "float | None": (int, float),
    }
    if kind in wanted and (
        not isinstance(value, wanted[kind]) or (isinstance(value, bool) and kind != "bool")
    ):
        raise BadRequest(f"{where}={value!r} is not of kind {kind}")
    return float(value) if "float" in kind else value
