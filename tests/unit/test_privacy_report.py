"""What the report says of private runs, from made-up records whose answer is known."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from tests.records import run, write_study

from paceline.report.commentary import comments
from paceline.report.lines import Study, read_study
from paceline.report.privacy import privacy_table
from paceline.report.tables import measured, write_results


def private(workers: int, accuracy: float, trust: str = "peers", **told: Any) -> dict[str, Any]:
    record = run("allreduce", workers, 2.0, accuracy, varied={"privacy": f"epsilon=3,trust={trust}"})
    record["privacy"] = {
        "epsilon": 2.9, "delta": 1e-5, "epsilon_rdp": 3.2, "noise": 1.1, "noise_per_worker": 1.1, "clip": 1.0, "steps": 500,
        "sampling": "poisson", "trust": trust, "private": True, "guarantee": [f"First of {trust}.", "Second."], **told,
    }  # fmt: skip
    return record


def study(folder: Path, *records: dict[str, Any]) -> Study:
    return read_study(write_study(folder, [run("serial", 1, 2.0, 0.95), *records]))


def said(found: Study) -> list[str]:
    return [c.text for c in comments(found) if c.kind in ("privacy", "failed")]


def test_the_table_says_what_is_promised_to_whom(tmp_path: Path) -> None:
    page = privacy_table(study(tmp_path / "s", private(2, 0.93), private(4, 0.9), private(2, 0.94, "curator", private=False)))
    assert "<td>2.9</td><td>1e-05</td><td>3.2</td><td>1.1</td>" in page
    assert "<b>trust=peers.</b> First of peers. Second." in page
    assert "<b>trust=curator.</b> First of curator. Second." in page
    assert page.count("not private") == 1
    assert privacy_table(study(tmp_path / "plain")) == ""


def test_what_it_costs_is_told(tmp_path: Path) -> None:
    found = said(study(tmp_path / "s", private(2, 0.93), private(4, 0.9)))
    assert any("privacy cost 2.00 points" in text for text in found)
    assert any("lost 3.00 points from 2 to 4 workers" in text for text in found)
    assert any("no accuracy" in text for text in said(study(tmp_path / "better", private(2, 0.96))))
    assert any("is not private" in text for text in said(study(tmp_path / "seeded", private(2, 0.9, private=False))))
    assert said(study(tmp_path / "plain")) == []


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
