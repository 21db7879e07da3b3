"""Studies on real processes: stopped and started again, failing in parts, and every study file in
its short setting.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from tests.browser import CHROMIUM, look
from tests.commands import PACELINE, Popen, run
from tests.records import recompute

from paceline.report.judge import own_speedup
from paceline.report.reading import read_study
from paceline.report.render import render
from paceline.studies.grid import BUILTIN
from paceline.testbed.build import missing

ROOT = Path(__file__).parent.parent.parent
STUDIES = sorted((ROOT / "studies").glob("*.toml"))

SMALL = """
seeds = 2
[base]
data = "fashion-mini"
model = "mlp:hidden=32"
data_share = 0.5
sample_every_s = 0.05
[axes]
strategy = ["allreduce:collective=ring", "local-sgd:every=4"]
workers = [1, 2]
"""


def records(folder: Path) -> dict[str, dict]:
    return {f.parent.name: json.loads(f.read_text()) for f in (folder / "runs").glob("*/run.json")}


@pytest.mark.slow
def test_a_study_that_was_killed_goes_on(tmp_path: Path) -> None:
    """SIGKILL in the middle: no run is repeated, none is lost, no process stays."""
    (tmp_path / "study.toml").write_text(SMALL)
    command = [str(PACELINE), "study", "study.toml", "--out", "s", "--no-figures"]
    first = Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while len(records(tmp_path / "s")) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    children = psutil.Process(first.pid).children(recursive=True)
    first.kill()
    first.wait(30)
    _gone, alive = psutil.wait_procs(children, timeout=20)
    assert not alive, [p.cmdline() for p in alive]
    before = {
        name: os.stat(tmp_path / "s" / "runs" / name / "run.json").st_mtime_ns
        for name in records(tmp_path / "s")
    }
    planned = {
        run["name"] for run in json.loads((tmp_path / "s" / "study.json").read_text())["runs"]
    }
    assert 3 <= len(before) < len(planned)
    half = tmp_path / "s" / "runs" / sorted(planned - set(before))[0]  # what a killed run may leave
    (half / "events").mkdir(parents=True, exist_ok=True)
    (half / "events" / "worker-0.jsonl").write_text('{"kind": "step", "ra')
    done = run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert f"{len(before)} of {len(planned)} runs are in the folder already" in done.stderr
    after = records(tmp_path / "s")
    assert set(after) == planned
    assert all(r["status"] == "completed" for r in after.values())
    assert {
        name: os.stat(tmp_path / "s" / "runs" / name / "run.json").st_mtime_ns for name in before
    } == before
    assert len({r["config"]["memory_format"] for r in after.values()}) == 1
    assert (tmp_path / "s" / "report.html").is_file()


def test_ctrl_c_ends_a_study_with_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text(SMALL)
    # so many seeds that the study cannot be over, however late the signal comes
    command = [str(PACELINE), "study", "study.toml", "--out", "s", "--no-figures", "--seeds", "200"]
    run = Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not records(tmp_path / "s") and time.monotonic() < deadline:
        time.sleep(0.02)
    children = psutil.Process(run.pid).children(recursive=True)
    run.send_signal(signal.SIGINT)
    _, err = run.communicate(timeout=60)
    assert run.returncode == 130, err
    assert "the same command continues there" in err
    assert "Traceback" not in err
    assert not psutil.wait_procs(children, timeout=20)[1]


@pytest.mark.slow
def test_a_run_that_fails_does_not_end_the_study(tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text(
        "all_cores = false\n[base]\ndata = 'fashion-mini'\nmodel = 'mlp:hidden=32'\ndata_share ="
        " 0.2\nworkers = 2\n[axes]\nstrategy = ['allreduce', 'hogwild']\ntransport = ['shm',"
        " 'gloo']\n"
    )
    command = [str(PACELINE), "study", "study.toml", "--out", "s", "--no-figures"]
    done = run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert (
        "hogwild, transport=gloo x 2 failed: strategy hogwild needs memory that all workers share"
        in done.stdout.replace("\n", " ")
    )
    found = records(tmp_path / "s")
    assert sorted(r["status"] for r in found.values()) == ["completed"] * 4 + ["failed"]
    # a refused run's options too
    assert all(r["config"]["data_share"] == 0.2 for r in found.values())
    page = (tmp_path / "s" / "report.html").read_text()
    assert "In 1 of 1 runs" in page
    again = run(
        [*command, "--retry-failed"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "4 of 5 runs are in the folder already" in again.stderr


@pytest.mark.slow
def test_weak_scaling_gives_every_worker_the_work_of_one(tmp_path: Path) -> None:
    weak = SMALL.replace("seeds = 2", "seeds = 1\nscaling = 'weak'\nall_cores = false").replace(
        '"allreduce:collective=ring", ', ""
    )
    (tmp_path / "study.toml").write_text(weak)
    command = [str(PACELINE), "study", "study.toml", "--out", "s", "--no-figures"]
    run(command, cwd=tmp_path, capture_output=True, timeout=120, check=True)
    for record in records(tmp_path / "s").values():
        assert record["result"]["steps"] == 25
        # an epoch's last batch is short
        assert record["result"]["samples"] == pytest.approx(
            3000 * record["config"]["workers"], rel=0.03
        )
    study = read_study(tmp_path / "s")
    line = study.line("local-sgd:every=4", 2)
    speeds = [
        study.line("local-sgd:every=4", p).result("steady_samples_per_s").mean for p in (1, 2)
    ]
    assert own_speedup(study, line).mean == pytest.approx(speeds[1] / speeds[0])


@pytest.mark.slow
def test_network_bytes_of_a_ring_are_what_theory_says(tmp_path: Path) -> None:
    command = [
        str(PACELINE), "train", "--data", "fashion-mini", "--strategy", "allreduce:collective=ring",
        "--workers", "3", "--transport", "gloo", "--epochs", "2", "--out", "r", "--quiet",
    ]  # fmt: skip
    run(command, cwd=tmp_path, timeout=120, check=True)
    record = json.loads((tmp_path / "r" / "run.json").read_text())
    theory = 2 * 2 * 4 * 22_154 * record["result"]["steps"] / 3
    for worker in record["workers"]:
        assert worker["net_sent_bytes"] == pytest.approx(theory, rel=0.03)
        assert worker["net_received_bytes"] == pytest.approx(theory, rel=0.03)
        assert worker["memory_sent_bytes"] == 0
        assert worker["payload_sent_bytes"] == pytest.approx(theory, rel=1e-3)


@pytest.mark.slow
@pytest.mark.slow
@pytest.mark.native_threads
def test_profiles_of_serial_and_of_each_worker_stand_side_by_side(tmp_path: Path) -> None:
    for number, how in enumerate(
        (["--strategy", "serial"], ["--strategy", "allreduce", "--workers", "2"])
    ):
        command = [
            str(PACELINE),
            "train",
            "--data",
            "fashion-mini",
            "--model",
            "mlp:hidden=32",
            "--profile",
        ]
        run(
            [*command, *how, "--steps", "40", "--out", f"all/{number}", "--quiet"],
            cwd=tmp_path,
            timeout=120,
            check=True,
        )
    page = render(tmp_path / "all", figures=False).read_text()
    assert "aten::addmm" in page
    assert re.search(r"\w+\.py:\d+ \w+", page)  # which functions take longest differs
    assert (
        page.count(
            "<th>serial<br>own (calls)</th><th>total</th><th>worker 0<br>own"
            " (calls)</th><th>total</th><th>worker 1<br>"
        )
        == 2
    )


QUICK = ("builtin",)


@pytest.mark.slow  # tests/cli/test_cli.py runs the built-in one in `make test`
@pytest.mark.timeout(400)
@pytest.mark.parametrize("which", ["quick", "others"])
def test_every_study_file_runs_in_its_short_setting(tmp_path: Path, which: str) -> None:
    chosen = [f for f in (BUILTIN, *STUDIES) if (f.stem in QUICK) == (which == "quick")]
    chosen = [f for f in chosen if f.stem != "slow_network" or missing() is None]
    chosen = [f for f in chosen if f.stem != "containers"]  # it needs a cluster of containers
    script = (
        "import sys, torch; torch.set_num_threads(1)\n"
        "from pathlib import Path\n"
        "from paceline.report.render import render\n"
        "from paceline.studies.grid import StudySpec\n"
        "from paceline.studies.runner import run_study\n"
        "for file in sys.argv[1:]:\n"
        "    folder = Path(Path(file).stem)\n"
        "    run_study(StudySpec.read(file, 'short'), folder, clean=True)\n"
        "    render(folder, figures=False)\n"
    )
    files = [str(f) for f in chosen]
    done = run(
        [sys.executable, "-c", script, *files],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for file in chosen:
        found = records(tmp_path / file.stem)
        assert found, file.stem
        assert {r["error"] for r in found.values()} == {None}, file.stem
        assert any(r["config"]["strategy"] == "serial" for r in found.values())
        assert (tmp_path / file.stem / "report.html").stat().st_size > 900_000
    if which == "quick":
        assert recompute(tmp_path / "builtin") >= 5
    if CHROMIUM is not None:  # the page tests say so when there is none
        # lines over the workers; dots by setting, and an axis
        stem = "builtin" if which == "quick" else "optimizers"
        look(tmp_path / stem / "report.html", tmp_path / f"profile-{stem}")
