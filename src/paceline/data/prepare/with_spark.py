"""The engine for tables that are too large for one machine: Spark, whose executors write shards.

    read -> keys -> joins, derived columns, reasons to drop   (persisted, because it is used twice)
                      |-> count   one row of sums per partition; the driver adds them up
                      '-> write   repartition by shard, sort by key, encode, one file per shard

Inside Spark the name of a column is its UTF-8 bytes in hexadecimal, because Spark gives dots and
capital letters in names a meaning. Paceline must be installed on the executors, and all hosts must
share the folder of the shards.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pyarrow as pa

from paceline.data.manifest import ShardInfo
from paceline.data.prepare.agreed import NUMBER, refuse_many
from paceline.data.prepare.columns import Columns
from paceline.data.prepare.counts import BAD, KEY, PART, SHARD, TEST, TRAIN, WHY, Counts
from paceline.data.prepare.expressions import OVERLOADED
from paceline.data.prepare.lines import Lines, joined
from paceline.data.prepare.placing import (
    BROKEN_LINE,
    IN_TEST,
    IN_TRAIN,
    KEYS_SCHEMA,
    Placing,
    Writing,
    marker,
)
from paceline.data.prepare.recipe import Join, Recipe, Source
from paceline.errors import BadRequest
from paceline.spark.java import pyspark_missing
from paceline.spark.session import Session, as_sentence

SETTINGS = {
    "spark.sql.ansi.enabled": "false",  # an undefined result is missing, as in Polars
    "spark.sql.execution.arrow.maxRecordsPerBatch": "65536",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.files.maxPartitionBytes": "33554432",  # rows take several times as much memory
}


def missing() -> str | None:
    return pyspark_missing()


class SparkEngine:
    name = "spark"

    def __init__(self, master: str) -> None:
        if (reason := missing()) is not None:
            raise BadRequest(reason)
        self.master = master
        self.session = Session(master, "paceline prepare", SETTINGS)

    def __enter__(self) -> SparkEngine:
        self.session.__enter__()
        return self

    def __exit__(self, *failure: Any) -> None:
        self.session.__exit__(*failure)

    def progress(self) -> str:
        return self.session.progress()

    def rows(self, recipe: Recipe, columns: Columns, placing: Placing, persist: bool) -> SparkRows:
        with as_sentence(self.session):
            return SparkRows(self.session, recipe, columns, placing, persist)


class SparkRows:
    """The table, ready to be encoded: a plan of Spark, whose rows the executors keep once made."""

    def __init__(
        self, session: Session, recipe: Recipe, columns: Columns, placing: Placing, persist: bool
    ) -> None:
        from pyspark.sql import functions as f

        self.session, self.recipe, self.placing, self.persist = session, recipe, placing, persist
        self.kept: list[Any] = []
        self.broken_joined = 0
        used, operations = columns.used(), Operations()
        main = None
        for part, name in ((TRAIN, recipe.source.path), (TEST, recipe.source.test)):
            if name:
                table = self._with_keys(
                    self._read(recipe.source, name, columns.main, used), columns, used, part
                )
                main = table if main is None else main.unionByName(table)
        main = _numbered(
            main,
            [] if recipe.source.is_parquet else [n for n in used if columns.main[n] == "number"],
        )
        for number, (join, there) in enumerate(zip(recipe.joins, columns.joined, strict=True)):
            main = self._joined(main, number, join, there)
        for name, expression in recipe.derive:
            main = main.withColumn(safe(name), expression.build(operations, columns.kinds))
        if columns.where is not None:
            main = main.withColumn(
                PART, f.when(columns.where.build(operations, columns.kinds), TEST).otherwise(TRAIN)
            )
        shard = f.when(f.col(PART) == TRAIN, f.col(IN_TRAIN)).otherwise(f.col(IN_TEST))
        features = [
            column(n).cast("double").alias(safe(n)) if columns.kinds[n] == "boolean" else column(n)
            for n in (*recipe.features(), recipe.target.column)
        ]
        why = (
            placing.why(operations, columns, f.col(BROKEN_LINE).isNotNull()).cast("int").alias(WHY)
        )
        self.table = self._keep(main.select(*features, KEY, PART, shard.alias(SHARD), why, BAD))

    def _keep(self, table: Any) -> Any:
        """Let the executors keep a table that is used more than once."""
        from pyspark.storagelevel import StorageLevel

        if self.persist:
            self.kept.append(table.persist(StorageLevel.MEMORY_AND_DISK))
        return table

    def count(self) -> Counts:
        recipe = self.recipe

        def count(batches: Iterator[Any]) -> Iterator[Any]:
            counts = Counts()
            for batch in batches:
                counts.see(named(batch), recipe)
            yield pa.RecordBatch.from_arrays([pa.array([counts.packed()])], ["counts"])

        with as_sentence(self.session):
            found = self.table.mapInArrow(count, "counts string").collect()
        counts = Counts()
        for row in found:
            counts.add(Counts.unpacked(row.counts))
        counts.broken_joined = self.broken_joined
        return counts

    def write(self, writing: Writing) -> list[ShardInfo]:
        from pyspark.sql import functions as f

        def write(batches: Iterator[Any]) -> Iterator[Any]:
            for info in writing(named(batch) for batch in batches):
                yield pa.RecordBatch.from_arrays([pa.array([json.dumps(asdict(info))])], ["shard"])

        with as_sentence(self.session):
            kept = self.table.filter(f.col(WHY) == 0)
            placed = kept.repartitionById(self.placing.shards, f.col(SHARD)).sortWithinPartitions(
                SHARD, KEY
            )
            found = [
                json.loads(row.shard) for row in placed.mapInArrow(write, "shard string").collect()
            ]
        return [ShardInfo.from_dict(s) for s in found]

    def close(self) -> None:
        for table in self.kept:
            table.unpersist()

    def _read(self, source: Source, name: str, there: dict[str, Any], wanted: list[str]) -> Any:
        """Return the wanted columns, cleaned, and BROKEN_LINE."""
        from pyspark.sql import functions as f
        from pyspark.sql.types import StringType, StructField, StructType

        path = self.recipe.path(name).as_uri()
        if source.is_parquet:
            table = self.session.spark.read.parquet(path)
            plain = [_parquet(n, there[n]) for n in wanted]
            return table.select(*plain, f.lit(None).cast("string").alias(BROKEN_LINE))
        lines = Lines(source, self.recipe.path(name), wanted)

        def parse(batches: Iterator[Any]) -> Iterator[Any]:
            """Make a row of each line; the row of a broken line has BROKEN_LINE only."""
            for batch in batches:
                table, broken = lines.parse(joined(batch.column(0)))
                columns = [table.column(n).cast(pa.string()).combine_chunks() for n in wanted]
                filled = [
                    pa.concat_arrays([_array(c), pa.nulls(broken, pa.string())]) for c in columns
                ]
                marks = pa.concat_arrays(
                    [
                        pa.nulls(table.num_rows, pa.string()),
                        pa.array(["broken"] * broken, pa.string()),
                    ]
                )
                yield pa.RecordBatch.from_arrays(
                    [*filled, marks], [*(safe(n) for n in wanted), BROKEN_LINE]
                )

        schema = StructType(
            [StructField(n, StringType()) for n in (*(safe(n) for n in wanted), BROKEN_LINE)]
        )
        table = self.session.spark.read.text(path, lineSep="\n").mapInArrow(parse, schema)
        return table.select(*(_cleaned(n, source) for n in wanted), BROKEN_LINE)

    def _with_keys(self, table: Any, columns: Columns, used: list[str], part: int) -> Any:
        placing = self.placing

        def keys(batches: Iterator[Any]) -> Iterator[Any]:
            for batch in batches:
                found = placing.keys(named(batch), used, part)
                yield pa.RecordBatch.from_arrays(
                    [*batch.columns, *found], [*batch.schema.names, *(n for n, _ in KEYS_SCHEMA)]
                )

        from pyspark.sql.types import IntegerType, LongType, StructField, StructType

        kinds = [LongType() if kind == pa.int64() else IntegerType() for _, kind in KEYS_SCHEMA]
        added = [
            StructField(name, kind) for (name, _), kind in zip(KEYS_SCHEMA, kinds, strict=True)
        ]
        return table.mapInArrow(keys, StructType([*table.schema.fields, *added]))

    def _joined(self, main: Any, number: int, join: Join, there: dict[str, Any]) -> Any:
        from pyspark.sql import functions as f

        wanted = list(dict.fromkeys((*join.on, *join.take)))
        table = self._keep(self._read(join.source, join.source.path, there, wanted))
        if not join.source.is_parquet:
            found = table.agg(
                f.count(column(wanted[0])), f.sum(f.col(BROKEN_LINE).isNotNull().cast("int"))
            ).collect()[0]
            self.broken_joined += int(found[1] or 0)
            table = _numbered(
                table.filter(f.col(BROKEN_LINE).isNull()),
                [n for n in wanted if there[n] == "number"],
            ).drop(BAD)
        keys = [safe(n) for n in join.on]
        known = table.drop(BROKEN_LINE).dropna(subset=keys)
        many = known.groupBy(*keys).count().filter("count > 1")
        refuse_many(
            join,
            int(many.agg(f.sum("count")).collect()[0][0] or 0),
            lambda: list(many.collect()[0])[:-1],
        )
        taken = [
            column(n).alias(safe(join.prefix + n))
            for n in join.take
            if join.prefix + n not in join.on
        ]
        partner = f.lit(1.0).alias(marker(number))
        return main.join(known.select(*keys, *taken, partner), on=keys, how="left")


class Operations:
    """Build expressions of Spark."""

    def column(self, name: str) -> Any:
        return column(name)

    def constant(self, value: float | str | bool) -> Any:
        from pyspark.sql import functions as f

        return f.lit(value)

    def apply(self, operation: str, *arguments: Any) -> Any:
        return _OPERATIONS[operation](*arguments)


def safe(name: str) -> str:
    """Return a column's name inside Spark. Paceline's own columns (`__x`) keep their names."""
    return name if name.startswith("__") else "c" + name.encode().hex()


def named(batch: Any) -> Any:
    """Rename the columns of a batch to their names in the recipe."""
    return batch.rename_columns(
        [n if n.startswith("__") else bytes.fromhex(n[1:]).decode() for n in batch.schema.names]
    )


def column(name: str) -> Any:
    from pyspark.sql import functions as f

    return f.col(safe(name))


def _array(column: Any) -> Any:
    return pa.concat_arrays(column.chunks) if isinstance(column, pa.ChunkedArray) else column


def _when(condition: Any, then: Any, otherwise: Any) -> Any:
    from pyspark.sql import functions as f

    return f.when(condition, then).otherwise(otherwise)


def _divide(a: Any, b: Any) -> Any:
    from pyspark.sql import functions as f

    return f.when(b != 0.0, a / b)


def _floor(a: Any) -> Any:
    """Round down to a float64. Spark's floor returns an integer, which overflows."""
    from pyspark.sql import functions as f

    whole = f.floor(a).cast("double")
    return f.when(f.abs(a) < 2.0**52, whole).otherwise(a)


def _date(year: Any, month: Any, day: Any) -> Any:
    from pyspark.sql import functions as f

    fits = (month >= 1) & (month <= 12) & (day >= 1) & (day <= 31) & (year >= 1) & (year <= 9999)
    return f.when(fits, f.make_date(year.cast("int"), month.cast("int"), day.cast("int")))


def _function(name: str) -> Any:
    def call(*arguments: Any) -> Any:
        from pyspark.sql import functions as f

        return getattr(f, name)(*arguments)

    return call


def _surely(a: Any) -> Any:
    from pyspark.sql import functions as f

    return f.coalesce(a, f.lit(False))


_OPERATIONS: dict[str, Any] = {
    **OVERLOADED,
    "divide": _divide,
    "floor_divide": lambda a, b: _floor(_divide(a, b)),
    "modulo": lambda a, b: a - _floor(_divide(a, b)) * b,
    "missing": lambda a: a.isNull(),
    "known": lambda a: a.isNotNull(),
    "surely": _surely,
    "floor": _floor,
    "abs": _function("abs"),
    "lower": _function("lower"),
    "when": _when,
    "weekday": lambda y, m, d: (_function("weekday")(_date(y, m, d)) + 1).cast("double"),
    "dayofyear": lambda y, m, d: _function("dayofyear")(_date(y, m, d)).cast("double"),
}


def _cleaned(name: str, source: Source) -> Any:
    """Strip blanks around text, and make words that mean a missing value missing."""
    from pyspark.sql import functions as f

    text = f.btrim(column(name), f.lit(" \t"))
    if source.strip_end:
        text = f.regexp_replace(text, re.escape(source.strip_end) + r"\z", "")
    return f.when(~text.isin(["", *source.missing]), text).alias(safe(name))


def _parquet(name: str, kind: str) -> Any:
    from pyspark.sql import functions as f

    theirs = f.col(f"`{name.replace('`', '``')}`")
    return (
        theirs.cast("string").alias(safe(name))
        if kind == "text"
        else _finite(theirs.cast("double")).alias(safe(name))
    )


def _finite(number: Any) -> Any:
    from pyspark.sql import functions as f

    # This is not true of nan either, which is larger than any number in Spark.
    return f.when(f.abs(number) < float("inf"), number)


def _numbered(table: Any, names: list[str]) -> Any:
    """Convert text to numbers. Text that is not a number becomes missing, and BAD counts it."""
    from pyspark.sql import functions as f

    bad, made = f.lit(0), {}
    for name in names:
        made[safe(name)] = _finite(f.when(column(name).rlike(NUMBER), column(name)).cast("double"))
        bad = bad + f.when(column(name).isNotNull() & made[safe(name)].isNull(), 1).otherwise(0)
    kept = [made[n].alias(n) if n in made else f.col(n) for n in table.columns]
    return table.select(*kept, bad.cast("int").alias(BAD))
