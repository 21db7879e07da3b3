"""`paceline prepare` of a table: read, count, encode, write; whichever engine does it."""

from __future__ import annotations

import platform
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from paceline.data.manifest import Manifest, ShardInfo, make_folder, sweep
from paceline.data.prepare import with_polars, with_spark
from paceline.data.prepare.counts import KEPT, TEST, TRAIN, Counts
from paceline.data.prepare.encode import Encoder, shown
from paceline.data.prepare.placing import Placing, Writing
from paceline.data.prepare.recipe import Columns, Recipe
from paceline.data.prepare.report import as_text, report
from paceline.errors import BadRequest, UnknownName

Say = Callable[[str], None]
ENGINES = ("auto", "spark", "polars")
POLARS_BYTES = 4 << 30  # of source files: up to here one machine's memory does, and is quicker


class Rows(Protocol):
    """The table, cleaned, joined and filtered, wherever it is."""

    def count(self) -> Counts: ...
    def write(self, encoder: Encoder, rows: dict[int, int], folder: Path) -> list[ShardInfo]: ...
    def close(self) -> None: ...


class Engine(Protocol):
    name: str
    master: str

    def __enter__(self) -> Any: ...
    def __exit__(self, *_: Any) -> None: ...
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
    """Shards and their manifest in `out`. Nothing can be read there before everything is in place."""
    seconds: dict[str, float] = {}
    columns, placing, folder = Columns(recipe), Placing.of(recipe, shards), Path(out).resolve()
    chosen = choose(engine, master, recipe, say)
    make_folder(folder, force)
    try:
        with _timed("start", seconds, say, f"starting {chosen.name}{' at ' + chosen.master if chosen.master else ''}"):
            chosen.__enter__()
        try:
            with _timed("read", seconds, say, "reading, joining and filtering"):
                rows = chosen.rows(recipe, columns, placing, persist)
            with _timed("count", seconds, say, "counting: statistics and vocabulary of the training part"):
                counts = rows.count()
            encoder = _encoder(recipe, counts)
            with _timed("write", seconds, say, "encoding and writing the shards"):
                infos = rows.write(encoder, dict(counts.shards), folder)
                infos = _whole(infos, counts, placing, encoder, folder)
            rows.close()
        finally:
            chosen.__exit__(None, None, None)
    finally:
        sweep(folder)
    manifest = Manifest(
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
    (folder / "report.md").write_text(as_text(manifest))
    manifest.write(folder)
    return manifest


def choose(engine: str, master: str, recipe: Recipe, say: Say) -> Engine:
    if engine not in ENGINES:
        raise UnknownName("engine", engine, ENGINES)
    if engine == "polars" and master:
        raise BadRequest(f"--master {master} is Spark's: leave it out, or use --engine spark")
    if engine == "auto":
        engine, why = _better(master, recipe)
        say(f"engine {engine}: {why}")
    return with_polars.PolarsEngine() if engine == "polars" else with_spark.SparkEngine(master or "local[*]")


def _better(master: str, recipe: Recipe) -> tuple[str, str]:
    size = sum(f.stat().st_size if f.is_file() else sum(p.stat().st_size for p in f.rglob("*")) for f in recipe.files())
    mb = f"{size / 1e6:,.0f} MB of source files"
    if master:
        return "spark", f"there is a master, {master}"
    if with_polars.missing() is not None and with_spark.missing() is None:
        return "spark", "Polars is not installed"
    if size <= POLARS_BYTES or with_spark.missing() is not None:
        return "polars", f"{mb} fit into one machine's memory, where Spark's start and shuffles take longer than the work"
    return "spark", f"{mb} are more than the {POLARS_BYTES / 1e9:.0f} GB that one machine should hold at once"


def _encoder(recipe: Recipe, counts: Counts) -> Encoder:
    if not counts.why[KEPT]:
        raise BadRequest(f"recipe {recipe.name}: no row is left of {counts.rows:,}: look at its filters and at missing values")
    if not counts.parts[TRAIN]:
        raise BadRequest(f"recipe {recipe.name}: all {counts.parts[TEST]:,} rows are in the test part: look at [split]")
    return Encoder(recipe, counts)


def _whole(infos: list[ShardInfo], counts: Counts, placing: Placing, encoder: Encoder, folder: Path) -> list[ShardInfo]:
    """Every shard once; empty ones too, so that there are as many as were asked for."""
    by_place = {(s.part, s.number): s for s in infos}
    empty = Writing(placing, encoder, {}, folder)
    for shard in range(placing.shards):
        part, number = placing.part(shard)
        if (part, number) not in by_place and (part == "train" or counts.parts[TEST]):
            empty.rows[shard] = 0
            with empty.open(shard) as writer:
                by_place[part, number] = writer.close()
    return list(by_place.values())


@contextmanager
def _timed(stage: str, seconds: dict[str, float], say: Say, text: str) -> Iterator[None]:
    say(text)
    began = time.perf_counter()
    yield
    seconds[stage] = time.perf_counter() - began
