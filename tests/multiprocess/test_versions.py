"""`paceline study --against CHECKOUT` with real checkouts: an equal one, and a slower one."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.studies.versions import START

SOURCE = Path(__file__).parent.parent.parent / "src"
STUDY = """
block = "2s"
budget = "1s"
[base]
data = "fashion-mini"
model = "mlp:hidden=16"
sample_every_s = 0
memory_format = "contiguous"
[axes]
strategy = ["serial"]
workers = [1]
"""
COMPUTES = "        gradients = self.private or self.replica\n"


def study(source: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `paceline study` of the version in a folder."""
    return subprocess.run(
        [sys.executable, "-c", START, "study", "s.toml", "--out", "o", *arguments],
        env={**os.environ, "PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A copy of this checkout's source, beside a small study."""
    Path("s.toml").write_text(STUDY)
    hidden = shutil.ignore_patterns("__pycache__")
    shutil.copytree(SOURCE, tmp_path / "copy" / "src", ignore=hidden)
    return tmp_path / "copy"


@pytest.mark.slow
def test_a_copy_is_not_slower(copied: Path) -> None:
    """The limit is far away: two blocks on a busy machine exclude nothing near."""
    done = study(SOURCE, "--against", str(copied), "--fail-if", "slower=900%")
    assert done.returncode == 0, done.stderr
    assert "`serial x 1` is" in done.stdout
    kept = json.loads(Path("o/against.json").read_text())
    assert kept["other"]["source"] == str(copied / "src")
    assert not kept["settings"][0]["fails"]
    assert not Path("o/against").exists()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_sleep_in_every_step_is_found(copied: Path) -> None:
    worker = copied / "src" / "paceline" / "run" / "worker.py"
    text = worker.read_text()
    assert COMPUTES in text
    worker.write_text(
        text.replace(COMPUTES, f"{COMPUTES}        __import__('time').sleep(0.002)\n")
    )
    # This version is the slow one. On a busy machine blocks are measured again, within the budget.
    against = ("--against", str(SOURCE.parent), "--fail-if", "slower=5%", "--budget", "4min")
    done = study(copied / "src", *against)
    assert done.returncode == 1, (done.stdout, done.stderr)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("paceline: slower than the other checkout by more than 5%: serial x 1 (")
    assert json.loads(Path("o/against.json").read_text())["settings"][0]["fails"]


def test_a_checkout_that_cannot_be_imported_is_one_sentence(tmp_path: Path) -> None:
    Path("s.toml").write_text(STUDY)
    broken = tmp_path / "broken" / "src" / "paceline"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("import nothing_like_that\n")
    done = study(SOURCE, "--against", str(tmp_path / "broken"))
    assert done.returncode == 2, done.stderr
    assert "cannot be imported: ModuleNotFoundError" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
