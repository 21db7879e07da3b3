"""A run that signals ask to end, once or often, writes one record and leaves no process.

Number 14 of issue 15.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.commands import PACELINE, Popen

from paceline.launch.signals import ending, held_back

API = """
import sys, torch, paceline
from torch import nn
data = (torch.randn(64, 6), torch.arange(64) % 3)
paceline.train(model=lambda: nn.Linear(6, 3), data=data, workers=int(sys.argv[1]),
               transport=sys.argv[2], epochs=10**6, batch_size=4, threads=1, progress=False,
               out="run")
"""


def ended(
    command: list[str],
    how: list[signal.Signals],
    tmp_path: Path,
    start: type[subprocess.Popen[Any]] = Popen,
) -> tuple[int, str]:
    """Start an endless run, signal it after a few steps; return its exit code and its output."""
    with open(tmp_path / "said", "w") as said:
        process = start(command, stdout=said, stderr=said, start_new_session=True)
    events = tmp_path / "run" / "events" / "worker-0.jsonl"
    until = time.monotonic() + 60
    try:
        while not (events.exists() and events.read_text().count('"step"') > 12):
            assert process.poll() is None, (tmp_path / "said").read_text()
            assert time.monotonic() < until
            time.sleep(0.02)
        family = psutil.Process(process.pid).children(recursive=True)
        for number in how:
            process.send_signal(number)
            time.sleep(0.01)
        code = process.wait(60)
        assert psutil.wait_procs(family, timeout=20)[1] == [], "no process is left"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return code, (tmp_path / "said").read_text()


def record(tmp_path: Path) -> dict:
    return json.loads((tmp_path / "run" / "run.json").read_text())


@pytest.mark.parametrize(
    ("how", "workers", "transport"),
    [
        ([signal.SIGTERM], "2", "shm"),
        ([signal.SIGHUP], "2", "inproc"),
        ([signal.SIGINT] * 5, "2", "gloo"),
        pytest.param(
            [signal.SIGHUP, signal.SIGINT, signal.SIGTERM], "2", "shm", marks=pytest.mark.slow
        ),
        pytest.param([signal.SIGTERM] * 5, "2", "mpi", marks=pytest.mark.slow),
    ],
)
def test_14_a_signal_leaves_a_record_in_the_api(
    tmp_path: Path, how: list[signal.Signals], workers: str, transport: str
) -> None:
    (tmp_path / "program.py").write_text(API)
    code, said = ended([sys.executable, "program.py", workers, transport], how, tmp_path)
    assert code != 0
    # With several signals, a later one may end the program before it prints the error.
    assert "Interrupted" in said or len(how) > 1
    found = record(tmp_path)
    assert found["status"] == "interrupted"
    assert found["result"]["steps"] > 5
    expected = "interrupted" if how[0] is signal.SIGINT else f"interrupted by {how[0].name}"
    assert found["error"] == expected


@pytest.mark.parametrize(
    "how", [[signal.SIGHUP], pytest.param([signal.SIGINT] * 5, marks=pytest.mark.slow)]
)
def test_14_a_closed_terminal_leaves_a_record_of_the_command(
    tmp_path: Path, how: list[signal.Signals]
) -> None:
    train = ["train", "--data", "synthetic:samples=200,shape=6", "--model", "mlp:hidden=4"]
    train += ["--workers", "2", "--epochs", "1000000"]
    code, said = ended(
        [str(PACELINE), *train, "--out", "run"], how, tmp_path, start=subprocess.Popen
    )
    assert code == 130
    assert said.strip().splitlines()[-1].startswith("paceline: interrupted")
    assert "Traceback" not in said
    assert record(tmp_path)["status"] == "interrupted"


def test_14_only_the_first_signal_interrupts_and_none_while_the_record_is_written() -> None:
    heard: list[str] = []
    with ending() as end:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGHUP)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.raise_signal(number)
            heard.append(end.reason)
    assert heard == ["interrupted by SIGHUP"] * 3
    with ending() as end:
        end.settling = True
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_14_a_programs_own_handler_stays() -> None:
    mine: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: mine.append(number))
    ignored = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ending() as end:
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGHUP)
        assert mine == [signal.SIGTERM]
        assert end.heard is None
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGHUP, ignored)


def test_14_ctrl_c_during_an_import_waits_for_its_end() -> None:
    imported: list[str] = []

    def importing() -> None:
        with held_back():
            for module in ("one", "another"):
                signal.raise_signal(signal.SIGINT)
                imported.append(module)

    with pytest.raises(KeyboardInterrupt):
        importing()
    assert imported == ["one", "another"]


def _a_run(fails: bool) -> None:
    with ending() as end:
        end.settling = True
        signal.raise_signal(signal.SIGINT)  # not now: the record is being written
        assert end.heard is signal.SIGINT
        if fails:
            raise ValueError("the run failed, and its study would go on")


@pytest.mark.parametrize("fails", [False, True])
def test_a_signal_while_a_runs_record_is_written_ends_the_study(fails: bool) -> None:
    """A study is around its runs: what one of them held back must not be lost."""
    with ending(), pytest.raises(KeyboardInterrupt):
        _a_run(fails)
