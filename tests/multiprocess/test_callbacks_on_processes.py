"""Callbacks of runs on real processes: forked, from a fresh interpreter, under torchrun."""

import csv
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.commands import PACELINE, SMALL_TRAIN, Popen, run
from tests.conftest import identical, make_pairs, small_net

import paceline
from paceline.errors import BadRequest
from paceline.record.reader import read_events
from paceline.studies.grid import StudySpec
from paceline.studies.runner import run_study

MINE = """
import os, sys
import paceline

class Tells(paceline.Callback):
    def on_start(self, run): print("start", os.getpid(), run.total_steps, file=sys.stderr)
    def on_end(self, run): print("end", run.record["status"], file=sys.stderr)

class Fails(Tells):
    def on_step(self, event):
        if event["step"] == 3:
            raise KeyError("no such thing")
"""


class Unpicklable(paceline.Callback):
    """Holds a lock, as most loggers do, and a list of the person who started the run."""

    def __init__(self, seen: list[dict[str, Any]]) -> None:
        self.seen, self.lock = seen, threading.Lock()
        self.process = 0

    def on_step(self, event: dict[str, Any]) -> None:
        with self.lock:
            self.seen.append(event)

    def on_end(self, run: Any) -> None:
        self.process = os.getpid()


def trained(**options: Any) -> paceline.Run:
    data = (make_pairs(60), make_pairs(20, seed=1))
    return paceline.train(
        model=small_net,
        data=data,
        workers=2,
        batch_size=4,
        epochs=2,
        threads=1,
        memory_format="contiguous",
        progress=False,
        **options,
    )


@pytest.mark.slow
def test_a_list_of_the_caller_is_filled_by_forked_and_by_fresh_workers() -> None:
    seen: list[dict[str, Any]] = []
    runs = []
    stop = threading.Event()
    others = threading.Thread(target=stop.wait)  # beside a thread nothing is forked
    try:
        for out in ("forked", "fresh"):
            callback = Unpicklable(seen)
            runs.append(trained(callbacks=[callback], out=out))
            events = read_events(Path(out) / "events" / "worker-0.jsonl")
            assert seen == [event for event in events if event["kind"] == "step"]
            assert callback.process == os.getpid()
            assert threading.active_count() == (1 if out == "forked" else 2)
            seen.clear()
            if out == "forked":
                others.start()
    finally:
        stop.set()
        others.join()
    assert identical(runs[0].weights, runs[1].weights)


def test_a_callback_that_raises_ends_the_processes_of_an_endless_run(tmp_path: Path) -> None:
    class Fails(paceline.Callback):
        def on_step(self, event: dict[str, Any]) -> None:
            raise ValueError(f"at {event['step']}")

    before = set(psutil.Process().children(recursive=True))
    seen: list[dict[str, Any]] = []
    last = Unpicklable(seen)
    with pytest.raises(BadRequest, match=r"^callback Fails.on_step raised ValueError: at 1$"):
        trained(steps=10**9, callbacks=[Fails, last], out="run", checkpoint_every="2")
    assert set(psutil.Process().children(recursive=True)) <= before
    record = paceline.Run.open("run").record
    assert record["status"] == "failed"
    assert last.process == os.getpid()
    assert [event["step"] for event in seen] == [*range(1, len(seen) + 1)]


def endless(*arguments: str) -> list[str]:
    train = ["train", "--data", "synthetic:samples=200,shape=6", "--model", "mlp:hidden=4"]
    return [*train, "--workers", "2", "--epochs", "1000000", "--out", "run", *arguments]


def test_the_command_says_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    done = run(
        [PACELINE, *endless("--callbacks", "csv", "--callbacks", "mine:Fails", "--quiet")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "paceline: callback Fails.on_step raised KeyError: 'no such thing'" in done.stderr
    assert "Traceback" not in done.stderr
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "failed"
    with (tmp_path / "run" / "metrics.csv").open(newline="") as file:
        steps = [int(row["step"]) for row in csv.DictReader(file) if row["kind"] == "step"]
    assert steps == [*range(1, len(steps) + 1)]
    assert len(steps) >= 3


def test_ctrl_c_ends_the_callbacks_too(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    with open(tmp_path / "said", "w") as said:
        process = Popen(
            [PACELINE, *endless("--callbacks", "mine:Tells", "--callbacks", "csv")],
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
    table = tmp_path / "run" / "metrics.csv"
    until = time.monotonic() + 60
    try:
        while not (table.exists() and table.read_text().count("step,") > 5):
            assert process.poll() is None, (tmp_path / "said").read_text()
            assert time.monotonic() < until
            time.sleep(0.02)
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert psutil.wait_procs(family, timeout=20)[1] == [], "no process is left"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    text = (tmp_path / "said").read_text()
    assert f"start {process.pid} " in text
    assert "end interrupted" in text


@pytest.mark.slow
@pytest.mark.parametrize("callback", ["Tells", "Fails"])
def test_under_torchrun_only_rank_0_calls(tmp_path: Path, callback: str) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    torchrun = [str(Path(sys.executable).parent / "torchrun"), "--standalone"]
    torchrun += ["--nproc-per-node", "2", str(PACELINE), *SMALL_TRAIN, "--out", "run"]
    done = subprocess.run(
        [*torchrun, "--callbacks", "csv", "--callbacks", f"mine:{callback}"],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    fails = callback == "Fails"
    status = "failed" if fails else "completed"
    assert (done.returncode == 0) == (not fails), done.stderr
    assert done.stderr.count("start ") == 1 or fails
    assert done.stderr.count("callback Fails.on_step raised KeyError") == fails
    assert done.stderr.count(f"end {status}") == (not fails), done.stderr
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == status
    with (tmp_path / "run" / "metrics.csv").open(newline="") as file:
        steps = [int(row["step"]) for row in csv.DictReader(file) if row["kind"] == "step"]
    assert steps == [1, 2, 3, 4]


def test_every_run_of_a_study_has_its_own_table(tmp_path: Path) -> None:
    kept: list[dict[str, Any]] = []
    study = {
        "base": {
            "data": "synthetic:samples=60,shape=6",
            "model": "mlp:hidden=4",
            "steps": 3,
            "global_batch_size": 12,
            "callbacks": ["csv"],
        },
        "axes": {"strategy": ["allreduce"], "workers": [1, 2]},
        "all_cores": False,
    }
    run_study(StudySpec.make(study), Path("named"))
    tables = sorted(Path("named/runs").glob("*/metrics.csv"))
    assert len(tables) == len(list(Path("named/runs").iterdir())) >= 2
    study["base"]["callbacks"] = [Unpicklable(kept)]
    for _ in range(2):  # the second call finds all runs there
        run_study(StudySpec.make(study), Path("objects"))
    assert len(kept) == 3 * len(tables)
    told = json.loads(Path("objects/study.json").read_text())
    assert told["definition"]["base"]["callbacks"] == "<Unpicklable>"
    with pytest.raises(BadRequest, match="unknown axis 'callbacks'"):
        StudySpec.make({"axes": {"callbacks": ["csv"]}})
