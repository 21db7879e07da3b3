"""Versions of Paceline in checkouts, each run in an interpreter of its own."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paceline
from paceline.common.files import write_whole
from paceline.errors import BadRequest, RunFailed
from paceline.launch.interpreter import python_of
from paceline.registry import Spec

THIS, OTHER = "this", "other"
START = "from paceline.cli.main import main; main()"
WHERE = "import paceline; print(paceline.__file__)"
LEAST_DEADLINE_S = 600.0

Record = dict[str, Any]


@dataclass(frozen=True)
class Version:
    """A checkout of Paceline; `source` is the folder that holds the package."""

    name: str
    source: Path

    @classmethod
    def this(cls) -> Version:
        return cls(THIS, Path(str(paceline.__file__)).parent.parent)

    @classmethod
    def at(cls, checkout: str | Path) -> Version:
        """Return the version in a folder; refuse a folder that holds none."""
        source = Path(checkout).resolve() / "src"
        if not (source / "paceline" / "__init__.py").is_file():
            raise BadRequest(
                f"--against {checkout}: no checkout of Paceline, it has no src/paceline; make one"
                " with `git worktree add ../before COMMIT`"
            )
        found = cls(OTHER, source)
        done = python_of(source, WHERE, [], LEAST_DEADLINE_S)
        if done.returncode or not Path(done.stdout.strip()).is_relative_to(source):
            why = _last_line(done.stderr) or f"it imports {done.stdout.strip()}"
            raise BadRequest(f"--against {checkout} cannot be imported: {why}")
        return found

    def train(self, options: Mapping[str, Any], out: Path, deadline_s: float) -> Record:
        """Run `paceline train` in a fresh interpreter; `wall_s` of its record is the whole time."""
        shutil.rmtree(out, ignore_errors=True)
        out.parent.mkdir(parents=True, exist_ok=True)
        file = out.with_name(f"{out.name}.toml")
        write_whole(file, toml_of({**options, "out": str(out)}))
        began = time.monotonic()
        try:
            done = python_of(self.source, START, ["train", str(file), "--quiet"], deadline_s)
        except subprocess.TimeoutExpired:
            raise RunFailed(f"{self} did not end within {deadline_s:.0f} s") from None
        if done.returncode:
            kind = BadRequest if done.returncode == BadRequest.exit_code else RunFailed
            raise kind(f"{self}: {_last_line(done.stderr).removeprefix('paceline: ')}")
        record: Record = json.loads((out / "run.json").read_text())
        record["result"]["wall_s"] = time.monotonic() - began
        shutil.rmtree(out)
        return record

    def described(self) -> dict[str, str | None]:
        """Return the folder, and the commit where the folder is a git checkout."""
        command = ["git", "-C", str(self.source), "describe", "--always", "--dirty"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        except OSError:
            return {"source": str(self.source), "commit": None}
        return {"source": str(self.source), "commit": done.stdout.strip() or None}

    def __str__(self) -> str:
        return f"{self.name} checkout ({self.source.parent})"


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1]


def toml_of(options: Mapping[str, Any]) -> str:
    """Return options of `train` as a TOML file; those without a value are left out."""
    lines = []
    for name, value in options.items():
        if isinstance(value, (Spec, Mapping)):
            value = str(Spec.of(value))  # noqa: PLW2901
        if value is None:
            continue
        if isinstance(value, tuple):
            value = list(value)  # noqa: PLW2901
        lines.append(f"{name} = {json.dumps(value, ensure_ascii=False)}\n")
    return "".join(lines)
