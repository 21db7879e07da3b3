"""Some of the trials, chosen pairwise: every strategy, fault, target and point, and most pairs.

Each is a run of its own that a fault strikes. `python -m tests.faults.trials --only N` repeats one
and says more; `make test-faults` runs a thousand.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import commands
from tests.faults.expected import expected
from tests.faults.trial import FAULTS, POINTS, SETTINGS, STEPS, draw

# Quick ones: on forked ranks of one host, and with two pauses only.
NUMBERS = (
    0, 6, 8, 10, 61, 70, 72, 77, 88, 102, 142, 210, 240, 261, 350, 358, 380, 395, 463, 496, 501,
    701, 708, 1175, 1450, 1570, 2113, 2590, 2626, 3457,
)  # fmt: skip
# Numbers whose promise of issue 20 is not kept yet, and which promise that is.
JOBS = 2


def test_a_trial_is_a_function_of_its_number() -> None:
    trials = [draw(number) for number in range(1000)]
    assert trials == [draw(number) for number in range(1000)]
    assert sum(trial.transport == "mpi" for trial in trials) == 100
    assert {trial.setting for trial in trials} == set(SETTINGS)
    assert {trial.point for trial in trials} == set(POINTS)
    assert {trial.fault for trial in trials} == {*FAULTS, "int", "hup"}
    assert all(0 < trial.step < STEPS for trial in trials)
    for trial in trials:
        assert expected(trial).ends
        if trial.fault in ("stop", "gil"):
            assert (trial.pause_s > 0) != (trial.give_up_s is not None), trial


def test_without_root_and_own_limits_every_draw_is_still_a_trial() -> None:
    trials = [draw(number, root=False, own_gives_up=False) for number in range(1000)]
    assert not any(trial.testbed for trial in trials)
    assert not any(trial.own and trial.give_up_s for trial in trials)
    assert any("a testbed needs root" in why for trial in trials for why in trial.mapped)


def test_the_chosen_ones_cover_strategies_faults_points_and_targets() -> None:
    trials = [draw(number) for number in NUMBERS]
    assert {trial.setting for trial in trials} == set(SETTINGS)
    assert {trial.point for trial in trials} == set(POINTS)
    assert {trial.fault for trial in trials} == {*FAULTS, "int", "hup"} - {"link"}
    assert {trial.target for trial in trials} == {"rank", "server", "launcher"}
    assert not any(trial.testbed or trial.own or trial.transport == "mpi" for trial in trials)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, Any]]:
    """Two processes run the trials, each one after the other; the streams of their results."""
    out: Path = tmp_path_factory.mktemp("trials")
    serve = [sys.executable, "-m", "tests.faults.trials", "--serve", "--quick", "--out", str(out)]
    jobs = [
        commands.Popen(
            serve, cwd=commands.ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(JOBS)
    ]
    try:
        streams = {}
        for place, number in enumerate(NUMBERS):
            job = jobs[place % JOBS]
            job.stdin.write(f"{number}\n")
            job.stdin.flush()
            streams[number] = job.stdout
        for job in jobs:
            job.stdin.close()
        yield streams
    finally:
        for job in jobs:
            if job.poll() is None:
                job.kill()
            job.wait()
            job.stdout.close()


@pytest.mark.processes
@pytest.mark.parametrize(
    "number",
    [pytest.param(number, id=str(draw(number))) for number in NUMBERS],
)
def test_a_run_ends_as_documented(answers: dict[int, Any], number: int) -> None:
    while True:
        answer = answers[number].readline()
        assert answer, "the harness failed: see its error above"
        result = json.loads(answer)
        if result["number"] == number:  # a test that was left out has an answer, too
            break
    assert result["wrong"] == {}, json.dumps(result, indent=2)
