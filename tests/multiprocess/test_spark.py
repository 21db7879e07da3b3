"""The two engines, on a table with everything that can be wrong with one: the same shards, byte for byte. A real Spark."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.tables import changed, write_table

from paceline.data.manifest import Manifest
from paceline.data.prepare import run
from paceline.data.prepare.recipe import Recipe
from paceline.data.prepare.run import prepare
from paceline.errors import RunFailed
from paceline.spark.java import pyspark_missing
from paceline.spark.session import Session

pytestmark = pytest.mark.skipif(pyspark_missing() is not None, reason=str(pyspark_missing()))

PARQUET = """
[source]
path = "t.parquet"
[derive]
big = "id > 10 and known(x)"
[[numeric]]
columns = ["x", "id", "big"]
flag = true
[[categorical]]
columns = ["word"]
[target]
column = "y"
kind = "number"
"""


def assert_same(one: Manifest, other: Manifest) -> None:
    for a, b in zip(one.shards, other.shards, strict=True):
        assert (a.part, a.number, a.rows, a.inputs, a.targets) == (b.part, b.number, b.rows, b.inputs, b.targets)
    assert one.columns == other.columns
    assert one.report == other.report


@pytest.fixture
def spark() -> Iterator[Session]:
    """One session for all that follows: starting a JVM takes longer than the work."""
    with Session("local[2]", "tests", {"spark.sql.shuffle.partitions": "2"}) as session:
        yield session


def test_both_engines_give_the_same_shards(spark: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = iter(range(99))

    def both(recipe: Recipe, **options: object) -> Manifest:
        out = tmp_path / f"out-{next(folders)}"
        made = [prepare(recipe, out / e, e, "local[2]" if e == "spark" else "", **options) for e in ("polars", "spark")]  # type: ignore[arg-type]
        assert_same(*made)
        return made[0]

    first = both(Recipe.read(write_table(tmp_path / "a", rows=600)), shards=3)
    assert first.report["broken_lines"] > 3
    assert first.report["bad_numbers"] > 0
    both(changed(tmp_path / "b", "test = 0.25", 'where = "month > 9"'), shards=2, persist=False)
    both(changed(tmp_path / "c", 'missing = "mean"', 'missing = "drop"'), shards=1)

    folder = tmp_path / "p"
    folder.mkdir()
    random = np.random.default_rng(0)
    x = np.where(random.random(200) < 0.2, np.nan, random.normal(size=200))
    table = {"x": x, "id": np.arange(200), "word": random.choice(["a", "b", "c"], 200).astype(str), "y": random.random(200)}
    pq.write_table(pa.table(table), folder / "t.parquet")
    (folder / "r.toml").write_text(PARQUET)
    both(Recipe.read(folder / "r.toml"))

    # what goes wrong in an executor is said as it was said there
    blocked = tmp_path / "blocked" / "train-00001.inputs.npy"
    monkeypatch.setattr(run, "make_folder", lambda folder, force: blocked.mkdir(parents=True))  # in a shard's way
    with pytest.raises(RunFailed, match=r"train-00001\.inputs\.npy cannot be written"):
        prepare(Recipe.read(write_table(tmp_path / "d")), tmp_path / "blocked", "spark", "local[2]")
    assert not (tmp_path / "blocked" / "manifest.json").exists()
