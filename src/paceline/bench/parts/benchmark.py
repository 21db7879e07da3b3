"""What a benchmark is, and how benchmarks are found.

A benchmark is a module of `paceline.bench`. Its docstring is the text of `paceline bench NAME
--help`. It defines:

    OPTIONS = {"rounds": Option(5, "interleaved rounds", least=1)}    # --rounds

    def measure(say: Say, rounds: int) -> dict[str, Any]: ...         # what --json prints
    def show(result: dict[str, Any]) -> Iterator[Table | str]: ...    # tables and notes

`--help` imports these modules, so they import torch only inside `measure`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from paceline.bench.parts.table import Table
from paceline.errors import BadRequest

Say = Callable[[str], None]  # is told what is being measured


@dataclass(frozen=True)
class Option:
    """One option of a benchmark; the type of its default is the type of its value."""

    default: Any
    help: str
    least: Any = None  # of the default's type
    most: Any = None
    metavar: str | None = None
    names: str = ""  # the registry whose names are allowed: models, strategies, ...
    repeated: bool = False


class Benchmark(Protocol):
    """The module of a benchmark."""

    __doc__: str
    OPTIONS: Mapping[str, Option]
    measure: Callable[..., dict[str, Any]]

    def show(self, result: dict[str, Any]) -> Iterator[Table | str]:
        """Yield the tables and notes that a person reads."""


ROUNDS = Option(5, "interleaved rounds", least=1)
BATCH_SIZE = Option(64, "samples per worker and step", least=1)
DATA_DIR = Option(None, "folder in which MNIST is looked for first", metavar="DIR")


def names() -> list[str]:
    """List the benchmarks: the modules of `paceline.bench` that are not folders."""
    folder = Path(__file__).parent.parent
    return [m.name for m in pkgutil.iter_modules([str(folder)]) if not m.ispkg]


def load(name: str) -> Benchmark:
    return cast(Benchmark, importlib.import_module(f"paceline.bench.{name}"))


def integers(option: str, text: str, least: int) -> list[int]:
    """Read a list like `2,3,4`."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) >= least for part in parts):
        raise BadRequest(
            f"{option} {text}: give integers of {least} or more, separated by commas, as in"
            f" {option} {least},{2 * least}"
        )
    return [int(part) for part in parts]
