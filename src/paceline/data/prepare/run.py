"""`paceline prepare` of a table: read, count, encode and write it, with either engine."""

from __future__ import annotations

import platform
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import psutil

from paceline.data.manifest import Manifest, Preparation, ShardInfo
from paceline.data.prepare import with_polars, with_spark
from paceline.data.prepare.columns import Columns
from paceline.data.prepare.counts import KEPT, TEST, TRAIN, Counts
from paceline.data.prepare.encode import Encoder, shown
from paceline.data.prepare.placing import Placing, Writing
from paceline.data.prepare.recipe import Recipe
from paceline.data.prepare.report import as_text, report
from paceline.errors import BadRequest, UnknownName
from paceline.spark.master import usual_master

Say = Callable[[str], None]
ENGINES = ("auto", "spark", "polars")
GROWS = 6  # bytes of a table in memory per byte of its file


class Rows(Protocol):
    """The cleaned, joined and filtered table, in this process or in Spark's executors."""

    def count(self) -> Counts: ...
    def write(self, writing: Writing) -> list[ShardInfo]: ...
    def close(self) -> None: ...


class Engine(Protocol):
    name: str
    master: str

    def __enter__(self) -> Any: ...
    def __exit__(self, *_: Any) -> None: ...
    def progress(self) -> str: ...
    def rows(self, recipe: Recipe, columns: Columns, placing: Placing, persist: bool) -> Rows: ...


def prepare(
    recipe: Recipe,
    out: str | Path,
    engine: str = "auto",
    master: str = "",
    shards: int = 4,
    force: bool = False,
    persist: bool = True,
    say: Say = lambda _: None,
) -> Manifest:
    """Write shards to `out`, then their manifest, without which they are not read."""
    seconds: dict[str, float] = {}
    columns, placing = Columns(recipe), Placing.of(recipe, shards)
    chosen = choose(engine, master, recipe, say)
    with Preparation(out, force) as made:
        with _timed(
            "start",
            seconds,
            say,
            f"starting {chosen.name}{' at ' + chosen.master if chosen.master else ''}",
        ):
            chosen.__enter__()
        try:
            progress = chosen.progress
            with _timed("read", seconds, say, "reading, joining and filtering", progress):
                rows = chosen.rows(recipe, columns, placing, persist)
            try:
                with _timed(
                    "count",
                    seconds,
                    say,
                    "counting: statistics and vocabulary of the training part",
                    progress,
                ):
                    counts = rows.count()
                encoder = _encoder(recipe, counts, columns)
                writing = Writing(placing, encoder, dict(counts.shards), made.folder, made.id)
                with _timed("write", seconds, say, "encoding and writing the shards", progress):
                    infos = _whole(rows.write(writing), counts, writing)
            finally:
                rows.close()
        finally:
            chosen.__exit__(None, None, None)
        manifest = _manifest(recipe, chosen, infos, counts, placing, encoder, seconds)
        made.finish(manifest, as_text(manifest))
    return manifest


def _manifest(
    recipe: Recipe,
    chosen: Engine,
    infos: list[ShardInfo],
    counts: Counts,
    placing: Placing,
    encoder: Encoder,
    seconds: dict[str, float],
) -> Manifest:
    return Manifest(
        kind="table",
        name=recipe.name,
        engine=chosen.name,
        master=chosen.master,
        inputs={"dtype": "float32", "shape": [encoder.width]},
        targets={
            "dtype": encoder.target_dtype,
            "classes": None if encoder.classes is None else [shown(c) for c in encoder.classes],
        },
        shards=sorted(infos, key=lambda s: (s.part != "train", s.number)),
        columns=encoder.described(),
        counted_from_rows=encoder.learnt,
        report=report(counts, placing, encoder),
        seconds={k: round(v, 4) for k, v in seconds.items()},
        machine={"host": socket.gethostname(), "python": platform.python_version()},
    )


def choose(engine: str, master: str, recipe: Recipe, say: Say) -> Engine:
    if engine not in ENGINES:
        raise UnknownName("engine", engine, ENGINES)
    if engine == "polars" and master:
        raise BadRequest(f"--master {master} needs Spark: leave it out, or use --engine spark")
    if engine == "auto":
        engine, why = _better(master, recipe)
        say(f"engine {engine}: {why}")
    return (
        with_polars.PolarsEngine()
        if engine == "polars"
        else with_spark.SparkEngine(usual_master(master))
    )


def _better(master: str, recipe: Recipe) -> tuple[str, str]:
    size = sum(
        f.stat().st_size if f.is_file() else sum(p.stat().st_size for p in f.rglob("*"))
        for f in recipe.files()
    )
    there = psutil.virtual_memory().available
    held = f"{size / 1e6:,.0f} MB of source files"
    if master:
        return "spark", f"a master is given, {master}"
    if with_polars.missing() is not None:
        return "spark", "Polars is not installed"
    free = f"the {there / 1e9:.0f} GB of free memory"
    if size * GROWS <= there:
        why = f"{held} fit into {free}, and Spark would take longer to start than Polars to finish"
        return "polars", why
    if with_spark.missing() is not None:
        return "polars", f"{held} may not fit into {free}, but pyspark is not installed"
    return "spark", f"{held} do not fit into {free} (text takes {GROWS} times as much there)"


def _encoder(recipe: Recipe, counts: Counts, columns: Columns) -> Encoder:
    if not counts.why[KEPT]:
        raise BadRequest(
            f"recipe {recipe.name}: no row is left of {counts.rows:,}: check its filters and the"
            " missing values"
        )
    if not counts.parts[TRAIN]:
        raise BadRequest(
            f"recipe {recipe.name}: all {counts.parts[TEST]:,} rows are in the test part: check"
            " [split]"
        )
    return Encoder(recipe, counts, columns.kinds)


def _whole(infos: list[ShardInfo], counts: Counts, writing: Writing) -> list[ShardInfo]:
    """Return each shard once, and write empty ones for those that got no rows."""
    by_place = {(s.part, s.number): s for s in infos}
    for shard in range(writing.placing.shards):
        part, number = writing.placing.part(shard)
        if (part, number) not in by_place and (part == "train" or counts.parts[TEST]):
            writing.rows[shard] = 0
            with writing.open(shard) as writer:
                by_place[part, number] = writer.close()
    return list(by_place.values())


@contextmanager
def _timed(
    stage: str,
    seconds: dict[str, float],
    say: Say,
    text: str,
    progress: Callable[[], str] = lambda: "",
) -> Iterator[None]:
    say(text)
    began, over = time.perf_counter(), threading.Event()

    def tell() -> None:
        while not over.wait(1.0):
            if done := progress():
                say(f"{text}: {done}")

    threading.Thread(target=tell, daemon=True).start()
    try:
        yield
    finally:
        over.set()
    seconds[stage] = time.perf_counter() - began
