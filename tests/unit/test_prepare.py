"""Tables to shards: their content, the same for any order of rows, and never half of them."""

from __future__ import annotations

import csv
import json
import math
import re
import resource
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from datetime import date, timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tests.tables import changed, write_table

import paceline
from paceline.data.manifest import MANIFEST, ArrayWriter, Manifest, Preparation
from paceline.data.prepare.counts import Counts
from paceline.data.prepare.exact import UNIT, exact_sums, mean_and_spread
from paceline.data.prepare.expressions import Expression
from paceline.data.prepare.keys import row_keys
from paceline.data.prepare.recipe import Recipe
from paceline.data.prepare.report import as_text
from paceline.data.prepare.run import choose, prepare
from paceline.errors import BadRequest, DataCorrupt, DataUnavailable, RunFailed

numbers = hnp.arrays(np.float64, st.integers(1, 40), elements=st.floats(-1e300, 1e300))


def values(manifest: Manifest, folder: Path, part: str) -> tuple[np.ndarray, np.ndarray]:
    shards = manifest.of(part)
    return tuple(
        np.concatenate([np.load(folder / getattr(s, what).file) for s in shards])
        for what in ("inputs", "targets")
    )  # type: ignore[return-value]


@given(numbers)
def test_sums_do_not_depend_on_the_order(array: np.ndarray) -> None:
    times = np.arange(len(array)) % 3
    pairs = [(Fraction(float(x)), int(n)) for x, n in zip(array, times, strict=True)]
    found = exact_sums(array, times)
    assert Fraction(found[0], 1 << UNIT) == sum((x * n for x, n in pairs), Fraction(0))
    assert Fraction(found[1], 1 << UNIT) == sum((x * x * n for x, n in pairs), Fraction(0))
    cut = len(array) // 3
    parts = exact_sums(array[cut:], times[cut:]), exact_sums(array[:cut], times[:cut])
    assert tuple(map(sum, zip(*parts, strict=True))) == exact_sums(array[::-1], times[::-1])


@pytest.mark.parametrize(
    ("values", "mean", "spread"),
    [
        ([1.7e9 + 0.1, 1.7e9 + 1.1] * 5, 1.7e9 + 0.6, 0.5),  # seconds since 1970
        ([0.1] * 7, 0.1, 0.0),
        ([1e160, 2e160, 3e160], 2e160, (2 / 3) ** 0.5 * 1e160),
        ([1e-200, 3e-200], 2e-200, 1e-200),
    ],
)
def test_mean_and_spread(values: list[float], mean: float, spread: float) -> None:
    array = np.array(values)
    found = mean_and_spread(len(array), *exact_sums(array, np.ones(len(array), np.int64)))
    assert found == pytest.approx((mean, spread), rel=1e-12)


texts = st.one_of(st.none(), st.text(max_size=6))


@given(
    st.lists(
        st.tuples(texts, texts, st.one_of(st.none(), st.floats(allow_nan=False))),
        min_size=1,
        max_size=30,
    ),
    st.data(),
)
def test_a_row_has_one_key_wherever_it_is(
    rows: list[tuple[object, ...]], data: st.DataObject
) -> None:
    columns = [
        pa.array(c, k)
        for c, k in zip(
            zip(*rows, strict=True), (pa.string(), pa.string(), pa.float64()), strict=True
        )
    ]
    keys = row_keys(columns, 3)
    cut = data.draw(st.integers(0, len(rows)))
    parts = [
        row_keys([c.slice(a, b - a) for c in columns], 3)
        for a, b in ((0, cut), (cut, len(rows)))
        if b > a
    ]
    assert np.array_equal(np.concatenate(parts), keys)
    assert len(set(keys.tolist())) == len(
        {(a, b, None if c is None else c + 0.0) for a, b, c in rows}
    )  # type: ignore[operator]


def test_keys_are_spread_evenly() -> None:
    keys = row_keys([pa.array([str(i) for i in range(20_000)])], 0)
    shares = np.bincount((keys % np.uint64(16)).astype(int), minlength=16) / len(keys)
    assert abs(shares - 1 / 16).max() < 0.012  # seven standard deviations


def by_hand(folder: Path) -> list[dict[str, object]]:
    """Return the rows that stay, computed from the same table in plain Python."""
    found = []
    with (folder / "people.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.reader(
            (line for line in file if not line.startswith("#")), skipinitialspace=True
        ):
            if len(row) != 7 or row[0] == "id":
                continue
            clean = [v.strip() for v in row]
            number = [
                None if v in ("NA", "?", "", "old") else float(v) for v in (clean[1], clean[3])
            ]
            if number[1] is not None:
                found.append(
                    {
                        "age": number[0],
                        "town": clean[2],
                        "rich": float(number[1] > 50 or number[1] == 17),
                    }
                )
    return found


def test_the_shards_hold_what_the_table_says(tmp_path: Path) -> None:
    manifest = prepare(Recipe.read(write_table(tmp_path)), tmp_path / "out", "polars", shards=3)
    expected = by_hand(tmp_path)
    train, test = (
        values(manifest, tmp_path / "out", "train"),
        values(manifest, tmp_path / "out", "test"),
    )
    assert len(train[0]) + len(test[0]) == len(expected) == manifest.report["rows_kept"]
    assert Counter(np.concatenate([train[1], test[1]]).tolist()) == Counter(
        int(r["rich"]) for r in expected
    )  # type: ignore[call-overload]
    assert 0.15 < len(test[0]) / len(expected) < 0.35

    names = [n for c in manifest.columns for n in c["names"]]
    age = manifest.columns[0]
    ages = np.concatenate([train[0], test[0]])[:, 0] * age["spread"] + age["middle"]
    known = np.concatenate([train[0], test[0]])[:, names.index("age is missing")] == 0
    assert Counter(np.round(ages[known], 3)) == Counter(
        float(r["age"]) for r in expected if r["age"] is not None
    )  # type: ignore[arg-type]
    # Statistics come from the training part only: there the mean is 0 and the spread 1, and only
    # there.
    own = train[0][train[0][:, names.index("age is missing")] == 0, 0]
    assert own.mean() == pytest.approx(0.0, abs=1e-6)
    assert own.std() == pytest.approx(1.0, abs=1e-6)
    assert train[0][train[0][:, names.index("age is missing")] == 1, 0] == pytest.approx(
        0.0, abs=1e-6
    )
    words = next(c for c in manifest.columns if c["from"] == "town")
    assert len(words["words"]) == 5
    place = names.index(f"town={words['words'][0]}")
    count = sum(r["town"] == words["words"][0] for r in expected)
    assert int(np.concatenate([train[0], test[0]])[:, place].sum()) == count
    assert manifest.report["broken_lines"] == 1 + sum(
        line.count(",") in (2, 8) for line in broken(tmp_path)
    )
    assert manifest.report["broken_lines_of_joined_tables"] == 1
    assert manifest.report["bad_numbers"] == (tmp_path / "people.csv").read_text().count(",old,")
    assert "broken lines" in as_text(manifest)


def broken(folder: Path) -> list[str]:
    return [
        line
        for line in (folder / "people.csv").read_text().splitlines()
        if line in ("1,2,3", "a,b,c,d,e,f,g,h,i")
    ]


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
    rows = {
        "age": ages,
        "town": ["a", "b", None, "b", "a"] * 8,
        "id": list(range(40)),
        "y": [0, 1, 1, 0, 1] * 8,
    }
    pq.write_table(pa.table(rows), folder / "t.parquet")
    text = "\n".join(
        ",".join("" if v is None else str(v) for v in row)
        for row in zip(*rows.values(), strict=True)
    )
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
    (folder / "c.toml").write_text(
        '[source]\npath = "t.csv"\nnumbers = ["age", "id", "y"]\n' + body
    )
    found = [prepare(Recipe.read(folder / f"{k}.toml"), tmp_path / k, "polars") for k in "pc"]
    assert found[0].columns == found[1].columns
    # Keys are hashes of what was read, which is text here and numbers there: the order differs.
    for part in ("train", "test"):
        one, other = (values(m, tmp_path / k, part)[0] for m, k in zip(found, "pc", strict=True))
        assert sorted(map(tuple, one)) == sorted(map(tuple, other))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            'columns = ["age", "rest", "per"]',
            'columns = ["agee"]',
            "unknown numeric column 'agee'. Did you mean 'age'?",
        ),
        ('rich = "income > 50 or income == 17"', 'rich = "incme > 50"', "incme"),
        ('rich = "income > 50 or income == 17"', 'rich = "town > 50"', "is a number, not a text"),
        ('rich = "income > 50 or income == 17"', 'rich = "income > 5000"', "only the class '0'"),
        ('decade = "age // 10"', "decade = \"__import__('os')\"", "unknown function"),
        ('decade = "age // 10"', 'decade = "age ** 2"', "operators are + - * /"),
        ('decade = "age // 10"', 'decade = "age //"', "is not an expression"),
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
def test_bad_recipes_are_refused_with_a_sentence(
    old: str, new: str, words: str, tmp_path: Path
) -> None:
    with pytest.raises((BadRequest, DataUnavailable), match=re.escape(words)):
        prepare(changed(tmp_path / "t", old, new), tmp_path / "out", "polars")
    assert not (tmp_path / "out" / MANIFEST).exists()


def test_the_test_part_by_a_condition(tmp_path: Path) -> None:
    manifest = prepare(
        changed(tmp_path / "t", "test = 0.25", 'where = "month > 9"'), tmp_path / "out", "polars"
    )
    place = [n for c in manifest.columns for n in c["names"]].index("month (sin)")
    found = np.unique(np.round(values(manifest, tmp_path / "out", "test")[0][:, place], 3))
    assert found == pytest.approx(
        sorted(math.sin(2 * math.pi * m / 12) for m in (10, 11, 12)), abs=1e-3
    )
    assert manifest.rows("test") > 50


def test_rows_that_belong_together_stay_on_one_side(tmp_path: Path) -> None:
    manifest = prepare(
        changed(tmp_path / "t", "test = 0.25", 'by = ["town"]\ntest = 0.4'),
        tmp_path / "out",
        "polars",
    )
    words = next(c for c in manifest.columns if c["from"] == "town")
    names = [n for c in manifest.columns for n in c["names"]]
    places = [names.index(n) for n in words["names"]]
    towns = {
        part: values(manifest, tmp_path / "out", part)[0][:, places].any(axis=0)
        for part in ("train", "test")
    }
    assert towns["train"].any()
    assert not (towns["train"] & towns["test"]).any()


def test_no_day_of_the_flights_is_on_both_sides(tmp_path: Path) -> None:
    """The built-in recipe, on a year with four flights a day; `season` is the day of the year."""
    days = [date(2013, 1, 1) + timedelta(n) for n in range(365)]
    head = "year,month,day,sched_dep_time,sched_arr_time,arr_delay,distance,hour,minute"
    lines = [f"{head},carrier,origin,dest,tailnum,time_hour"]
    for number, day in enumerate(days * 4):
        hour, late = 6 + number % 12, number * 7 % 40
        when = f"{hour}00,{hour + 2}30,{late},{500 + number},{hour},0"
        lines.append(
            f"{day.year},{day.month},{day.day},{when},AA,JFK,BOS,N{number % 9},{day} {hour}"
        )
    folder = tmp_path / "flights"
    folder.mkdir()
    (folder / "flights.csv").write_text("\n".join(lines) + "\n")
    measured = "temp,dewp,humid,wind_dir,wind_speed,wind_gust,precip,pressure,visib"
    hour = f"JFK,{days[0]} 6,{','.join('123456789')}"
    (folder / "weather.csv").write_text(f"origin,time_hour,{measured}\n{hour}\n")
    plane = "tailnum,year,engines,seats,manufacturer\nN1,1999,2,100,BOEING\n"
    (folder / "planes.csv").write_text(plane)
    manifest = paceline.prepare("flights", out=tmp_path / "out", data_dir=str(tmp_path))
    place = [n for c in manifest.columns for n in c["names"]].index("season")
    seasons = {
        part: {round(float(v), 4) for v in values(manifest, tmp_path / "out", part)[0][:, place]}
        for part in ("train", "test")
    }
    assert manifest.rows("train") + manifest.rows("test") == len(lines) - 1
    assert not seasons["train"] & seasons["test"]
    assert len(seasons["train"]) + len(seasons["test"]) == 365
    assert manifest.rows("test") == 4 * len(seasons["test"]) > 0


def test_a_join_that_would_multiply_rows(tmp_path: Path) -> None:
    recipe = write_table(tmp_path)
    with (tmp_path / "towns.csv").open("a") as file:
        file.write("Bonn,7,D\n")
    with pytest.raises(BadRequest, match="2 of its rows have the same"):
        prepare(Recipe.read(recipe), tmp_path / "out", "polars")


def test_engines_are_chosen_and_refused(tmp_path: Path) -> None:
    recipe, said = Recipe.read(write_table(tmp_path)), []
    assert choose("auto", "", recipe, said.append).name == "polars"
    assert "of free memory, and Spark would take longer" in said[0]
    assert choose("auto", "local[2]", recipe, said.append).name == "spark"
    with pytest.raises(BadRequest, match="Did you mean 'polars'"):
        choose("polar", "", recipe, said.append)
    with pytest.raises(BadRequest, match="needs Spark"):
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
    assert sum(p.suffix == ".npy" for p in out.iterdir()) == 10  # the first set is gone
    before = Manifest.read(out)
    # This error is found late; the old shards must still be there.
    with pytest.raises(BadRequest, match="only the class"):
        prepare(
            changed(tmp_path / "t", "income > 50 or income == 17", "income > 5000"),
            out,
            "polars",
            force=True,
        )
    assert Manifest.read(out) == before
    paceline.load_data(f"shards:{out},verify=yes")
    (out / MANIFEST).unlink()
    with pytest.raises(DataCorrupt, match="did not finish"):
        Manifest.read(out)
    prepare(recipe, out, "polars")  # replaces what was left of it
    with (
        Preparation(out, force=True),
        pytest.raises(BadRequest, match="another preparation is writing there"),
    ):
        prepare(recipe, out, "polars", force=True)
    assert Manifest.read(out).rows("train")
    other = tmp_path / "other"
    other.mkdir()
    (other / "embeddings.npy").write_text("years of work")
    with pytest.raises(BadRequest, match=r"has other files in it \(embeddings.npy"):
        prepare(recipe, other, "polars", force=True)
    assert (other / "embeddings.npy").exists()


@pytest.mark.processes
def test_a_full_disk_leaves_nothing_that_can_be_read(tmp_path: Path) -> None:
    """The system refuses to write more than 8 kB into a file, as it does when a disk is full."""
    recipe = write_table(tmp_path, rows=3000)
    done = subprocess.run(
        [
            Path(sys.executable).with_name("paceline"),
            "prepare",
            "--recipe",
            str(recipe),
            "--out",
            str(tmp_path / "out"),
        ],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192)),
    )
    assert done.returncode == 1, done.stderr
    assert "cannot be written: File too large. The unfinished files are deleted" in done.stderr
    assert [p.name for p in (tmp_path / "out").iterdir()] == [".lock"]
    with pytest.raises((DataCorrupt, DataUnavailable)):
        Manifest.read(tmp_path / "out")


def test_two_attempts_at_one_shard(tmp_path: Path) -> None:
    """Spark may run a task twice, even at the same time.

    Both write temporary files, and the last rename wins with the same bytes.
    """
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
    with pytest.raises(RunFailed, match="2 rows were written, but 6 were counted before"):
        short.close()
    assert sorted(p.name for p in tmp_path.iterdir() if p.suffix != ".toml") == ["a.npy"]


def test_training_on_shards(tmp_path: Path) -> None:
    """The target follows from a column that the model sees, so that it can be learnt."""
    recipe = changed(tmp_path, '"income > 50 or income == 17"', '"age > 50"')
    prepare(recipe, tmp_path / "out", "polars")
    run = paceline.train(
        data=f"shards:{tmp_path / 'out'}",
        model="mlp:hidden=16",
        metric="auc",
        strategy="allreduce",
        workers=3,
        epochs=12,
        lr=0.01,
        optimizer="adam",
        transport="inproc",
        out=str(tmp_path / "run"),
        batch_size=16,
    )
    assert run.record["config"]["shard"] == "static"
    assert run.record["data"]["engine"] == "polars"
    assert run.record["result"]["samples"] == 12 * run.record["data"]["rows"]["train"]
    assert run.record["result"]["metric"]["value"] > 0.9


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
    damage(next((tmp_path / "out").glob("train-00002-*.inputs.npy")))  # type: ignore[operator]
    with pytest.raises(
        (DataCorrupt, DataUnavailable), match=rf"train-00002-\w+\.inputs\.npy.*{words}"
    ):
        paceline.load_data(f"shards:{tmp_path / 'out'}")


@pytest.mark.parametrize(
    "damage",
    [
        lambda m: m.update(schema=9),
        lambda m: m.pop("shards"),
        lambda m: m.update(inputs=None),
        lambda m: m["inputs"].update(shape="abc"),
        lambda m: m["inputs"].update(dtype="float33"),
        lambda m: m["targets"].pop("classes"),
        lambda m: m["targets"].update(classes=5),
        lambda m: m["shards"][0].update(rows="7"),
        lambda m: m["shards"][0].update(part="tests"),
        lambda m: m["shards"].append(m["shards"][0]),
        lambda m: m["shards"][0]["inputs"].update(file="../../../../etc/passwd"),
        lambda m: m["shards"][0]["inputs"].update(file=None),
        lambda m: m["shards"][0]["inputs"].update(bytes="7"),
        lambda m: m.update(scale=[1]),
        lambda m: m["rows"].update(train=1),
    ],
)
def test_a_damaged_manifest_is_refused(
    damage: Callable[[dict[str, Any]], object], tmp_path: Path
) -> None:
    prepare(Recipe.read(write_table(tmp_path)), tmp_path / "out", "polars", shards=1)
    content = json.loads((tmp_path / "out" / MANIFEST).read_text())
    damage(content)
    (tmp_path / "out" / MANIFEST).write_text(json.dumps(content))
    with pytest.raises(DataCorrupt, match=r"manifest\.json"):
        paceline.load_data(f"shards:{tmp_path / 'out'}")


def test_what_is_not_a_manifest_is_refused(tmp_path: Path) -> None:
    for text, words in (
        ("{", "cannot be read"),
        ("[]", "not a manifest"),
        ("{}", "not a manifest"),
    ):
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
    assert len(pickle.dumps(train)) < 20_000  # the rows are not pickled
    assert math.isfinite(float(whole.sum()))


def test_a_run_does_not_go_on_with_other_shards(tmp_path: Path) -> None:
    recipe = write_table(tmp_path)
    prepare(Recipe.read(recipe), tmp_path / "out", "polars", shards=2)
    options = {
        "model": "mlp:hidden=4",
        "transport": "inproc",
        "checkpoint_every": "2",
        "batch_size": 16,
    }
    paceline.train(data=f"shards:{tmp_path / 'out'}", steps=4, out=str(tmp_path / "run"), **options)
    table = (tmp_path / "people.csv").read_text().splitlines()
    (tmp_path / "people.csv").write_text(
        "\n".join([*table[:5], *table[6:], table[5].replace("2013", "2012")]) + "\n"
    )
    prepare(Recipe.read(recipe), tmp_path / "out", "polars", shards=2, force=True)
    with pytest.raises(BadRequest, match=r"content of its shards|number of training samples"):
        paceline.train(resume=str(tmp_path / "run"), steps=8)


def small(folder: Path, rows: str, rest: str, columns: str = "x,y") -> Recipe:
    """Write a table of a few lines, and return its recipe."""
    folder.mkdir(exist_ok=True)
    (folder / "t.csv").write_bytes(f"{columns}\n{rows}".encode("utf-8", "surrogateescape"))
    (folder / "r.toml").write_text(rest)
    return Recipe.read(folder / "r.toml")


PLAIN = """
[source]
path = "t.csv"
numbers = ["x"]
[[numeric]]
columns = ["x"]
[target]
column = "y"
[split]
test = 0.0
"""


def test_an_open_quote_takes_no_other_line(tmp_path: Path) -> None:
    lines = [f"{i},{'ab'[i % 2]}" for i in range(4000)]
    lines[500] = '"500,a'
    lines[3000] = '3000,"b"'
    manifest = prepare(small(tmp_path / "t", "\n".join(lines), PLAIN), tmp_path / "out", "polars")
    assert (
        manifest.report["rows_in"],
        manifest.report["broken_lines"],
        manifest.report["rows_kept"],
    ) == (4000, 1, 3999)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ("1,a\r\n2,b\r\n3,a\r\n", (3, 0)),
        ("1,a\n\n  \n2,b\n", (2, 0)),
        ("1,a\n2,\udcffb\n3,b", (3, 0)),  # a byte that is not UTF-8
        ("1,a\nx,y\n2,b\n", (2, 0)),  # the header again, as in concatenated files
        ("1,a\n2\n3,b,c\n4,b\n", (4, 2)),
        ('1,"a, b"\n2,"say ""b"""\n3,a\n', (3, 0)),
    ],
)
def test_lines(rows: str, expected: tuple[int, int], tmp_path: Path) -> None:
    manifest = prepare(small(tmp_path / "t", rows, PLAIN), tmp_path / "out", "polars", shards=1)
    assert (manifest.report["rows_in"], manifest.report["broken_lines"]) == expected
    assert [s.part for s in manifest.shards] == ["train"]  # no test part was asked for


def test_odd_names_and_numbers_as_classes(tmp_path: Path) -> None:
    recipe = """
[source]
path = "t.csv"
numbers = ["my x", "x.1", "class"]
[[numeric]]
columns = ["my x", "x.1"]
missing = "drop"
[target]
column = "class"
classes = ["1234561", "1234562"]
[split]
test = 0.0
"""
    rows = (
        "\n".join(f"{i},{i},{1234561 + i % 2}" for i in range(20))
        + "\n,3,1234561\n1e400,3,1234561\n"
    )
    manifest = prepare(
        small(tmp_path / "t", rows, recipe, "my x, x.1,class"), tmp_path / "out", "polars", shards=1
    )
    assert manifest.targets["classes"] == ["1234561", "1234562"]
    assert manifest.report["dropped"] == [{"why": "my x is missing", "rows": 2}]
    assert manifest.report["bad_numbers"] == 1
    inputs, _ = values(manifest, tmp_path / "out", "train")
    assert np.isfinite(inputs).all()


def test_rows_without_a_partner_are_counted(tmp_path: Path) -> None:
    manifest = prepare(
        changed(tmp_path / "t", 'on = ["town"]', 'on = ["town"]\nhow = "inner"'),
        tmp_path / "out",
        "polars",
    )
    lost = manifest.report["dropped"][0]
    assert lost["why"] == "no row in towns.csv for its town"
    assert lost["rows"] > 20
    assert manifest.report["rows_in"] == manifest.report["rows_kept"] + manifest.report[
        "broken_lines"
    ] + sum(d["rows"] for d in manifest.report["dropped"])


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("test = 0.25", 'by = ["town"]\nwhere = "month > 9"', "has no effect beside"),
        ("[derive]", '[derive]\n__key = "age"', "two underscores"),
        ('comment = "#"', 'comment = "##"', "one character"),
    ],
)
def test_more_that_is_refused(old: str, new: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=words):
        prepare(changed(tmp_path / "t", old, new), tmp_path / "out", "polars")


def test_whole_numbers_beyond_what_a_float_holds(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    (tmp_path / "t").mkdir()
    table = {
        "x": pa.array([2**60 + i for i in range(9)], pa.int64()),
        "y": ["a", "b", "c"] * 3,
        "day": pa.array([0] * 9, pa.date32()),
    }
    pq.write_table(pa.table(table), tmp_path / "t" / "t.parquet")
    text = (
        '[source]\npath = "t.parquet"\n[[numeric]]\ncolumns = ["x"]\n[target]\ncolumn ='
        ' "y"\n[split]\ntest = 0.0\n'
    )
    (tmp_path / "t" / "r.toml").write_text(text)
    assert (
        prepare(Recipe.read(tmp_path / "t" / "r.toml"), tmp_path / "out", "polars").rows("train")
        == 9
    )
    (tmp_path / "t" / "r.toml").write_text(text.replace('["x"]', '["day"]'))
    with pytest.raises(BadRequest, match="'day' is something else, not number"):
        prepare(Recipe.read(tmp_path / "t" / "r.toml"), tmp_path / "out2", "polars")
