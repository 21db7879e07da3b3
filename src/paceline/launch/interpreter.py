"""A fresh interpreter with the Paceline of another folder."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def python_of(
    source: Path, code: str, arguments: Sequence[str], deadline_s: float
) -> subprocess.CompletedProcess[str]:
    """Run code with `source` before all other folders from which Python imports."""
    paths = [str(source), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=deadline_s,
        check=False,
    )
