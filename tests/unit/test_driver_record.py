"""The record that the driver of ranks on a cluster leaves: its own word about a signal counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import Interrupted, RunFailed
from paceline.launch.driver import conclude


@pytest.mark.parametrize(
    ("failure", "wrote", "status"),
    [
        (Interrupted("stopped by SIGINT"), "failed", "interrupted"),
        (Interrupted("stopped by SIGINT"), "completed", "completed"),
        (Interrupted("stopped by SIGINT"), "interrupted", "interrupted"),
        (RunFailed("an executor was lost"), "failed", "failed"),
    ],
)
def test_what_a_rank_wrote_stays_unless_the_person_ended_it(
    tmp_path: Path, failure: Any, wrote: str, status: str
) -> None:
    (tmp_path / "events").mkdir()
    record = {"status": wrote, "error": "worker 1 is gone", "result": {"steps": 3}}
    (tmp_path / "run.json").write_text(json.dumps(record))
    conclude(None, tmp_path, lambda kind, content: None, failure, b"")  # type: ignore[arg-type]
    found = json.loads((tmp_path / "run.json").read_text())
    assert found["status"] == status
    assert found["result"] == {"steps": 3}
    changed = status != wrote
    assert found["error"] == ("stopped by SIGINT" if changed else "worker 1 is gone")


def test_a_damaged_record_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "events").mkdir()
    (tmp_path / "run.json").write_text("{")
    failure = Interrupted("stopped by SIGINT")
    conclude(None, tmp_path, lambda kind, content: None, failure, b"")  # type: ignore[arg-type]
    assert (tmp_path / "run.json").read_text() == "{"
