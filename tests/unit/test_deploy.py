"""Files beside the package: the Makefile's installation and the containers' commands."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.processes
@pytest.mark.parametrize("code", [0, 3])
def test_an_installation_that_failed_is_not_stamped(tmp_path: Path, code: int) -> None:
    """pip's exit code was lost in a pipe (outer.md 1.11)."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(
        '#!/bin/sh\nif [ "$2" = pip ]; then echo "WARNING: Location x"; echo "pip says why";'
        f" exit {code}; fi\n"
    )
    python.chmod(0o755)
    found = subprocess.run(
        ["make", "setup", f"PYTHON={sys.executable}"],
        cwd=tmp_path,
        env={**os.environ, "MAKEFLAGS": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (found.returncode == 0) is (code == 0)
    assert (tmp_path / ".venv" / ".installed").exists() is (code == 0)
    assert "pip says why" in found.stdout
    assert "Location" not in found.stdout


@pytest.mark.parametrize("file", ["docs/clusters.md", "docs/data.md"])
def test_flights_are_fetched_before_they_are_prepared(file: str) -> None:
    text = (ROOT / file).read_text()
    assert 0 <= text.find("paceline data fetch flights") < text.find("paceline prepare flights")
