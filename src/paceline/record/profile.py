"""Profile a worker: the time in PyTorch's operators and in Python's functions.

Profiling slows down what it measures, so each kind has its own steps: a few steps after the first
ones for operators, all later ones for functions. Do not compare the total times of a profiled run.
"""

from __future__ import annotations

import cProfile
import ctypes
import pstats
import sys
from pathlib import PurePath
from typing import Any

import torch

WARM_UP, OPERATOR_STEPS = 5, 20
ROWS = 60


class Profile:
    """Call `next_step` before every step and `tables` after the last."""

    def __init__(self) -> None:
        self._steps = 0
        self._operators: torch.profiler.profile | None = None
        self._functions: cProfile.Profile | None = None
        self._function_steps = 0
        self._tables: dict[str, Any] = {"operators": [], "operator_steps": 0}

    def next_step(self) -> None:
        self._steps += 1
        if self._steps == WARM_UP + 1:
            _quieten()
            self._operators = torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU]
            )
            self._operators.__enter__()
        elif self._steps == WARM_UP + OPERATOR_STEPS + 1:
            self._end_operators(OPERATOR_STEPS)
            self._functions = cProfile.Profile()
        if self._functions is not None:
            self._functions.enable()
            self._function_steps += 1

    def pause(self) -> None:
        """Stop profiling until the next step; the operators' part ends here."""
        self._end_operators(self._steps - WARM_UP)
        if self._functions is not None:
            self._functions.disable()

    def tables(self) -> dict[str, Any]:
        """Return rows of name, calls, own_s and total_s, the longest first, and the steps."""
        self._end_operators(self._steps - WARM_UP)
        functions: list[dict[str, Any]] = []
        if self._functions is not None:
            self._functions.disable()
            stats: dict[tuple[str, int, str], tuple[Any, ...]] = pstats.Stats(self._functions).stats  # type: ignore[attr-defined]
            for (file, line, name), (_, calls, own_s, total_s, _) in stats.items():
                functions.append(_row(_function(file, line, name), calls, own_s, total_s))
        return {
            **self._tables,
            "functions": _longest(functions),
            "function_steps": self._function_steps,
        }

    def _end_operators(self, steps: int) -> None:
        if self._operators is None:
            return
        self._operators.__exit__(None, None, None)
        rows = [
            _row(e.key, e.count, e.self_cpu_time_total / 1e6, e.cpu_time_total / 1e6)
            for e in self._operators.key_averages()
        ]
        self._tables = {"operators": _longest(rows), "operator_steps": steps}
        self._operators = None


def _row(name: str, calls: int, own_s: float, total_s: float) -> dict[str, Any]:
    return {"name": name, "calls": calls, "own_s": own_s, "total_s": total_s}


def _longest(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda r: -r["own_s"])[:ROWS]


def _function(file: str, line: int, name: str) -> str:
    """Return `replica.py:120 forward_backward`; built-in functions have no file."""
    return name.strip("<>") if file == "~" else f"{PurePath(file).name}:{line} {name}"


def _quieten() -> None:
    """Keep PyTorch's profiler from printing when it starts and stops, unless the user wants it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).setenv(b"KINETO_LOG_LEVEL", b"99", 0)
