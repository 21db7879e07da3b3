"""The main table of a report: its dots, colours, marks and legend are those of the verdicts."""

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.records import run, write_study

from paceline.report.page.intervals import Dot, Scale, axis, picture
from paceline.report.page.main_table import MainTable, main_table
from paceline.report.reading import read_study


def form(value: float) -> str:
    return f"{value:g}x"


def confirmed(ratios: dict[str, list[float]]) -> dict[str, Any]:
    """The confirming blocks in which each setting was so many times as fast as serial."""
    names, count = ["serial x 1", *ratios], len(next(iter(ratios.values())))
    blocks = [
        {
            "number": i,
            "order": names,
            "samples_per_s": {"serial x 1": 100.0} | {k: 100.0 * v[i] for k, v in ratios.items()},
            "seconds": 3.0,
            "foreign": 0.0,
            "stolen": 0.0,
            "repeats": 0,
            "disturbed": False,
        }
        for i in range(count)
    ]
    about = {"serial": "serial x 1", "settings": list(ratios), "width": 0.1, "pilot": 3}
    rest = {"threshold": 0.05, "wanted": count, "block_s": 3.0, "ended": "width", "blocks": blocks}
    return about | rest


def table(folder: Path, runs: list[dict[str, Any]], **about: Any) -> MainTable:
    return main_table(read_study(write_study(folder, runs, **about)))


def grid(*settings: tuple[str, int, float]) -> list[dict[str, Any]]:
    return [
        run(name, workers, seconds * (1 + 0.002 * seed), 0.95 + 0.0001 * seed)
        for name, workers, seconds in settings
        for seed in range(3)
    ]


def test_rows_are_sorted_coloured_and_marked(tmp_path: Path) -> None:
    runs = grid(("serial", 1, 4.0), ("psgd", 2, 2.0), ("hogwild", 2, 8.0), ("psgd", 4, 3.0))
    found = table(tmp_path / "s", runs)
    assert [row.line.id for row in found.rows] == [
        "psgd x 2", "psgd x 4", "serial x 1", "hogwild x 2",
    ]  # fmt: skip
    kinds = [row.speed.kind for row in found.rows if row.speed]
    assert kinds == ["good", "good", "base", "bad"]
    assert found.rows[0].marks == ["fastest"]
    assert found.rows[0].faster_in == "faster in 3 of 3 rounds"
    assert found.rows[3].faster_in == "slower in 3 of 3 rounds"
    assert "Holm's correction for 3 settings" in found.legend[0]
    assert "† oversubscribed: more workers than the 2 cores" in found.legend[-1]


def test_confirmed_settings_come_from_their_blocks_and_ties_are_named(tmp_path: Path) -> None:
    runs = grid(("serial", 1, 4.0), ("psgd", 2, 2.0), ("hogwild", 2, 2.1), ("gossip", 2, 3.0))
    blocks = {"psgd x 2": [1.50, 1.52, 1.48, 1.51], "hogwild x 2": [1.49, 1.53, 1.50, 1.50]}
    found = table(tmp_path / "s", runs, confirm=confirmed(blocks))
    rows = {row.line.id: row for row in found.rows}
    for name in blocks:
        assert rows[name].marks == ["confirmed", "tied for the fastest"]
        assert rows[name].speed_text == "1.50x"  # not 2.00x and 1.90x, as in the whole trainings
        assert rows[name].faster_in == "faster in 4 of 4 blocks"
    assert rows["gossip x 2"].marks == rows["serial x 1"].marks == []
    assert "not told apart from the fastest" in found.legend[0]
    assert "from the 4 confirming blocks alone" in found.legend[1]


def test_single_runs_have_no_interval(tmp_path: Path) -> None:
    found = table(tmp_path / "s", [run("serial", 1, 4.0), run("psgd", 2, 2.0)])
    assert found.rows[0].speed_range == "one run"
    assert found.legend[0].startswith("Dots are single runs")


def test_without_serial_the_picture_is_the_time(tmp_path: Path) -> None:
    found = table(tmp_path / "s", grid(("psgd", 2, 2.0), ("hogwild", 2, 3.0)))
    assert not found.against_serial
    assert [row.speed_text for row in found.rows] == ["2.00 s", "3.01 s"]
    assert "Serial was not run" in found.legend[0]


def test_a_failed_setting_has_a_row(tmp_path: Path) -> None:
    runs = [*grid(("serial", 1, 4.0), ("psgd", 2, 2.0)), run("hogwild", 2, error="broken")]
    last = table(tmp_path / "s", runs).rows[-1]
    assert (last.line.id, last.speed_text, last.pictures) == ("hogwild x 2", "failed", {})


def test_many_rows_are_folded_but_serial_is_shown(tmp_path: Path) -> None:
    runs = grid(("serial", 1, 4.0), *(("psgd", n, 8.0 + n) for n in range(2, 24)))
    found = table(tmp_path / "s", runs)
    shown = [row.line.id for row in found.rows if not row.folded]
    assert len(shown) == 15
    assert "serial x 1" in shown


@pytest.mark.parametrize("high", [1.05, 1.5, 3.0, 9.0, 40.0])
def test_ticks_are_few_apart_and_differ(high: float) -> None:
    scale = Scale.of([Dot(1, 1, 1, "base", 1.0), Dot(high, high, high, "good", 1.0)], True, form)
    assert scale is not None
    texts = re.findall(r'x="([\d.]+)%" y="12">([^<]+)<', axis(scale))
    places = [float(x) for x, _ in texts]
    assert 2 <= len(texts) <= 4
    assert len({text for _, text in texts}) == len(texts)
    assert all(b - a >= 20 for a, b in pairwise(places))


def test_an_interval_that_leaves_the_picture_has_an_arrow() -> None:
    near, wide = Dot(1.2, 1.1, 1.3, "good", 1.0), Dot(1.1, 0.001, 900.0, "same", 1.0)
    scale = Scale.of([near, wide], True, form)
    assert scale is not None
    assert picture(scale, near, "").count("arrow") == 0
    assert picture(scale, wide, "").count("arrow") == 2
    places = [float(x) for x in re.findall(r'(?:x1|x2|cx)="([\d.-]+)%"', picture(scale, wide, ""))]
    assert all(0 <= x <= 100 for x in places)


def test_labels_are_escaped() -> None:
    dot = Dot(1.2, 1.1, 1.3, "good", 1.0)
    scale = Scale.of([dot], True, form)
    assert scale is not None
    assert "<img" not in picture(scale, dot, '"><img src=x>')


def test_ranks_that_could_meet_without_a_secret_are_told(tmp_path: Path) -> None:
    runs = grid(("serial", 1, 4.0), ("psgd", 2, 2.0))
    assert not any("--insecure" in text for text in table(tmp_path / "a", runs).legend)
    runs[-1]["config"]["insecure"] = True
    assert "--insecure: the ranks could meet" in table(tmp_path / "b", runs).legend[-1]
