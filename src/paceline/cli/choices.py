"""The names that `--help` shows for an option, found without importing what they name.

A registry fills itself by importing its package, and torch with it, which takes seconds. `names_of`
reads the decorators in the source files instead.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from paceline.registry import ALL

NAME_WITH_OPTIONS = "NAME[:key=value,...]"
DECORATORS = {"data": r"sources\.register", "collectives": r"(?:collectives\.register|algorithm)"}


@cache
def names_of(plural: str) -> list[str]:
    """List the names that Paceline itself registers, sorted, as `ALL[plural].names()` does."""
    decorator = DECORATORS.get(plural, rf"{plural}\.register")
    pattern = re.compile(rf'^@{decorator}\(\s*"([^"]+)"', re.MULTILINE)
    folder = Path(__file__).parent.parent.joinpath(*ALL[plural].package.split(".")[1:])
    return sorted(
        name for file in folder.rglob("*.py") for name in pattern.findall(file.read_text())
    )


def one_of(names: list[str]) -> str:
    """Write choices as click does: `[auto|on|off]`."""
    return f"[{'|'.join(names)}]"
