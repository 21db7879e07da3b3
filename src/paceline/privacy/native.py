"""Loops in C for clipping and noise, compiled once per machine into the cache folder.

Where there is no compiler, PyTorch does the same work more slowly.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import platform
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import Tensor, float32

from paceline.common.files import write_whole
from paceline.common.places import cache_folder

SOURCES = tuple(Path(__file__).with_name(name) for name in ("gauss.c", "rows.c"))
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
TIMEOUT_S = 60

ADDRESS, COUNT, NUMBER = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


@dataclass(frozen=True)
class Loops:
    """Functions on contiguous float32 tensors, which are given as addresses."""

    # bits, out, n, factor, scale
    add_normal: Callable[[int, int, int, float, float], None]
    # rows, count, width, squares
    row_squares: Callable[[int, int, int, int], None]
    # a, g, rows, in, out, bias, squares
    linear_squares: Callable[[int, int, int, int, int, float, int], None]
    # g, factors, rows, out, weighted, sums
    weigh_rows: Callable[[int, int, int, int, int, int], None]


@functools.cache
def loops() -> Loops | None:
    """Return the loops, compiled if need be; None where they cannot be compiled or loaded."""
    try:
        library = ctypes.CDLL(str(_compiled()))
    except (OSError, subprocess.SubprocessError):
        return None
    library.add_normal.argtypes = [ADDRESS, ADDRESS, COUNT, NUMBER, NUMBER]
    library.row_squares.argtypes = [ADDRESS, COUNT, COUNT, ADDRESS]
    library.linear_squares.argtypes = [ADDRESS, ADDRESS, COUNT, COUNT, COUNT, NUMBER, ADDRESS]
    library.weigh_rows.argtypes = [ADDRESS, ADDRESS, COUNT, COUNT, ADDRESS, ADDRESS]
    found = Loops(
        library.add_normal, library.row_squares, library.linear_squares, library.weigh_rows
    )
    for function in vars(found).values():
        function.restype = None
    return found


def loops_for(one: Tensor, other: Tensor) -> Loops | None:
    """Return the loops if these tensors are contiguous float32 on the CPU, otherwise None."""
    if one.dtype is not float32 or other.dtype is not float32 or not one.is_cpu:
        return None
    return loops() if one.is_contiguous() and other.is_contiguous() else None


def _compiled() -> Path:
    """Return the path of the compiled loops; the name is a hash of source, flags and processor.

    Several workers may compile at once: each renames its own file into place.
    """
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise FileNotFoundError("no C compiler")
    about = f"{[s.read_text() for s in SOURCES]}{FLAGS}{platform.machine()}{_processor()}"
    key = hashlib.sha256(about.encode()).hexdigest()[:16]
    target = cache_folder("native") / f"loops-{key}.so"
    if not target.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        write_whole(target, partial(_compile, compiler))
    return target


def _compile(compiler: str, path: Path) -> None:
    subprocess.run(
        [compiler, *FLAGS, *map(str, SOURCES), "-o", str(path)],
        check=True,
        capture_output=True,
        timeout=TIMEOUT_S,
        stdin=subprocess.DEVNULL,
    )


def _processor() -> str:
    """Return what `-march=native` depends on, since machines may share a cache folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
