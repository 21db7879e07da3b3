"""Private runs of a study: the privacy that an interrupted run spent stays spent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.errors import Interrupted
from paceline.launch.run import Listen
from paceline.privacy.accounting import Spent, epsilon_of
from paceline.record.reader import read_run
from paceline.request.job import Job
from paceline.studies.grid import StudySpec
from paceline.studies.plan import PlannedRun
from paceline.studies.runner import Listener, run_study
from paceline.watch.state import Watched

BASE = {
    "data": "synthetic:samples=240,shape=6,classes=3",
    "model": "mlp:hidden=8",
    "transport": "inproc",
    "steps": 30,
    "global_batch_size": 12,
    "evaluate_every": "15",
    "memory_format": "contiguous",
}
RUN = "serial-p1-s0"

pytestmark = pytest.mark.processes


class Hears(Listener):
    """Collects notices; with `interrupts`, it raises Ctrl-C at the first evaluation."""

    def __init__(self, interrupts: bool = False) -> None:
        self.interrupts, self.notices = interrupts, list[str]()

    def begun(self, planned: PlannedRun, job: Job) -> Listen:
        def hear(kind: str, content: dict[str, Any]) -> None:
            if self.interrupts and kind == "evaluation":
                raise KeyboardInterrupt

        return hear

    def notice(self, text: str) -> None:
        self.notices.append(text)


def study(privacy: str, **more: Any) -> StudySpec:
    return StudySpec.make(
        {"all_cores": False, "base": {**BASE, "privacy": privacy, "strategy": "serial", **more}}
    )


def interrupted(out: Path, privacy: str) -> int:
    """Interrupt a run and return the steps in its account."""
    with pytest.raises(Interrupted):
        run_study(study(privacy), out, Hears(interrupts=True))
    record = read_run(out / "runs" / RUN)
    assert record["status"] == "interrupted"
    assert record["privacy"]["steps"] >= 15
    return int(record["privacy"]["steps"])


def test_an_interrupted_private_run_stays_in_the_account_of_the_next(tmp_path: Path) -> None:
    made, told = interrupted(tmp_path / "s", "noise=1.0"), Hears()
    record = run_study(study("noise=1.0"), tmp_path / "s", told)[RUN]
    assert record["status"] == "completed"
    assert record["result"]["steps"] == 30
    assert [line["steps"] for line in record["privacy"]["sessions"]] == [made, 30]
    assert record["privacy"]["epsilon"] == pytest.approx(
        epsilon_of([Spent(1.0, 0.05, made + 30)], 1e-5), rel=1e-3
    )
    assert any("spent epsilon" in text and "covers both" in text for text in told.notices)


def test_attempts_add_up_over_two_interruptions_and_a_retry_after_a_failure(
    tmp_path: Path,
) -> None:
    made = [interrupted(tmp_path / "s", "noise=1.0") for _ in range(2)]
    assert made[1] > made[0]
    path = tmp_path / "s" / "runs" / RUN / "run.json"
    path.write_text(path.read_text().replace('"interrupted"', '"failed"'))
    record = run_study(study("noise=1.0"), tmp_path / "s", retry_failed=True)[RUN]
    assert record["privacy"]["steps"] == made[1] + 30


@pytest.mark.parametrize("privacy", ["epsilon=3", "epsilon=2.3,noise=1.0"])
def test_a_budget_that_an_interrupted_run_has_used_is_not_given_twice(
    tmp_path: Path, privacy: str
) -> None:
    """A single run of 30 steps with noise 1.0 spends epsilon 2.24."""
    interrupted(tmp_path / "s", privacy)
    record = run_study(study(privacy), tmp_path / "s")[RUN]
    assert record["status"] == "failed"
    assert "an earlier attempt at this run spent epsilon" in record["error"]
    assert f"Delete {tmp_path / 's' / 'runs' / RUN}" in record["error"]
    assert (tmp_path / "s" / "runs" / RUN / "privacy" / "worker-0.json").is_file()


def test_a_budget_with_room_for_both_is_used(tmp_path: Path) -> None:
    made = interrupted(tmp_path / "s", "epsilon=9,noise=1.0")
    record = run_study(study("epsilon=9,noise=1.0"), tmp_path / "s")[RUN]
    assert record["status"] == "completed"
    assert record["privacy"]["steps"] == made + 30


def test_a_notice_counts_the_private_serial_runs_that_a_study_adds(tmp_path: Path) -> None:
    told = Hears()
    run_study(study("noise=1.0", strategy="allreduce", workers=2), tmp_path / "s", told)
    assert [
        text
        for text in told.notices
        if "2 private runs" in text and "1 of them are serial runs" in text
    ]
    kept = Watched(tmp_path / "s").picture()["study"]["notices"]
    assert [notice["text"] for notice in kept] == told.notices  # the live page shows them
    silent = Hears()
    run_study(study("noise=1.0"), tmp_path / "serial", silent)
    assert silent.notices == []
