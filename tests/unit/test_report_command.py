"""The command of a setting: the command line parses it into the run's own options."""

import shlex
from pathlib import Path
from typing import Any

import pytest
from tests.records import run, write_study

from paceline.cli.train import train
from paceline.report.answer import winner
from paceline.report.command import command_of, study_command
from paceline.report.lines import Study
from paceline.report.reading import read_study
from paceline.request.config import Config

ASKED = {
    "model": "mlp:hidden=32",
    "data": "my data",
    "strategy": "local-sgd:every=8",
    "workers": "2",
    "global_batch_size": "120",
    "epochs": "3",
    "faults": "slow:rank=1,factor=3",
    "target_accuracy": "0.9",
    "threads": "1",
}


def planned(folder: Path, asked: dict[str, Any], **about: Any) -> Study:
    """A study of one run, whose record is resolved as a real one's."""
    config = Config.make(asked).described()
    resolved: dict[str, Any] = {"out": "runs/x", "memory_format": "contiguous", "transport": "shm"}
    record = run(config["strategy"], int(config["workers"]))
    resolved |= {"momentum": 0.9, "threads": 1}
    record["config"] |= config | resolved | {"oversubscribed": False, "batch_sizes": [60, 60]}
    write_study(folder, [record], **about)
    study = read_study(folder)
    for each in study.about["runs"]:
        each["options"] = asked
    return study


def parsed(command: str) -> Config:
    """What `paceline train` makes of a command line."""
    program, name, *words = shlex.split(command)
    assert (program, name) == ("paceline", "train")
    given = train.make_context("train", words).params
    return Config.make({k: v for k, v in given.items() if k in Config.options() and v})


@pytest.mark.parametrize(
    ("master", "said"),
    [
        ("spark://master:7077", ""),  # of the cluster in containers
        ("spark://127.0.0.1:41441", ""),  # of the cluster on this machine
        ("spark://cluster.example:7077", "--master spark://cluster.example:7077"),
    ],
)
def test_the_address_of_a_cluster_that_paceline_starts_is_left_out(
    tmp_path: Path, master: str, said: str
) -> None:
    asked = {**ASKED, "launcher": "spark", "master": master}
    study = planned(tmp_path, asked)
    command = command_of(study, study.lines[0])
    assert "--launcher spark" in command
    assert (said in command) if said else ("--master" not in command)


def test_the_command_line_parses_it_into_the_same_options(tmp_path: Path) -> None:
    study = planned(tmp_path, ASKED)
    command = command_of(study, study.lines[0])
    assert command == (
        "paceline train --model mlp:hidden=32 --data 'my data' --strategy local-sgd:every=8"
        " --workers 2 --faults slow:rank=1,factor=3 --global-batch-size 120 --epochs 3"
    )
    wanted = Config.make(
        {k: v for k, v in ASKED.items() if k not in ("target_accuracy", "threads")}
    )
    assert parsed(command) == wanted


def test_threads_are_named_where_the_default_differs(tmp_path: Path) -> None:
    study = planned(tmp_path, {"strategy": "serial", "threads": "1"})  # two cores
    assert command_of(study, study.lines[0]) == "paceline train --strategy serial --threads 1"


def test_weak_scaling_names_each_worker_s_batch_and_steps(tmp_path: Path) -> None:
    about = {"definition": {"title": "", "scaling": "weak"}}
    study = planned(tmp_path, {"strategy": "psgd", "workers": "2", "batch_size": "60"}, **about)
    study.lines[0].runs[0].record["config"] |= {"steps": 50}
    study.about["runs"][0]["options"] = {"strategy": "psgd", "global_batch_size": "120"}
    command = command_of(study, study.lines[0])
    assert command == "paceline train --strategy psgd --workers 2 --batch-size 60 --steps 50"
    assert parsed(command).steps == 50


def test_a_python_object_has_no_command(tmp_path: Path) -> None:
    study = planned(tmp_path, {"strategy": "psgd", "workers": "2"})
    study.lines[0].runs[0].record["config"]["model"] = "<Sequential>"
    assert command_of(study, study.lines[0]) == ""


def test_runs_without_a_study_name_what_is_not_a_default(tmp_path: Path) -> None:
    study = planned(tmp_path, {"strategy": "psgd", "workers": "2", "lr": "0.5"})
    study.about.clear()
    command = command_of(study, study.lines[0])
    assert command == "paceline train --strategy psgd --workers 2 --lr 0.5"


@pytest.mark.parametrize(("fast", "named"), [(2.0, "psgd x 2"), (5.0, "serial x 1")])
def test_the_winner_is_faster_than_serial_or_serial(
    tmp_path: Path, fast: float, named: str
) -> None:
    runs = [run("serial", 1, 4.0 + s) for s in (0, 0.01)]
    runs += [run("psgd", 2, fast + s) for s in (0, 0.01)]
    found = winner(read_study(write_study(tmp_path / "s", runs)))
    assert found is not None
    assert found.id == named


def test_the_study_s_command_is_the_typed_one(tmp_path: Path) -> None:
    study = planned(tmp_path / "a", {"strategy": "serial"})
    study.about["environment"] = {"command": "paceline study my.toml --short"}
    assert study_command(study) == "paceline study my.toml --short"
    assert study_command(planned(tmp_path / "b", {"strategy": "serial"})) == ""


def test_flags_of_a_study_are_replaced(tmp_path: Path) -> None:
    study = planned(tmp_path, ASKED)
    for typed in ("--seeds 2 --budget=3min", "--seeds=2 --budget 3min"):
        study.about["environment"] = {"command": f"paceline study 'a b.toml' {typed} --short"}
        assert study_command(study, seeds=4, budget="9min") == (
            "paceline study 'a b.toml' --short --seeds 4 --budget 9min"
        )
    study.about["environment"] = {"command": "paceline study it's.toml"}  # of an earlier version
    assert study_command(study) == "paceline study it's.toml"
    assert study_command(study, seeds=4) == ""


def test_a_setting_with_other_options(tmp_path: Path) -> None:
    study = planned(tmp_path, {**ASKED, "strategy": "ps", "servers": "1"})
    command = command_of(study, study.lines[0], strategy="local-sgd:every=16", servers=None)
    assert parsed(command).strategy == Config.make({"strategy": "local-sgd:every=16"}).strategy
    assert "--servers" not in command
