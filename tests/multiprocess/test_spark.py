"""Polars and a real Spark on a table with many kinds of errors: the same shards, byte for byte."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.tables import changed, write_table

from paceline.data import manifest
from paceline.data.export import export
from paceline.data.manifest import Manifest
from paceline.data.prepare.images import prepare_images
from paceline.data.prepare.recipe import Recipe
from paceline.data.prepare.run import prepare
from paceline.errors import RunFailed
from paceline.spark.java import pyspark_missing
from paceline.spark.session import Session

pytestmark = [
    pytest.mark.skipif(pyspark_missing() is not None, reason=str(pyspark_missing())),
    pytest.mark.native_threads,
]

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


ODD = """
[source]
path = "a.csv"
test = "b.csv"
numbers = ["X", "x", "class"]
[derive]
D = "x - X"
d = "x * X"
[[numeric]]
columns = ["X", "x", "D", "d"]
[[categorical]]
columns = ["my.y"]
[target]
column = "class"
"""


def assert_same(one: Manifest, other: Manifest) -> None:
    for a, b in zip(one.shards, other.shards, strict=True):
        assert (a.part, a.number, a.rows) == (b.part, b.number, b.rows)
        assert (a.inputs.sha256, a.targets.sha256) == (b.inputs.sha256, b.targets.sha256)
    assert one.columns == other.columns
    assert one.report == other.report


@pytest.fixture
def spark() -> Iterator[Session]:
    """Share one session: starting a JVM takes longer than the tests."""
    quick = {
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.adaptive.enabled": "false",
    }
    with Session("local[2]", "tests", quick) as session:
        yield session


def both(recipe: Recipe, out: Path, **options: object) -> Manifest:
    """Prepare with both engines, and check that they agree."""
    made = [
        prepare(recipe, out / e, e, "local[2]" if e == "spark" else "", **options)
        for e in ("polars", "spark")
    ]  # type: ignore[arg-type]
    assert_same(*made)
    return made[0]


@pytest.mark.slow  # most of it is the start of a JVM; test_cluster.py starts one in `make test`
def test_both_engines_give_the_same_shards(spark: Session, tmp_path: Path) -> None:
    first = both(Recipe.read(write_table(tmp_path / "a", rows=600)), tmp_path / "one", shards=3)
    assert first.report["broken_lines"] > 3
    assert first.report["bad_numbers"] > 0


@pytest.mark.slow
def test_an_executors_error_reaches_the_user_with_its_own_message(
    spark: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest.secrets, "token_hex", lambda size: "0" * 2 * size)
    # A folder with the name of a shard's file.
    (tmp_path / "blocked" / "train-00001-00000000.inputs.npy").mkdir(parents=True)
    with pytest.raises(RunFailed, match=r"train-00001-00000000\.inputs\.npy cannot be written"):
        prepare(Recipe.read(write_table(tmp_path / "d")), tmp_path / "blocked", "spark", "local[2]")
    assert not (tmp_path / "blocked" / "manifest.json").exists()


@pytest.mark.slow
def test_odder_tables(spark: Session, tmp_path: Path) -> None:
    """Capitals and dots in names, open quotes, bytes that are not UTF-8, reordered columns."""
    folder = tmp_path / "odd"
    folder.mkdir()
    words = [b"v", b'"u"v', b' "w,x" ', b"\xff", b'"open', b"Z", b"#no", b'"a ""q"""']
    lines = [b"%d,%s,%d,%d" % (i, words[i % len(words)], 10**9 + i, 7 + i % 2) for i in range(160)]
    (folder / "a.csv").write_bytes(b"\xef\xbb\xbfX, my.y,x,class\r\n" + b"\r\n".join(lines))
    tests = [b"%d,%d,%s,1e400" % (7 + i % 2, i, words[i % 8]) for i in range(30)]
    (folder / "b.csv").write_bytes(b"class,x,my.y,X\n" + b"\n".join(tests))
    (folder / "r.toml").write_text(ODD)
    found = both(Recipe.read(folder / "r.toml"), tmp_path / "one")
    assert found.report["broken_lines"] > 10
    assert found.rows("test") > 10
    both(
        changed(tmp_path / "b", "test = 0.25", 'where = "month > 9"'),
        tmp_path / "two",
        shards=2,
        persist=False,
    )
    both(
        changed(tmp_path / "c", 'missing = "mean"', 'missing = "drop"'),
        tmp_path / "three",
        shards=1,
    )
    both(
        changed(tmp_path / "d", 'on = ["town"]', 'on = ["town"]\nhow = "inner"'),
        tmp_path / "four",
        shards=1,
    )


@pytest.mark.slow
def test_parquet_and_images(spark: Session, tmp_path: Path) -> None:
    folder = tmp_path / "p"
    folder.mkdir()
    random = np.random.default_rng(0)
    x = np.where(random.random(200) < 0.2, np.nan, random.normal(size=200))
    table = {
        "x": x,
        "id": np.arange(200),
        "word": random.choice(["a", "b", "c"], 200).astype(str),
        "y": random.random(200),
    }
    pq.write_table(pa.table(table), folder / "t.parquet")
    (folder / "r.toml").write_text(PARQUET)
    both(Recipe.read(folder / "r.toml"), tmp_path / "out")
    export("fashion-mini", tmp_path / "images", most=3)
    made = [
        prepare_images(str(tmp_path / "images"), tmp_path / e, e, m)
        for e, m in (("local", ""), ("spark", "local[2]"))
    ]
    assert_same(*made)
