"""Every file and folder that a run, a study or a report writes has the permissions of the umask."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fuzz import options_here

import paceline
from paceline.common.files import usual_mode, write_whole
from paceline.studies.grid import StudySpec
from paceline.studies.runner import run_study


@pytest.fixture(params=[0o022, 0o007], autouse=True)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def refused(folder: Path, umask: int) -> dict[str, str]:
    """The files and folders with other permissions than the umask gives, with theirs."""
    wrong = {}
    for path in (folder, *folder.rglob("*")):
        expected = (0o777 if path.is_dir() else 0o666) & ~umask
        found = stat.S_IMODE(path.stat().st_mode)
        if found != expected:
            wrong[str(path)] = oct(found)
    return wrong


def test_a_run_with_all_its_files(umask: int) -> None:
    paceline.train(
        **options_here(
            strategy="allreduce",
            workers=2,
            steps=6,
            checkpoint_every=2,
            ema=0.9,
            validation=0.2,
            keep="best,last",
            evaluate_every=2,
            callbacks=("csv",),
            out="run",
        ),
        progress=False,
    )
    private = {"privacy": "noise=1.0,delta=1e-5", "steps": 3, "out": "private"}
    paceline.train(**options_here(**private), progress=False)
    paceline.train(resume="run", steps=8, progress=False)
    names = {path.name for path in Path("run").rglob("*")} | {
        path.name for path in Path("private").rglob("*")
    }
    assert {"model.safetensors", "model-ema.safetensors", "worker-1.pt", "checkpoint.json"} <= names
    assert {"run.json", "trace.json", "config.json", "events", "privacy", "metrics.csv"} <= names
    assert refused(Path("run"), umask) == refused(Path("private"), umask) == {}


@pytest.mark.processes
def test_a_study_and_its_report(umask: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.report.render.library", lambda: "")
    base = {**options_here(steps=3), "data_share": 0.9}
    axes = {"strategy": ["serial", "local-sgd"], "workers": [1]}
    run_study(StudySpec.make({"base": base, "axes": axes, "all_cores": False}), Path("study"))
    paceline.render("study", figures=False)
    assert {"study.json", "report.html", "results.csv", "run.json"} <= {
        path.name for path in Path("study").rglob("*")
    }
    assert refused(Path("study"), umask) == {}


def test_a_library_that_has_its_own_mode(umask: int) -> None:
    def private(path: Path) -> None:
        path.unlink()
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))

    write_whole(Path("whole"), private)
    with usual_mode(Path("other")):
        private(Path("other"))
    write_whole(Path("secret"), "x", mode=0o600)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in Path().iterdir()}
    assert modes == {"whole": 0o666 & ~umask, "other": 0o666 & ~umask, "secret": 0o600}
