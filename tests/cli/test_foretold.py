"""Predictions beside real runs: a study with a plan, a check on a testbed, steps to an accuracy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.common.cores import cores
from paceline.planning.stored import read_profile
from paceline.testbed.build import missing

Cli = Callable[..., tuple[int, str, str]]

pytestmark = pytest.mark.processes
needs_testbed = pytest.mark.skipif(missing() is not None, reason=str(missing()))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short profile of the model of the short built-in study, at the batches that it has."""
    from paceline.planning.measure.whole import Wishes, measure
    from paceline.planning.stored import write_profile

    path = tmp_path_factory.mktemp("profile") / "p.json"
    wishes = Wishes((60, 120), 2.0, 2, ["shm"])
    options = {"model": "mlp:hidden=32", "data": "fashion-mini"}
    write_profile(measure(options, wishes, lambda kind, content: None), path)
    return path


@pytest.mark.native_threads
def test_a_study_shows_measured_beside_predicted(cli: Cli, made: Path, tmp_path: Path) -> None:
    out = tmp_path / "study"
    asked = ["study", "--short", "--out", str(out), "--plan", str(made), "--no-figures"]
    code, said, err = cli(*asked)
    assert code == 0, err
    assert "The plan was off by" in " ".join(said.split())
    plan = json.loads((out / "predicted.json").read_text())
    assert {row["workers"] for row in plan["settings"]} == {1, 2}
    assert "threads=2" not in {row["label"] for row in plan["settings"]}
    assert any("1 thread each" in reason for reason in plan["refused"]) or cores() < 2
    assert plan["profile"] == "p.json"
    page = (out / "report.html").read_text()
    assert "Predicted before it was measured" in page
    assert "With a core for each worker, predicted" in page
    assert "Nothing in this table was measured" in page
    rows = plan["own_cores"]["rows"]
    assert {row["workers"] for row in rows} == {2, 4, 8, 16}
    assert all(row["low"] < row["samples_per_s"] < row["high"] for row in rows)
    # Predictions are never changed: the same command goes on and keeps them.
    before = plan["settings"]
    assert cli(*asked)[0] == 0
    assert json.loads((out / "predicted.json").read_text())["settings"] == before


def test_a_plan_of_another_model_is_refused(cli: Cli, made: Path, tmp_path: Path) -> None:
    code, _, err = cli("study", "--out", str(tmp_path / "s"), "--plan", str(made))
    assert code == 2
    assert "the profile is of mlp:hidden=32, and the study trains cnn" in err
    assert not (tmp_path / "s").exists()


@pytest.mark.native_threads
@pytest.mark.slow
def test_a_damaged_plan_is_one_sentence(cli: Cli, made: Path, tmp_path: Path) -> None:
    out = tmp_path / "study"
    assert cli("study", "--short", "--out", str(out), "--no-figures", "--quiet")[0] == 0
    assert (out / "predicted.json").exists()
    (out / "predicted.json").write_text("{")
    code, _, err = cli("report", str(out), "--no-figures")
    assert code == 2
    assert "predicted.json" in err


@needs_testbed
@pytest.mark.slow
def test_a_check_on_a_testbed(cli: Cli, made: Path, tmp_path: Path) -> None:
    out = tmp_path / "check"
    asked = ["plan", str(made), "--check", "--network", "100mbit", "--workers", "3",
             "--strategy", "allreduce:collective=ring", "--codec", "none", "--settings", "1",
             "--repeats", "1", "--out", str(out), "--json"]  # fmt: skip
    code, said, err = cli(*asked)
    assert code == 0, err
    found = json.loads(said)
    [row] = found["rows"]
    assert row["measured_samples_per_s"][0] > 0
    assert abs(row["error"]) < 1  # a busy machine may be far off; `benchmarks/held_out.py` counts
    [link] = found["links"]
    # 100 Mbit/s with headers: 8 / 100e6 * 1514 / 1448 seconds per byte
    assert link["s_per_byte"] == pytest.approx(8.36e-8, rel=0.3)
    ledger = (out / "ledger.json").read_text()
    assert cli(*asked)[0] == 0  # nothing is left to do
    assert (out / "ledger.json").read_text() == ledger
    assert len((out / "measured.jsonl").read_text().splitlines()) == 1
    code, _, err = cli(*asked, "--seed", "5")
    assert code == 2
    assert "another check" in err


@pytest.mark.slow
def test_steps_to_an_accuracy_are_counted(cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "p.json"
    code, said, err = cli(
        *("profile", "--model", "mlp:hidden=32", "--data", "fashion-mini", "--seconds", "2"),
        *("--batch-sizes", "8,64", "--transports", "shm", "--accuracy", "0.65", "--out", str(out)),
        *("--follow", "local-sgd", "--follow", "allreduce/topk", "--follow-workers", "2,4"),
    )
    assert code == 0, err
    assert "Steps to an accuracy of 0.65" in said
    known = read_profile(out).accuracy
    assert known is not None
    small, large = known.branches
    assert (small.batch_size, large.batch_size) == (8, 64)
    assert small.mean >= large.mean
    assert len(known.followed) == 4
    assert all(each.steps[0] > known.branched_at for each in known.followed)
