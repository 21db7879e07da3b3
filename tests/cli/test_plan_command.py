"""`paceline plan` from the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.test_profile import profile

from paceline.planning.accuracy import Accuracy, Branch
from paceline.planning.stored import write_profile

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def made(tmp_path: Path) -> str:
    path = tmp_path / "profile.json"
    write_profile(profile(), path)
    return str(path)


def test_a_plan_names_the_fastest_and_says_that_it_is_predicted(cli: Cli, made: str) -> None:
    code, out, _ = cli("plan", made, "--workers", "1,2,4", "--price", "0.5")
    assert code == 0
    assert "Predicted for" in out
    assert "the fastest is" in out
    assert "The cheapest is" in out
    assert "measure it by paceline study" in out
    assert all(len(line) <= 100 for line in out.splitlines()[:10])


def test_the_plan_as_json_agrees_with_itself(cli: Cli, made: str) -> None:
    code, out, _ = cli("plan", made, "--workers", "1-3", "--strategy", "allreduce", "--json")
    assert code == 0
    found = json.loads(out)
    assert found["schema"] == 1
    rows = found["rows"]
    assert {row["workers"] for row in rows} == {1, 2, 3}
    assert found["fastest"] == max(rows, key=lambda row: row["samples_per_s"])
    assert all(r["samples_per_s_low"] < r["samples_per_s"] < r["samples_per_s_high"] for r in rows)
    assert cli("plan", made, "--workers", "1-3", "--strategy", "allreduce", "--json")[1] == out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--network", "0mbit"], "the rate must be"),
        (["--network", "fast"], "network"),
        (["--workers", "0"], "1 or more"),
        (["--hosts", "many"], "16x4"),
        (["--hosts", "2x2", "--workers", "9"], "do not fit"),
        (["--speeds", "1,0"], "above 0"),
        (["--price", "-1"], "0 or more"),
        (["--batch-size", "8", "--global-batch-size", "8"], "not both"),
        (["--strategy", "allreduse"], "allreduce"),
        (["--codec", "fp17"], "fp16"),
        (["--strategy", "gossip:mode=async"], "does not declare its exchanges"),
    ],
)
def test_bad_input_is_one_sentence(cli: Cli, made: str, options: list[str], said: str) -> None:
    code, _, err = cli("plan", made, *options)
    assert code == 2
    assert said in err
    assert "Traceback" not in err


def test_a_profile_that_is_none(cli: Cli, made: str, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.json"
    damaged.write_text(Path(made).read_text()[:200])
    for path in (str(tmp_path / "absent.json"), str(damaged)):
        code, _, err = cli("plan", path)
        assert code == 2
        assert Path(path).name in err
        assert "Traceback" not in err


# --- the page


@pytest.mark.native_threads
def test_a_plan_as_a_page(cli: Cli, made: str, tmp_path: Path) -> None:
    out = tmp_path / "plan"
    asked = ["plan", made, "--workers", "1,2,4", "--strategy", "allreduce", "--out", str(out)]
    code, _, err = cli(*asked)
    assert code == 0
    assert "plan.html" in err
    found = json.loads((out / "plan.json").read_text())
    assert {cell["bit_per_s"] for cell in found["map"]} >= {1e7, 1e10}
    page = (out / "plan.html").read_text()
    assert "Predicted for" in page
    assert "data-chart=speed" in page
    assert "data-chart=map" in page


def test_measured_points_need_a_page_and_a_folder(cli: Cli, made: str, tmp_path: Path) -> None:
    code, _, err = cli("plan", made, "--measured", str(tmp_path))
    assert code == 2
    assert "--out" in err
    code, _, err = cli(
        "plan", made, "--workers", "2", "--measured", str(tmp_path), "--out", str(tmp_path / "p")
    )
    assert code == 2
    assert "holds no run" in err


# --- a table that was measured elsewhere


def test_a_table_is_split_by_workers(cli: Cli, tmp_path: Path) -> None:
    table = tmp_path / "steps.csv"
    table.write_text(
        "workers,hosts,batch_size,step_s\n"
        "1,1,16,0.10\n1,1,32,0.18\n2,2,16,0.15\n4,4,16,0.18\n8,8,16,0.20\n"
    )
    profile = str(tmp_path / "table.json")
    assert (
        cli("profile", "--measurements", str(table), "--parameters", "1M", "--out", profile)[0] == 0
    )
    code, out, _ = cli("plan", profile, "--check")
    assert code == 0
    assert "fitted to the rows with 1 and 2 workers" in out
    assert "2 rows predicted: median error" in out
    code, out, _ = cli("plan", profile, "--check", "--json")
    found = json.loads(out)
    assert [row["workers"] for row in found["rows"]] == [4, 8]
    # the two workers of the fit took 50 ms to exchange 4 MB, of which each sends all
    assert 8 / found["between"]["s_per_byte"] == pytest.approx(8 * 4e6 / 0.05, rel=0.05)


def test_a_check_of_a_model_that_cannot_be_run(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    known = profile()
    write_profile(replace(known, model=replace(known.model, name="own")), path)
    code, _, err = cli("plan", str(path), "--check")
    assert code == 2
    assert "profile a built-in one" in err


def test_steps_to_an_accuracy_lead_the_answer(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "steps.json"
    known = Accuracy(0.9, 40, "sqrt", (Branch(16, (1000, 1100)), Branch(128, (230, 240))))
    write_profile(replace(profile(), accuracy=known), path)
    asked = ["plan", str(path), "--workers", "1-8", "--batch-size", "16", "--price", "1"]
    code, out, _ = cli(*asked)
    assert code == 0
    assert "seconds to 0.9" in out
    assert "It reaches an accuracy of 0.9 first with" in out
    assert "The cheapest way to it is" in out
    assert "the steps to it are not known" in out  # of local-sgd and gossip
    found = json.loads(cli(*asked, "--json")[1])
    timed = [row for row in found["rows"] if row["time_to_accuracy_s"] is not None]
    assert {row["strategy"] for row in timed if row["workers"] > 1} == {"allreduce", "ps"}
    assert found["soonest"] == min(timed, key=lambda row: row["time_to_accuracy_s"])
    one = next(row for row in timed if row["workers"] == 1)
    assert one["steps_to_accuracy"] == pytest.approx(1050)
    assert one["time_to_accuracy_s"] == pytest.approx(1050 * one["step_s"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--follow", "gossip"], "--accuracy"),
        (["--accuracy", "0.9", "--follow-workers", "2"], "--follow STRATEGY"),
        (["--accuracy", "0.9", "--follow", "gossip", "--follow-workers", "64"], "2 to 32 workers"),
        (["--accuracy", "1.5"], "range"),
    ],
)
def test_bad_questions_about_an_accuracy(cli: Cli, options: list[str], said: str) -> None:
    code, _, err = cli("profile", "--data", "fashion-mini", *options)
    assert code == 2
    assert said in err
