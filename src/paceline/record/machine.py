"""The machine that a figure was measured on."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch

from paceline.common.cores import cores


def cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as info:
            return next(
                (line.split(":", 1)[1].strip() for line in info if line.startswith("model name")),
                platform.machine(),
            )
    except OSError:
        return platform.processor() or platform.machine()


def environment() -> dict[str, Any]:
    return {
        "paceline": version("paceline"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": f"{platform.system()} {platform.release()}",
        "cpu": cpu_name(),
        "cores": cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "command": shlex.join([os.path.basename(sys.argv[0]), *sys.argv[1:]]) if sys.argv else "",
    }


def boot_id() -> str | None:
    """Return an id that all processes of one running kernel share, in any container.

    Clocks of processes with the same id agree.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
