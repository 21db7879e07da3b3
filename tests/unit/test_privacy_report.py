"""What the report says about private runs, from made-up records with a known answer."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.records import run, write_study

from paceline.report.answer import answer
from paceline.report.columns import measured
from paceline.report.commentary.all import comments
from paceline.report.lines import Study
from paceline.report.privacy import privacy_table
from paceline.report.reading import read_study
from paceline.report.results import write_results


def private(workers: int, accuracy: float, trust: str = "peers", **told: Any) -> dict[str, Any]:
    record = run(
        "allreduce", workers, 2.0, accuracy, varied={"privacy": f"epsilon=3,trust={trust}"}
    )
    record["privacy"] = {
        "epsilon": 2.9,
        "delta": 1e-5,
        "epsilon_rdp": 3.2,
        "noise": 1.1,
        "noise_per_worker": 1.1,
        "clip": 1.0,
        "steps": 500,
        "sampling": "poisson",
        "trust": trust,
        "private": True,
        "guarantee": [f"First of {trust}.", "Second."],
        **told,
    }
    return record


def study(folder: Path, *records: dict[str, Any], plain: Sequence[float] = (0.95,)) -> Study:
    return read_study(write_study(folder, [*(run("serial", 1, 2.0, a) for a in plain), *records]))


def said(found: Study) -> list[str]:
    return [c.text for c in comments(found) if c.kind in ("privacy", "failed")]


def test_the_table_says_what_is_promised_to_whom(tmp_path: Path) -> None:
    page = privacy_table(
        study(
            tmp_path / "s",
            private(2, 0.93),
            private(4, 0.9),
            private(2, 0.94, "curator", private=False),
        )
    )
    assert "<td>2.9</td><td>1e-05</td><td>3.2</td><td>1.1</td>" in page
    assert "<b>trust=peers.</b> First of peers. Second." in page
    assert "<b>trust=curator.</b> First of curator. Second." in page
    assert page.count("not private") == 1
    assert privacy_table(study(tmp_path / "plain")) == ""


def test_what_it_costs_is_told(tmp_path: Path) -> None:
    seeds = (-0.001, 0.0, 0.001)
    plain = [0.95 + s for s in seeds]
    runs = [
        private(workers, accuracy + s) for workers, accuracy in ((2, 0.93), (4, 0.9)) for s in seeds
    ]
    found = said(study(tmp_path / "s", *runs, plain=plain))
    assert any(
        "without privacy `serial x 1` reached 95.00%: privacy cost 2.0 points in 3 of 3 rounds"
        in text
        for text in found
    )
    assert any("lost 3.0 points from 2 to 4 workers" in text for text in found)
    better = said(study(tmp_path / "better", *(private(2, 0.96 + s) for s in seeds), plain=plain))
    assert any(
        "here privacy cost nothing (1.0 points better in 3 of 3 rounds)" in text for text in better
    )
    assert any(
        "is not private" in text
        for text in said(study(tmp_path / "seeded", private(2, 0.9, private=False)))
    )
    assert said(study(tmp_path / "plain")) == []


def test_one_run_each_says_neither_what_privacy_costs_nor_why(tmp_path: Path) -> None:
    found = said(study(tmp_path / "s", private(2, 0.948), private(4, 0.942)))
    assert any(
        "one run each does not show what privacy cost (0.2 points lost)" in text for text in found
    )
    assert not any("adds the whole noise" in text for text in found)
    noisy = [
        private(workers, accuracy + s)
        for workers, accuracy, luck in ((2, 0.945, (0.0, 0.02, -0.02)), (4, 0.94, (0.02, -0.02, 0)))
        for s in luck
    ]
    found = said(study(tmp_path / "noisy", *noisy, plain=(0.93, 0.95, 0.97)))
    assert any(
        "these runs do not show beyond noise what privacy cost (0.5 points lost)" in text
        for text in found
    )
    assert not any("adds the whole noise" in text for text in found)


def test_privacy_is_compared_with_the_same_setting(tmp_path: Path) -> None:
    """A better strategy without privacy is no measure of what privacy costs."""
    seeds = (-0.001, 0.001)
    plain = [run("allreduce", 2, 2.0, 0.96 + s) for s in seeds] + [
        run("hogwild", 2, 2.0, 0.99 + s) for s in seeds
    ]
    found = said(study(tmp_path / "s", *plain, *(private(2, 0.94 + s) for s in seeds)))
    assert any(
        "without privacy `allreduce x 2` reached 96.00%: privacy cost 2.0 points" in text
        for text in found
    )


def test_epsilon_is_in_the_first_sentence(tmp_path: Path) -> None:
    alone = read_study(write_study(tmp_path / "s", [private(2, 0.9)]))
    ended = "trained for 2.00 s, to 90.00% accuracy, with epsilon 2.9 at delta 1e-5."
    assert answer(alone)[0].endswith(ended)
    seeded = read_study(write_study(tmp_path / "t", [private(2, 0.9, private=False)]))
    assert "(not private: secure=false)" in answer(seeded)[0]
    serial = run("serial", 1, 4.0, 0.95, varied={"privacy": "epsilon=3,trust=peers"})
    serial["privacy"] = private(1, 0.9)["privacy"]
    compared = read_study(write_study(tmp_path / "u", [serial, private(2, 0.9)]))
    assert "2.00x as fast as serial" in answer(compared)[0]
    assert "with epsilon 2.9 at delta 1e-5" in answer(compared)[0]


def test_epsilon_is_compared_and_in_the_results(tmp_path: Path) -> None:
    found = study(tmp_path / "s", private(2, 0.93))
    values = {line.strategy: measured(found, line)["epsilon"] for line in found.lines}
    assert values["serial"] is None
    assert values["allreduce"] is not None
    assert values["allreduce"].mean == 2.9
    write_results(found, tmp_path / "results.csv")
    with (tmp_path / "results.csv").open(newline="") as file:
        epsilons = [row["epsilon"] for row in csv.DictReader(file)]
    assert sorted(epsilons) == ["", "2.9"]
