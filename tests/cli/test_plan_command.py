"""`paceline plan` from the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.unit.test_profile import profile

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
