"""Tables to shards: what is in them, the same whatever the order, and never half of them."""

from __future__ import annotations

import csv
import json
import math
import re
import resource
import subprocess
import sys
from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tests.tables import changed, write_table

import paceline
from paceline.data.manifest import MANIFEST, ArrayWriter, Manifest
from paceline.data.prepare.counts import Counts
from paceline.data.prepare.exact import UNIT, exact_sum, mean_and_spread
from paceline.data.prepare.expressions import Expression
from paceline.data.prepare.keys import row_keys
from paceline.data.prepare.recipe import Recipe
from paceline.data.prepare.report import as_text
from paceline.data.prepare.run import choose, prepare
from paceline.errors import BadRequest, DataCorrupt, DataUnavailable, RunFailed

numbers = hnp.arrays(np.float64, st.integers(1, 40), elements=st.floats(-1e300, 1e300))


def values(manifest: Manifest, folder: Path, part: str) -> tuple[np.ndarray, np.ndarray]:
    shards = manifest.of(part)
    return tuple(np.concatenate([np.load(folder / getattr(s, what).file) for s in shards]) for what in ("inputs", "targets"))  # type: ignore[return-value]


@given(numbers, st.randoms())
def test_sums_do_not_depend_on_the_order(array: np.ndarray, shuffle: object) -> None:
    exact = sum((Fraction(float(x)) for x in array), Fraction(0))
    assert Fraction(exact_sum(array), 1 << UNIT) == exact
    cut = len(array) // 3
    assert exact_sum(array[cut:]) + exact_sum(array[:cut]) == exact_sum(array[::-1])


def test_mean_and_spread_are_numpys() -> None:
    array = np.random.default_rng(0).normal(1e6, 1e-2, 1000)
    mean, spread = mean_and_spread(len(array), exact_sum(array), exact_sum(array * array))
    assert mean == pytest.approx(array.mean(), rel=1e-15)
    assert spread == pytest.approx(array.std(), rel=1e-2)  # squares of 1e6 have lost digits; the sum has not
    assert mean_and_spread(3, exact_sum(np.full(3, 0.1)), exact_sum(np.full(3, 0.1) ** 2))[1] == pytest.approx(0.0, abs=1e-9)


texts = st.one_of(st.none(), st.text(max_size=6))


@given(st.lists(st.tuples(texts, texts, st.one_of(st.none(), st.floats(allow_nan=False))), min_size=1, max_size=30), st.data())
def test_a_row_has_one_key_wherever_it_is(rows: list[tuple[object, ...]], data: st.DataObject) -> None:
    columns = [pa.array(c, k) for c, k in zip(zip(*rows, strict=True), (pa.string(), pa.string(), pa.float64()), strict=True)]
    keys = row_keys(columns, 3)
    cut = data.draw(st.integers(0, len(rows)))
    parts = [row_keys([c.slice(a, b - a) for c in columns], 3) for a, b in ((0, cut), (cut, len(rows))) if b > a]
    assert np.array_equal(np.concatenate(parts), keys)
    assert len(set(keys.tolist())) == len({(a, b, None if c is None else c + 0.0) for a, b, c in rows})  # type: ignore[operator]


def test_keys_are_spread_evenly() -> None:
    keys = row_keys([pa.array([str(i) for i in range(20_000)])], 0)
    shares = np.bincount((keys % np.uint64(16)).astype(int), minlength=16) / len(keys)
    assert abs(shares - 1 / 16).max() < 0.012  # seven standard deviations


def by_hand(folder: Path) -> list[dict[str, object]]:
    """The same table in plain Python: rows that stay, by the recipe's own words."""
    found = []
    with (folder / "people.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.reader((line for line in file if not line.startswith("#")), skipinitialspace=True):
            if len(row) != 7 or row[0] == "id":
                continue
            clean = [v.strip() for v in row]
            number = [None if v in ("NA", "?", "", "old") else float(v) for v in (clean[1], clean[3])]
            if number[1] is not None:
                found.append({"age": number[0], "town": clean[2], "rich": float(number[1] > 50 or number[1] == 17)})
    return found


def test_the_shards_hold_what_the_table_says(tmp_path: Path) -> None:
    manifest = prepare(Recipe.read(write_table(tmp_path)), tmp_path / "out", "polars", shards=3)
    expected = by_hand(tmp_path)
    train, test = values(manifest, tmp_path / "out", "train"), values(manifest, tmp_path / "out", "test")
    assert len(train[0]) + len(test[0]) == len(expected) == manifest.report["rows_kept"]
    assert Counter(np.concatenate([train[1], test[1]]).tolist()) == Counter(int(r["rich"]) for r in expected)  # type: ignore[call-overload]
    assert 0.15 < len(test[0]) / len(expected) < 0.35

    names = [n for c in manifest.columns for n in c["names"]]
    age = manifest.columns[0]
    ages = np.concatenate([train[0], test[0]])[:, 0] * age["spread"] + age["middle"]
    known = np.concatenate([train[0], test[0]])[:, names.index("age is missing")] == 0
    assert Counter(np.round(ages[known], 3)) == Counter(float(r["age"]) for r in expected if r["age"] is not None)  # type: ignore[arg-type]
    # statistics come from the training part only: there, and only there, is the mean zero and the spread one
    own = train[0][train[0][:, names.index("age is missing")] == 0, 0]
    assert own.mean() == pytest.approx(0.0, abs=1e-6)
    assert own.std() == pytest.approx(1.0, abs=1e-6)
    assert train[0][train[0][:, names.index("age is missing")] == 1, 0] == pytest.approx(0.0, abs=1e-6)
    words = next(c for c in manifest.columns if c["from"] == "town")
    assert len(words["words"]) == 5
    place = names.index(f"town={words['words'][0]}")
    count = sum(r["town"] == words["words"][0] for r in expected)
    assert int(np.concatenate([train[0], test[0]])[:, place].sum()) == count
    assert manifest.report["broken_lines"] == 1 + sum(line.count(",") in (2, 8) for line in broken(tmp_path))
    assert manifest.report["broken_lines_of_joined_tables"] == 1
    assert manifest.report["bad_numbers"] == (tmp_path / "people.csv").read_text().count(",old,")
    assert "broken lines" in as_text(manifest)


def broken(folder: Path) -> list[str]:
    return [line for line in (folder / "people.csv").read_text().splitlines() if line in ("1,2,3", "a,b,c,d,e,f,g,h,i")]


def test_the_same_bytes_every_time_and_for_any_order_of_lines(tmp_path: Path) -> None:
    first = prepare(Recipe.read(write_table(tmp_path)), tmp_path / "a", "polars")
    head, *lines = (tmp_path / "people.csv").read_text().splitlines()
    (tmp_path / "people.csv").write_text("\n".join([head, *reversed(lines)]) + "\n")
    second = prepare(Recipe.read(tmp_path / "recipe.toml"), tmp_path / "b", "polars")
    assert [s.inputs.sha256 for s in first.shards] == [s.inputs.sha256 for s in second.shards]
    assert first.columns == second.columns


def test_counts_travel_and_add_up(tmp_path: Path) -> None:
    recipe = Recipe.read(write_table(tmp_path))
    counts = Counts(rows=3)
    counts.targets[0]["a"] = 2
    counts.words["town"] = Counter({"x": 2, "y": 1})
    again = Counts.unpacked(counts.packed())
    assert again == counts
    again.add(counts)
    assert again.rows == 6
    assert again.words["town"]["x"] == 4
    assert recipe.name == "recipe"


def test_a_parquet_file_gives_the_same_as_its_csv(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    folder = tmp_path / "t"
    folder.mkdir()
    ages = [20.0, 30.0, None, 50.0, 61.5] * 8
    rows = {"age": ages, "town": ["a", "b", None, "b", "a"] * 8, "id": list(range(40)), "y": [0, 1, 1, 0, 1] * 8}
    pq.write_table(pa.table(rows), folder / "t.parquet")
    text = "\n".join(",".join("" if v is None else str(v) for v in row) for row in zip(*rows.values(), strict=True))
    (folder / "t.csv").write_text("age,town,id,y\n" + text + "\n")
    body = """
[[numeric]]
columns = ["age", "id"]
[[categorical]]
columns = ["town"]
[target]
column = "y"
[split]
where = "id >= 30"
"""
    (folder / "p.toml").write_text('[source]\npath = "t.parquet"\n' + body)
    (folder / "c.toml").write_text('[source]\npath = "t.csv"\nnumbers = ["age", "id", "y"]\n' + body)
    found = [prepare(Recipe.read(folder / f"{k}.toml"), tmp_path / k, "polars") for k in "pc"]
    assert found[0].columns == found[1].columns
    for part in ("train", "test"):  # keys follow from what was read, text here, numbers there: the order differs
        one, other = (values(m, tmp_path / k, part)[0] for m, k in zip(found, "pc", strict=True))
        assert sorted(map(tuple, one)) == sorted(map(tuple, other))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('columns = ["age", "rest", "per"]', 'columns = ["agee"]', "unknown numeric column 'agee'. Did you mean 'age'?"),
        ('rich = "income > 50 or income == 17"', 'rich = "incme > 50"', "incme"),
        ('rich = "income > 50 or income == 17"', 'rich = "town > 50"', "is a number, not a text"),
        ('rich = "income > 50 or income == 17"', 'rich = "income > 5000"', "only the class '0'"),
        ('decade = "age // 10"', "decade = \"__import__('os')\"", "unknown function"),
        ('decade = "age // 10"', 'decade = "age ** 2"', "use + - * /"),
        ('decade = "age // 10"', 'decade = "age //"', "is no expression"),
        ('on = ["town"]', 'on = ["twn"]', "unknown column to join on"),
        ('take = ["size", "country"]', 'take = ["size", "land"]', "'land'"),
        ("test = 0.25", "test = 1.5", "split.test=1.5"),
        ("test = 0.25", 'where = "known(year)"', "all"),
        ('transform = "log1p"', 'transform = "log"', "unknown transform"),
        ("period = 12", "period = 0", "period"),
        ('column = "rich"', 'column = "rich"\nkind = "clas"', "clas"),
        ('column = "rich"', 'colum = "rich"', "colum"),
        ('path = "people.csv"', 'path = "poeple.csv"', "does not exist"),
        ('columns = ["town", "odd"', 'columns = ["town", "town"', "feature twice"),
    ],
)
def test_bad_recipes_are_refused_with_a_sentence(old: str, new: str, words: str, tmp_path: Path) -> None:
    with pytest.raises((BadRequest, DataUnavailable), match=re.escape(words)):
        prepare(changed(tmp_path / "t", old, new), tmp_path / "out", "polars")
    assert not (tmp_path / "out" / MANIFEST).exists()


def test_the_test_part_by_a_condition(tmp_path: Path) -> None:
    manifest = prepare(changed(tmp_path / "t", "test = 0.25", 'where = "month > 9"'), tmp_path / "out", "polars")
    place = [n for c in manifest.columns for n in c["names"]].index("month (sin)")
    found = np.unique(np.round(values(manifest, tmp_path / "out", "test")[0][:, place], 3))
    assert found == pytest.approx(sorted(math.sin(2 * math.pi * m / 12) for m in (10, 11, 12)), abs=1e-3)
    assert manifest.rows("test") > 50


def test_rows_that_belong_together_stay_on_one_side(tmp_path: Path) -> None:
    manifest = prepare(changed(tmp_path / "t", "test = 0.25", 'by = ["town"]\ntest = 0.4'), tmp_path / "out", "polars")
    words = next(c for c in manifest.columns if c["from"] == "town")
    names = [n for c in manifest.columns for n in c["names"]]
    places = [names.index(n) for n in words["names"]]
    towns = {part: values(manifest, tmp_path / "out", part)[0][:, places].any(axis=0) for part in ("train", "test")}
    assert towns["train"].any()
    assert not (towns["train"] & towns["test"]).any()


def test_a_join_that_would_multiply_rows(tmp_path: Path) -> None:
    recipe = write_table(tmp_path)
    with (tmp_path / "towns.csv").open("a") as file:
        file.write("Bonn,7,D\n")
    with pytest.raises(BadRequest, match="2 of its rows have the same"):
        prepare(Recipe.read(recipe), tmp_path / "out", "polars")


def test_engines_are_chosen_and_refused(tmp_path: Path) -> None:
    recipe, said = Recipe.read(write_table(tmp_path)), []
    assert choose("auto", "", recipe, said.append).name == "polars"
    assert "fit into one machine's memory" in said[0]
    assert choose("auto", "local[2]", recipe, said.append).name == "spark"
    with pytest.raises(BadRequest, match="Did you mean 'polars'"):
        choose("polar", "", recipe, said.append)
    with pytest.raises(BadRequest, match=r"is Spark's"):
        choose("polars", "local[2]", recipe, said.append)
    with pytest.raises(BadRequest, match="does not answer"):
        prepare(recipe, tmp_path / "out", "spark", "spark://127.0.0.1:1")
    with pytest.raises(BadRequest, match="write local"):
        prepare(recipe, tmp_path / "out", "spark", "sparky")
    with pytest.raises(BadRequest, match="1 to 99,999"):
        prepare(recipe, tmp_path / "out", shards=0)


def test_a_folder_is_whole_or_not_read(tmp_path: Path) -> None:
    recipe, out = Recipe.read(write_table(tmp_path)), tmp_path / "out"
    prepare(recipe, out, "polars")
    with pytest.raises(BadRequest, match="holds shards already"):
        prepare(recipe, out, "polars")
    prepare(recipe, out, "polars", force=True)
    (out / MANIFEST).unlink()
    with pytest.raises(DataCorrupt, match="did not finish"):
        Manifest.read(out)
    prepare(recipe, out, "polars")  # what was left of it is made anew
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("years of work")
    with pytest.raises(BadRequest, match=r"has other things in it \(thesis.tex"):
        prepare(recipe, other, "polars", force=True)
    assert (other / "thesis.tex").exists()


def test_a_full_disk_leaves_nothing_that_can_be_read(tmp_path: Path) -> None:
    """The system refuses to write more than 8 kB into a file, as it does when a disk is full."""
    recipe = write_table(tmp_path, rows=3000)
    done = subprocess.run(
        [Path(sys.executable).with_name("paceline"), "prepare", "--recipe", str(recipe), "--out", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192)),
    )
    assert done.returncode == 1, done.stderr
    assert "cannot be written: File too large. What was begun is removed" in done.stderr
    assert [p.name for p in (tmp_path / "out").iterdir() if p.name.startswith(".") or p.name == MANIFEST] == []
    with pytest.raises((DataCorrupt, DataUnavailable)):
        Manifest.read(tmp_path / "out")


def test_two_attempts_at_one_shard(tmp_path: Path) -> None:
    """Spark may run a task twice, at the same time even: both write aside, and the last rename wins with the same bytes."""
    rows = np.arange(12, dtype=np.float32).reshape(6, 2)
    one, other = (ArrayWriter(tmp_path / "a.npy", "float32", 6, (2,)) for _ in range(2))
    one.write(rows[:3])
    other.write(rows)
    first = other.close()
    one.write(rows[3:])
    assert one.close() == first
    assert np.array_equal(np.load(tmp_path / "a.npy"), rows)
    short = ArrayWriter(tmp_path / "b.npy", "float32", 6, (2,))
    short.write(rows[:2])
    with pytest.raises(RunFailed, match="2 rows came, 6 were counted"):
        short.close()
    assert sorted(p.name for p in tmp_path.iterdir() if p.suffix != ".toml") == ["a.npy"]


def test_training_on_shards(tmp_path: Path) -> None:
    prepare(Recipe.read(write_table(tmp_path)), tmp_path / "out", "polars")
    run = paceline.train(
        data=f"shards:{tmp_path / 'out'}",
        model="mlp:hidden=16",
        metric="auc",
        strategy="allreduce",
        workers=3,
        epochs=4,
        optimizer="adam",
        transport="inproc",
        out=str(tmp_path / "run"),
        batch_size=16,
    )
    assert run.record["config"]["shard"] == "static"
    assert run.record["data"]["engine"] == "polars"
    assert run.record["result"]["samples"] == 4 * run.record["data"]["rows"]["train"]
    assert run.record["result"]["metric"]["value"] > 0.4


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda p: p.write_bytes(p.read_bytes()[:-4]), "is damaged"),
        (lambda p: p.write_bytes(p.read_bytes()[:-4] + b"\x00\x01\x02\x03"), r"SHA-256"),
        (lambda p: p.write_bytes(b"nonsense" + p.read_bytes()[8:]), "is damaged"),
        (lambda p: p.unlink(), "is missing"),
    ],
)
def test_a_damaged_shard_is_named(damage: object, words: str, tmp_path: Path) -> None:
    prepare(Recipe.read(write_table(tmp_path)), tmp_path / "out", "polars")
    damage(tmp_path / "out" / "train-00002.inputs.npy")  # type: ignore[operator]
    with pytest.raises((DataCorrupt, DataUnavailable), match=rf"train-00002\.inputs\.npy.*{words}"):
        paceline.load_data(f"shards:{tmp_path / 'out'}")


def test_a_manifest_that_is_none(tmp_path: Path) -> None:
    for text, words in (("{", "cannot be read"), (json.dumps({"schema": 9}), "another version"), ("{}", "not a manifest")):
        (tmp_path / MANIFEST).write_text(text)
        with pytest.raises(DataCorrupt, match=words):
            Manifest.read(tmp_path)
    with pytest.raises(DataUnavailable, match="no such folder"):
        paceline.load_data("shards:nowhere")


def test_expressions_know_their_columns() -> None:
    expression = Expression.parse("when(a > 1 and not missing(b), lower(c), 'x')", "here")
    assert expression.columns == {"a", "b", "c"}
    assert expression.kind({"a": "number", "b": "text", "c": "text"}, "here") == "text"
    with pytest.raises(BadRequest, match="add 'a' to its `numbers`"):
        Expression.parse("a + 1", "here").kind({"a": "text"}, "here")


def test_shards_of_another_process_are_mapped_anew(tmp_path: Path) -> None:
    import pickle

    prepare(Recipe.read(write_table(tmp_path)), tmp_path / "out", "polars")
    train, _ = paceline.load_data(f"shards:{tmp_path / 'out'}")
    again = pickle.loads(pickle.dumps(train))
    everything = torch.arange(len(train))  # type: ignore[arg-type]
    order = torch.randperm(len(everything), generator=torch.Generator().manual_seed(0))
    for indices in (everything, order, order[:1]):
        for a, b in zip(train.batch(indices), again.batch(indices), strict=True):  # type: ignore[union-attr]
            assert torch.equal(a, b)
    whole = train.batch(everything)[0]  # type: ignore[union-attr]
    assert torch.equal(train.batch(order)[0], whole[order])  # type: ignore[union-attr]
    assert len(pickle.dumps(train)) < 20_000  # the numbers themselves do not travel
    assert math.isfinite(float(whole.sum()))


def test_a_run_does_not_go_on_with_other_shards(tmp_path: Path) -> None:
    recipe = write_table(tmp_path)
    prepare(Recipe.read(recipe), tmp_path / "out", "polars", shards=2)
    options = {"model": "mlp:hidden=4", "transport": "inproc", "checkpoint_every": "2", "batch_size": 16}
    paceline.train(data=f"shards:{tmp_path / 'out'}", steps=4, out=str(tmp_path / "run"), **options)
    table = (tmp_path / "people.csv").read_text().splitlines()
    (tmp_path / "people.csv").write_text("\n".join([*table[:5], *table[6:], table[5].replace("2013", "2012")]) + "\n")
    prepare(Recipe.read(recipe), tmp_path / "out", "polars", shards=2, force=True)
    with pytest.raises(BadRequest, match=r"content of its shards|number of training samples"):
        paceline.train(resume=str(tmp_path / "run"), steps=8)
