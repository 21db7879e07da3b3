"""A fresh interpreter: with the Paceline of another folder, or with other variables."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path


def python_of(
    source: Path, code: str, arguments: Sequence[str], deadline_s: float
) -> subprocess.CompletedProcess[str]:
    """Run code with `source` before all other folders from which Python imports."""
    paths = [str(source), *filter(None, [os.environ.get("PYTHONPATH")])]
    return python_with({"PYTHONPATH": os.pathsep.join(paths)}, code, arguments, deadline_s)


def python_with(
    variables: Mapping[str, str], code: str, arguments: Sequence[str], deadline_s: float
) -> subprocess.CompletedProcess[str]:
    """Run code with these variables in its environment, beside those of this process."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=deadline_s,
        check=False,
    )
