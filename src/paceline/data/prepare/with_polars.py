"""The engine for one machine: PyArrow reads the files, Polars joins, derives and filters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from paceline.common.cores import cores
from paceline.data.manifest import ShardInfo
from paceline.data.prepare.agreed import NUMBER, refuse_many
from paceline.data.prepare.columns import Columns, parquet_kinds
from paceline.data.prepare.counts import BAD, BROKEN, KEY, PART, SHARD, TEST, TRAIN, WHY, Counts
from paceline.data.prepare.expressions import OVERLOADED
from paceline.data.prepare.lines import Lines, complete_lines
from paceline.data.prepare.placing import IN_TEST, IN_TRAIN, KEYS_SCHEMA, Placing, Writing, marker
from paceline.data.prepare.recipe import Join, Recipe, Source
from paceline.errors import BadRequest, DataCorrupt

BATCH_ROWS = 1 << 16


def missing() -> str | None:
    return (
        None if find_spec("polars") else "engine polars needs Polars: pip install 'paceline[data]'"
    )


class PolarsEngine:
    name = "polars"
    master = ""

    def __init__(self) -> None:
        if (reason := missing()) is not None:
            raise BadRequest(reason)

    def __enter__(self) -> PolarsEngine:
        import polars  # noqa: F401  # so that its import counts as the start

        return self

    def __exit__(self, *_: object) -> None:
        return

    def progress(self) -> str:
        return ""

    def rows(self, recipe: Recipe, columns: Columns, placing: Placing, persist: bool) -> PolarsRows:
        return PolarsRows(recipe, columns, placing)


class PolarsRows:
    """The table in memory, ready to be encoded."""

    def __init__(self, recipe: Recipe, columns: Columns, placing: Placing) -> None:
        import polars as pl

        self.recipe, self.placing = recipe, placing
        used, operations = columns.used(), Operations()
        self.broken, self.broken_joined = 0, 0
        tables = []
        for part, name in ((TRAIN, recipe.source.path), (TEST, recipe.source.test)):
            if name:
                table, broken = self._read(recipe.source, recipe.path(name), used)
                self.broken += broken
                tables.append(self._with_keys(table, used, part))
        main: Any = pl.DataFrame(pa.concat_tables(tables)).lazy()
        numbers = [n for n in used if columns.main[n] == "number" and not recipe.source.is_parquet]
        main = _numbered(main, numbers)
        for number, (join, there) in enumerate(zip(recipe.joins, columns.joined, strict=True)):
            main = self._joined(main, number, join, there)
        for name, expression in recipe.derive:
            main = main.with_columns(expression.build(operations, columns.kinds).alias(name))
        if columns.where is not None:
            held = columns.where.build(operations, columns.kinds)
            main = main.with_columns(
                pl.when(held).then(TEST).otherwise(TRAIN).cast(pl.Int32).alias(PART)
            )
        shard = pl.when(pl.col(PART) == TRAIN).then(pl.col(IN_TRAIN)).otherwise(pl.col(IN_TEST))
        features = [
            _plain(name, columns.kinds[name]) for name in (*recipe.features(), recipe.target.column)
        ]
        main = main.select(
            *features,
            KEY,
            PART,
            shard.alias(SHARD),
            placing.why(operations, columns, None).cast(pl.Int32).alias(WHY),
            BAD,
        )
        try:
            self.table = main.collect().to_arrow(compat_level=pl.CompatLevel.oldest())
        except pl.exceptions.PolarsError as error:
            raise BadRequest(f"recipe {recipe.name}: {str(error).splitlines()[0]}") from None

    def count(self) -> Counts:
        counts = Counts()
        for one in self._each(self._counted, self._slices(self.table)):
            counts.add(one)
        counts.rows += self.broken
        counts.why[BROKEN] += self.broken
        counts.broken_joined = self.broken_joined
        return counts

    def _counted(self, part: Any) -> Counts:
        counts = Counts()
        counts.see(part, self.recipe)
        return counts

    def write(self, writing: Writing) -> list[ShardInfo]:
        import polars as pl

        frame = pl.DataFrame(self.table).filter(pl.col(WHY) == 0).sort(SHARD, KEY)
        kept = frame.to_arrow(compat_level=pl.CompatLevel.oldest())
        self.table = None
        numbers = np.asarray(kept.column(SHARD))
        bounds = np.searchsorted(numbers, np.arange(self.placing.shards + 1))
        shards = [kept.slice(a, b - a) for a, b in pairwise(bounds) if b > a]
        written = self._each(lambda one: list(writing(_batches(one))), shards)
        return [info for infos in written for info in infos]

    def close(self) -> None:
        self.table = None

    def _each(self, do: Any, items: Iterable[Any]) -> list[Any]:
        """Call `do` in threads: NumPy and Arrow release Python's global lock."""
        with ThreadPoolExecutor(max_workers=cores()) as pool:
            return list(pool.map(do, items))

    def _slices(self, table: Any) -> list[Any]:
        return [
            table.slice(start, BATCH_ROWS * 4)
            for start in range(0, max(1, table.num_rows), BATCH_ROWS * 4)
        ]

    def _read(self, source: Source, path: Path, wanted: list[str]) -> tuple[Any, int]:
        """Return the wanted columns, and the number of broken lines."""
        if source.is_parquet:
            return _parquet(path, wanted), 0
        lines = Lines(source, path, wanted)
        found = self._each(lines.parse, complete_lines(path))
        table = pa.concat_tables([lines.empty(), *(part for part, _ in found)])
        return _cleaned(table, source, wanted), sum(broken for _, broken in found)

    def _with_keys(self, table: Any, used: list[str], part: int) -> Any:
        found = self._each(
            partial(self.placing.keys, used=used, file_part=part), self._slices(table)
        )
        for place, (name, kind) in enumerate(KEYS_SCHEMA):
            table = table.append_column(
                name, pa.chunked_array([each[place] for each in found], kind)
            )
        return table

    def _joined(self, main: Any, number: int, join: Join, there: dict[str, Any]) -> Any:
        import polars as pl

        wanted = list(dict.fromkeys((*join.on, *join.take)))
        found, broken = self._read(join.source, self.recipe.path(join.source.path), wanted)
        self.broken_joined += broken
        table = pl.from_arrow(found)
        assert isinstance(table, pl.DataFrame)
        if not join.source.is_parquet:
            table = (
                _numbered(table.lazy(), [n for n in wanted if there[n] == "number"])
                .drop(BAD)
                .collect()
            )
        known = table.drop_nulls(list(join.on))
        refuse_many(
            join,
            int(known.select(join.on).is_duplicated().to_numpy().sum()),
            lambda: known.filter(known.select(join.on).is_duplicated()).select(join.on).row(0),
        )
        renamed = known.rename({n: join.prefix + n for n in join.take if n not in join.on})
        both = [pl.col(n).alias(join.prefix + n) for n in join.take if n in join.on and join.prefix]
        partner = pl.lit(1.0).alias(marker(number))
        return main.join(renamed.with_columns(*both, partner).lazy(), on=list(join.on), how="left")


class Operations:
    """Build expressions of Polars."""

    def column(self, name: str) -> Any:
        import polars as pl

        return pl.col(name)

    def constant(self, value: float | str | bool) -> Any:
        import polars as pl

        return pl.lit(value)

    def apply(self, operation: str, *arguments: Any) -> Any:
        return _OPERATIONS[operation](*arguments)


def _divide(a: Any, b: Any) -> Any:
    import polars as pl

    return pl.when(b != 0.0).then(a / b)


def _date(year: Any, month: Any, day: Any) -> Any:
    import polars as pl

    fits = (month >= 1) & (month <= 12) & (day >= 1) & (day <= 31) & (year >= 1) & (year <= 9999)
    text = pl.format(
        "{}-{}-{}",
        *(
            pl.when(fits).then(v).cast(pl.Int32).cast(pl.String).str.zfill(4 if i == 0 else 2)
            for i, v in enumerate((year, month, day))
        ),
    )
    return text.str.to_date("%Y-%m-%d", strict=False)


def _when(condition: Any, then: Any, otherwise: Any) -> Any:
    import polars as pl

    return pl.when(condition).then(then).otherwise(otherwise)


_OPERATIONS: dict[str, Any] = {
    **OVERLOADED,
    "divide": _divide,
    "floor_divide": lambda a, b: _divide(a, b).floor(),
    "modulo": lambda a, b: a - _divide(a, b).floor() * b,
    "missing": lambda a: a.is_null(),
    "known": lambda a: a.is_not_null(),
    "surely": lambda a: a.fill_null(False),
    "floor": lambda a: a.floor(),
    "abs": lambda a: a.abs(),
    "lower": lambda a: a.str.to_lowercase(),
    "when": _when,
    "weekday": lambda y, m, d: _date(y, m, d).dt.weekday().cast(float),
    "dayofyear": lambda y, m, d: _date(y, m, d).dt.ordinal_day().cast(float),
}


def _plain(name: str, kind: str) -> Any:
    import polars as pl

    return pl.col(name).cast(pl.Float64).alias(name) if kind == "boolean" else pl.col(name)


def _numbered(table: Any, names: list[str]) -> Any:
    """Convert text to numbers. Text that is not a number becomes missing, and BAD counts it."""
    import polars as pl

    fits = {
        n: (
            pl.when(pl.col(n).str.contains(NUMBER))
            .then(pl.col(n))
            .cast(pl.Float64, strict=False)
            .is_finite()
        )
        for n in names
    }
    fits = {n: pl.when(pl.col(n).is_not_null()).then(f.fill_null(False)) for n, f in fits.items()}
    bad = (
        pl.sum_horizontal([(~f).fill_null(False).cast(pl.Int32) for f in fits.values()])
        if fits
        else pl.lit(0)
    )
    made = [
        pl.when(f).then(pl.col(n)).cast(pl.Float64, strict=False).alias(n) for n, f in fits.items()
    ]
    return table.with_columns(bad.cast(pl.Int32).alias(BAD), *made)


def _cleaned(table: Any, source: Source, wanted: list[str]) -> Any:
    """Strip blanks around text, and make words that mean a missing value missing."""
    import polars as pl

    def clean(name: str) -> Any:
        text = pl.col(name).str.strip_chars(" \t")
        if source.strip_end:
            text = text.str.strip_suffix(source.strip_end)
        return pl.when(~text.is_in(["", *source.missing])).then(text).alias(name)

    frame = pl.from_arrow(table)
    assert isinstance(frame, pl.DataFrame)
    return frame.select(clean(n) for n in wanted).to_arrow(compat_level=pl.CompatLevel.oldest())


def _parquet(path: Path, wanted: list[str]) -> Any:
    there = parquet_kinds(path)
    try:
        table = pq.read_table(path, columns=wanted)
    except (pa.ArrowInvalid, OSError) as error:
        raise DataCorrupt(f"{path} cannot be read: {str(error).splitlines()[0]}") from None
    columns = {}
    for name in wanted:
        column = table.column(name)
        if there[name] == "text":
            columns[name] = column.cast(pa.string())
        else:
            numbers = column.cast(pa.float64(), safe=False)
            columns[name] = pc.if_else(
                pc.is_finite(numbers), numbers, pa.scalar(None, pa.float64())
            )
    return pa.table(columns)


def _batches(table: Any) -> Iterator[Any]:
    yield from table.combine_chunks().to_batches(max_chunksize=BATCH_ROWS)
