"""What all engine tests share: skipping an engine that is absent, waiting, comparing weights."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
from safetensors.torch import load_file

from tests.small import identical

T = TypeVar("T")
VERSIONS: dict[str, str] = {}  # by engine: the version that this session has used


def needs(engine: str, commands: tuple[str, ...], install: str, root: bool = False) -> None:
    """Skip the test where one of an engine's commands is absent; the reason says what to type."""
    places = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"  # daemons are there
    missing = [name for name in commands if shutil.which(name, path=places) is None]
    if missing:
        pytest.skip(f"{engine} is not here ({', '.join(missing)}): {install}")
    if root and os.geteuid() != 0:
        pytest.skip(f"{engine} is started with namespaces of its own, which needs root: use sudo")


def used(engine: str, version: str) -> None:
    """Note the version of an engine for the table at the end."""
    VERSIONS[engine] = version.strip()


def engine_of(test: str) -> str:
    """Return the engine of a test from its id: `slurm` of `tests/engines/test_slurm.py::...`."""
    return Path(test.partition("::")[0]).stem.removeprefix("test_")


def words(test: str) -> str:
    """Return the name of a test as words."""
    return re.sub(r"^test_", "", test.rpartition("::")[2]).replace("_", " ")


def until(what: str, look: Callable[[], T], deadline_s: float, every_s: float = 0.2) -> T:
    """Call `look` until it returns something true, and return that; fail after the deadline."""
    end = time.monotonic() + deadline_s
    while True:
        if found := look():
            return found
        assert time.monotonic() < end, f"{what}: not within {deadline_s:g} s"
        time.sleep(every_s)


def same_weights(one: Path, other: Path) -> bool:
    """Whether two runs have ended with the same weights, bit for bit."""
    return identical(load_file(one / "model.safetensors"), load_file(other / "model.safetensors"))
