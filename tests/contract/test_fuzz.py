"""Whatever is asked, and whatever lies in a run's folder: a result or one of our errors, never
another exception.
"""

from pathlib import Path

import pytest
from tests.fuzz import FOLDERS, REQUESTS, failure, make_runs

CASES = {
    "command line": 120,
    "run.toml": 80,
    "study.toml": 110,
    "other command": 20,
    "dry study": 10,
    "report": 50,
    "resume": 30,
    "study": 40,
    "show": 20,
    "runs": 20,
    "evaluate": 12,
    "watch": 20,
    "status": 20,
    "ledger": 12,
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    make_runs(folder)
    return folder


@pytest.mark.parametrize("half", ["first", pytest.param("second", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", [*REQUESTS, *FOLDERS])
def test_only_errors_of_ours_come_out(kind: str, half: str, runs: Path) -> None:
    middle = CASES[kind] // 2
    seeds = range(middle) if half == "first" else range(middle, CASES[kind])
    found = {seed: said for seed in seeds if (said := failure(kind, seed, runs)) is not None}
    assert not found, next(iter(found.values()))
