"""The live page in a real browser: of a run while it goes and when it has ended, of a study, and
of a folder in which nothing has begun. A gate (a fault that waits for a file) holds the runs.
"""

import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.browser import BROWSER
from tests.commands import PACELINE, Popen, run
from tests.live_browser import open_page

GATE = """
import time
from dataclasses import dataclass
from pathlib import Path
from paceline.faults.base import Fault
from paceline.registry import faults

@faults.register("gate")
@dataclass
class Gate(Fault):
    step: int = 1

    def before_step(self, step, transport):
        while (transport.rank, step) == (0, self.step) and not Path("open").exists():
            time.sleep(0.01)
"""
SMALL = ["--data", "synthetic:shape=1x8x8,samples=600", "--model", "mlp:hidden=16"]
TRAIN = [str(PACELINE), "train", *SMALL, "--strategy", "allreduce", "--workers", "2", "--steps",
         "12", "--batch-size", "8", "--evaluate-every", "2", "--out", "r", "--plugin", "gate.py",
         "--faults", "gate:step=8", "--sample-every-s", "0.05", "--no-progress"]  # fmt: skip
STUDY = """
title = "Two settings"
all_cores = false
[base]
data = "synthetic:shape=1x8x8,samples=600"
model = "mlp:hidden=16"
steps = 6
plugin = "gate.py"
faults = "gate:step=4"
[axes]
strategy = ["allreduce"]
workers = [2]
"""
DEADLINE_S = 60.0
FITS = "document.documentElement.scrollWidth <= innerWidth"


@contextmanager
def started(command: list[str], said: Path) -> Iterator[tuple[subprocess.Popen[Any], str]]:
    """A command that opens a page, and the page's address; both have ended afterwards."""
    Path("gate.py").write_text(GATE)
    with said.open("wb") as file:
        process = Popen(command, stdout=file, stderr=file, start_new_session=True)
    family: list[psutil.Process] = []
    try:
        end = time.monotonic() + DEADLINE_S
        while not (found := re.search(r"http://127\.0\.0\.1:\d+/", said.read_text())):
            assert process.poll() is None, said.read_text()
            assert time.monotonic() < end, said.read_text()
            time.sleep(0.02)
        yield process, found[0]
        if process.poll() is None:
            family = psutil.Process(process.pid).children(recursive=True)
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(30)
        assert psutil.wait_procs(family, timeout=20)[1] == [], "no process is left"


def answers(address: str) -> bool:
    port = int(address.rstrip("/").rpartition(":")[2])
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0


@BROWSER
def test_a_run_is_watched_from_its_first_steps_to_its_end(tmp_path: Path) -> None:
    said = tmp_path / "said"
    with (
        started([*TRAIN, "--watch"], said) as (process, address),
        open_page(tmp_path / "p") as page,
    ):
        page.visit(address)
        page.until("document.body.dataset.shown === 'r 7 training'")
        page.until("document.querySelectorAll('#loss .line.train').length === 1")
        assert "7 of 12" in page.text()
        assert page.run("document.querySelectorAll('#metric circle').length") == 3
        assert page.run("document.querySelectorAll('#ranks tbody tr').length") == 2
        worker = page.run("document.querySelector('#ranks tbody tr').innerText")
        assert worker.startswith("worker 0")
        assert re.search(r"\d+% / \d+% / \d+%", worker)
        chip = "getComputedStyle(document.querySelector('[data-rank=\"1\"] .chip')).backgroundColor"
        assert page.run(chip) == "rgb(240, 164, 58)"  # look.css: --worker-1
        line = "document.querySelector('#loss .line.train').getAttribute('points')"
        by_time = page.run(line)
        page.run("document.querySelector('button[data-x=\"0\"]').click()")
        assert page.run(line) != by_time
        assert page.run("document.querySelector('#loss').textContent").endswith("01234567")
        Path("open").touch()
        page.until("document.body.dataset.shown === 'r 12 completed'")
        page.until("document.getElementById('banner').textContent.includes('ended')")
        assert process.wait(30) == 0, said.read_text()
        banner = page.run("document.getElementById('banner').textContent")
        accuracy = json.loads(Path("r/run.json").read_text())["result"]["test_accuracy"]
        assert banner.startswith(f"Completed: accuracy {100 * accuracy:.2f}% after 12 steps")
        assert page.run(FITS)
        assert page.errors == []
        assert not answers(address), "the page ends with the run"


@pytest.mark.slow
@BROWSER
def test_a_study_from_an_empty_folder_to_its_end(tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text(STUDY)
    folder = tmp_path / "s"
    folder.mkdir()
    command = [str(PACELINE), "watch", "s", "--no-browser"]
    with started(command, tmp_path / "w") as (watch, address), open_page(tmp_path / "p") as page:
        page.visit(address, width=390, dark=True)
        page.until("document.body.dataset.shown === 'waiting'")
        assert "This page waits for a run or a study in s" in page.text()
        with open("said", "w") as said:
            study = Popen([str(PACELINE), "study", "study.toml", "--out", "s", "--no-figures",
                           "--watch"], stdout=said, stderr=said)  # fmt: skip
        try:
            page.until("document.body.dataset.shown.endsWith(' 3 training')")
            assert re.search(r"^[01] of 2\nruns done", page.text(), re.MULTILINE)
            assert page.run("document.querySelectorAll('button.run.running').length") == 1
            Path("open").touch()
            assert study.wait(60) == 0, Path("said").read_text()
            own = re.findall(r"^watch: (http://127\.0\.0\.1:\d+/)$", Path("said").read_text(), re.M)
            assert len(own) == 1
            assert own[0] != address
            assert not answers(own[0]), "the study's own page has ended with it"
        finally:
            if study.poll() is None:
                study.terminate()
                study.wait(30)
        page.until("document.getElementById('state').textContent === 'completed'")
        assert "2 of 2" in page.text()
        for name in sorted(path.name for path in (folder / "runs").iterdir()):
            page.run(f"document.querySelector('[data-run=\"{name}\"]').click()")
            page.until(f"document.body.dataset.shown === '{name} 6 completed'")
            page.until(f"document.querySelector('.run.shown').dataset.run === '{name}'")
        ground = page.run("getComputedStyle(document.body).backgroundColor")
        assert ground == "rgb(21, 23, 26)"  # look.css: --paper of the dark theme
        for width, dark in ((390, True), (1280, False)):
            page.visit(address, width, dark)
            page.until("document.body.dataset.shown.endsWith(' 6 completed')")
            assert page.run(FITS)
        assert page.errors == []
        watch.send_signal(signal.SIGINT)
        assert watch.wait(30) == 0
        assert (tmp_path / "w").read_text() == f"{address}  (Ctrl-C ends it)\n"


def test_the_page_dies_with_a_run_that_is_killed(tmp_path: Path) -> None:
    with started([*TRAIN, "--watch"], tmp_path / "said") as (process, address):
        with urllib.request.urlopen(f"{address}state.json", timeout=30) as answer:
            assert answer.status == 200
        family = psutil.Process(process.pid).children(recursive=True)
        assert any("paceline.watch" in " ".join(p.cmdline()) for p in family)
        process.kill()
        process.wait(30)
        assert psutil.wait_procs(family, timeout=30)[1] == []
        assert not answers(address)


def test_a_page_from_python(run_inproc, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_inproc(steps=2, progress=False, watch=True)
    assert run.record["status"] == "completed"
    address = capsys.readouterr().out.strip()
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", address)
    assert not answers(address)


def test_what_cannot_be_watched_is_one_sentence(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for arguments, wanted in [
            (["nosuch"], r"paceline: there is no folder nosuch: give the folder of a run .*\n"),
            ([".", "--port", str(port)], rf"paceline: port {port} is in use .*: choose .*\n"),
            ([".", "--port", "70000"], r"(?s)Usage.*70000 is not in the range.*"),
        ]:
            done = run([str(PACELINE), "watch", *arguments], capture_output=True, text=True)
            assert done.returncode == 2
            assert done.stdout == ""
            assert re.fullmatch(wanted, done.stderr), done.stderr


@pytest.mark.parametrize("command", ["watch", "train"])
def test_a_missing_extra(tmp_path: Path, command: str) -> None:
    code = (
        "import sys, paceline.watch.server as s; s.find_spec = lambda name: None;"
        " from paceline.cli.main import main; sys.argv = ['paceline', *sys.argv[1:]]; main()"
    )
    arguments = {"watch": ["watch", "."], "train": ["train", "--data", "fashion-mini", "--watch"]}
    done = run([sys.executable, "-c", code, *arguments[command]], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == (
        "paceline: the live page needs starlette and uvicorn: pip install 'paceline[watch]'\n"
    )
    assert not (tmp_path / "runs").exists()
