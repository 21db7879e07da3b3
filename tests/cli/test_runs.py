"""`paceline runs`, `paceline show`, `paceline evaluate`: past runs as a user finds them."""

import json
import os
import sys
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete
from tests.records import run as made_up
from tests.records import write_study

import paceline
from paceline.cli.main import cli as paceline_cli

LATER = 2_000_000_000.0


def written(folder: Path, started: float = LATER, **about) -> Path:
    """Write a finished run whose first event has a known time."""
    (folder / "events").mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(made_up(**about)))
    first = {"kind": "aside", "rank": 0, "session": 0, "t": started, "what": "x"}
    event = {**first, "began": 0.0, "seconds": 0.0}
    (folder / "events" / "worker-0.jsonl").write_text(json.dumps(event) + "\n")
    return folder


def test_runs_lists_the_newest_first_within_80_columns(cli, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    long = "20261117-211137-cnn-fashion-mini-allreduce-2"
    written(Path("runs", "a"), LATER, model="mlp:hidden=512x256x128", data="shards:path=data/x")
    written(Path("runs", long), LATER + 60, strategy="allreduce:collective=ring", workers=2)
    written(Path("runs", "c"), LATER - 60, error="rank 1 is gone")
    code, out, err = cli("runs")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.strip() for line in lines if line.startswith("  ")] == [
        f"runs/{long}", "runs/a", "runs/c",
    ]  # fmt: skip
    assert "95.00%" in lines[1]
    assert "failed" in lines[5]
    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = cli("runs")
    assert out.splitlines()[1].endswith(f"runs/{long}")  # one line per run where it fits


def test_runs_as_json_and_damaged_folders(cli) -> None:
    written(Path("mine", "a"), metric=None)
    Path("mine", "b").mkdir()
    Path("mine", "b", "run.json").write_text("{")
    Path("mine", "notes").mkdir()
    Path("mine", "file").write_text("")
    killed = Path("mine", "d")
    killed.mkdir()
    (killed / "config.json").write_text('{"model": "cnn", "strategy": "ps", "workers": 3}')
    code, out, err = cli("runs", "mine", "--json")
    found = {run["folder"]: run for run in json.loads(out)}
    assert code == 0
    assert set(found) == {"mine/a", "mine/d"}
    assert found["mine/a"]["score"] == 0.95
    assert found["mine/a"]["samples_per_s"] == 1000
    assert (found["mine/d"]["status"], found["mine/d"]["workers"]) == ("killed", 3)
    assert err.startswith("left out: mine/b/run.json cannot be read")
    assert err.count("\n") == 1
    code, out, err = cli("runs", "nowhere")
    assert (code, err) == (
        2,
        "paceline: nowhere is not a folder: give the folder of your runs (default: runs)\n",
    )
    Path("empty").mkdir()
    assert cli("runs", "empty")[:2] == (0, "empty holds no run\n")


def test_runs_of_a_study_and_of_one_run(cli, tmp_path: Path) -> None:
    write_study(Path("runs", "s"), [made_up(), made_up("allreduce", 2, 1.0)])
    code, out, _ = cli("runs", "runs/s", "--json")
    assert code == 0
    assert len(json.loads(out)) == 2
    assert "runs/s is a study: paceline runs runs/s" in cli("runs")[1]
    written(Path("one"))
    assert [run["folder"] for run in json.loads(cli("runs", "one", "--json")[1])] == ["one"]


def test_show_has_the_table_the_notices_and_the_options(cli, run_inproc) -> None:
    run = run_inproc(steps=3, workers=2, lr=0.5, batch_size=100, checkpoint_every=2)
    (run.out / "events" / "notices.jsonl").write_text(
        "".join(
            json.dumps({"kind": "notice", "rank": 0, "session": 0, "t": 1.0, "text": text}) + "\n"
            for text in ("one thing", "another", "one thing")
        )
    )
    code, out, err = cli("show", str(run.out))
    assert (code, err) == (0, "")
    assert "test accuracy" in out
    assert "peak memory" in out
    assert out.count("note: one thing\n") == 1
    assert "lr=0.5" in out
    assert "seed=" not in out  # a default
    found = json.loads(cli("show", str(run.out), "--json")[1])
    assert found["notices"] == ["one thing", "another"]
    assert found["options"]["checkpoint_every"] == "2"
    assert found["decided"]["batch_size"] == 100
    assert found["result"] == run.record["result"]
    code, _, err = cli("show", "nowhere")
    assert (code, err) == (2, "paceline: nowhere is not a run: it has no run.json\n")


def test_show_says_why_a_run_failed(cli) -> None:
    written(Path("a"), error="worker 1 failed: it was [red]")
    assert "failed: worker 1 failed: it was [red]" in cli("show", "a")[1]


def test_evaluate_repeats_the_last_evaluation(cli, monkeypatch) -> None:
    run = paceline.train(
        model="linear", data="fashion-mini", steps=3, transport="inproc", out="a", threads=1
    )
    code, out, err = cli("evaluate", "a", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == {
        "loss": run.test_loss, "accuracy": run.test_accuracy, "samples": 1000,
    }  # fmt: skip
    assert f"{100 * run.test_accuracy:.2f}%" in cli("evaluate", "a", "--data", "fashion-mini")[1]
    assert json.loads(cli("evaluate", "a", "--which", "best", "--json")[1])["samples"] == 1000
    code, _, err = cli("evaluate", "a", "--which", "ema")
    assert code == 2
    assert "a has no model-ema.safetensors: a run writes it with --ema 0.999" in err
    assert "Did you mean 'best'" in cli("evaluate", "a", "--which", "bset")[2]
    assert "unknown metric 'nosuch'" in cli("evaluate", "a", "--metric", "nosuch")[2]


def test_evaluate_asks_for_a_model_that_was_given_in_python(cli, monkeypatch) -> None:
    Path("ownnet.py").write_text(
        "from torch import nn\ndef make(): return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))\n"
    )
    monkeypatch.syspath_prepend(os.getcwd())
    import ownnet

    paceline.train(
        model=ownnet.make(), data="fashion-mini", steps=2, transport="inproc", out="a", threads=1
    )
    code, _, err = cli("evaluate", "a")
    assert code == 2
    assert "--model" in err
    assert err.count("\n") == 1
    code, out, err = cli("evaluate", "a", "--model", "ownnet:make", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["samples"] == 1000
    del sys.modules["ownnet"]


@pytest.mark.parametrize("command", ["runs", "show", "evaluate"])
def test_a_shell_completes_folders(command: str) -> None:
    found = ShellComplete(paceline_cli, {}, "paceline", "_X").get_completions([command], "ru")
    assert [item.type for item in found] == ["dir"]


def test_a_shell_completes_metrics() -> None:
    complete = ShellComplete(paceline_cli, {}, "paceline", "_X")
    found = complete.get_completions(["evaluate", "a", "--metric"], "a")
    assert {item.value for item in found} == {"accuracy", "auc"}
