"""The study of a person's own model in docs/studies.md runs as it stands there."""

import csv
import re
import textwrap
from pathlib import Path

import pytest
from tests.commands import PACELINE, run

PAGE = Path(__file__).parent.parent.parent / "docs" / "studies.md"


def file_of(name: str) -> str:
    """The indented block below `name:` on the page."""
    found = re.search(rf"^{re.escape(name)}:\n\n((?:    .*\n|\n)+)", PAGE.read_text(), re.MULTILINE)
    assert found is not None, name
    return textwrap.dedent(found[1]).strip() + "\n"


def test_a_study_of_a_model_of_ones_own_is_six_lines(tmp_path: Path) -> None:
    assert len(file_of("my.toml").splitlines()) == 6
    assert 'model = "mynet:MyNet"' in file_of("my.toml")
    for name in ("my.toml", "mynet.py"):
        (tmp_path / name).write_text(file_of(name))
    done = run(
        [PACELINE, "study", "my.toml", "--no-figures", "--set", "workers=2", "--out", "s"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    with (tmp_path / "s" / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {(r["strategy"], r["workers"]) for r in rows} >= {
        ("serial", "1"),
        ("allreduce", "2"),
        ("local-sgd", "2"),
    }
    assert {r["status"] for r in rows} == {"completed"}
    accuracies = {r["label"]: float(r["test_accuracy"]) for r in rows}
    assert accuracies["serial"] > 0.5
    assert accuracies["allreduce"] == pytest.approx(accuracies["serial"], abs=0.02)  # the same data
