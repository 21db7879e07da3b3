"""The table of slow ranks: 42 runs in each of which one rank pauses once (slow_table.py)."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.faults.slow_table import Trial, run_trial, trials

pytestmark = pytest.mark.processes


def test_the_table_has_42_trials() -> None:
    assert len(trials()) == len(set(trials())) == 42


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_run_ends_because_a_rank_is_slow(tmp_path: Path) -> None:
    def run(number: int) -> tuple[Trial, str, bool]:
        outcome = run_trial(trials()[number], 10.0, 4.0, tmp_path / str(number))
        return trials()[number], str(outcome), outcome.is_right

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(run, range(42)))
    assert [(str(trial), said) for trial, said, right in found if not right] == []
