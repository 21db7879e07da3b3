"""`gauss.c`, compiled once per machine into the cache folder; where there is no compiler, everything works without it."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from paceline.data.places import cache_dir

SOURCE = Path(__file__).parent / "gauss.c"
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
TIMEOUT_S = 60

AddNormal = Callable[[int, int, int, float, float], None]


@functools.cache
def add_normal() -> AddNormal | None:
    """The compiled loop: (address of bits, address of out, n, factor, scale). None where it cannot be had."""
    try:
        library = ctypes.CDLL(str(_compiled()))
    except (OSError, subprocess.SubprocessError):
        return None
    function = library.add_normal
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_float]
    function.restype = None
    return function


def _compiled() -> Path:
    """Keyed by source, compiler flags and processor; written aside and renamed, for several workers may come at once."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise FileNotFoundError("no C compiler")
    about = f"{SOURCE.read_text()}{FLAGS}{platform.machine()}{_processor()}"
    target = cache_dir().parent / "native" / f"gauss-{hashlib.sha256(about.encode()).hexdigest()[:16]}.so"
    if not target.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        aside = target.with_name(f".{target.name}.{os.getpid()}")
        command = [compiler, *FLAGS, str(SOURCE), "-o", str(aside)]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=TIMEOUT_S, stdin=subprocess.DEVNULL)
            os.replace(aside, target)
        finally:
            aside.unlink(missing_ok=True)
    return target


def _processor() -> str:
    """What `-march=native` depends on: a cache folder may be shared by machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
