"""Python's warnings, each printed once by a run, however many workers and steps raise it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def warnings_once(tell: Callable[[dict[str, Any]], None] | None = None) -> Iterator[None]:
    """Print each warning once, or pass it to `tell` instead (`show_warning` prints it elsewhere).

    Python itself prints a warning once per process and place, but forgets all of them whenever a
    `warnings.catch_warnings` ends, as one inside a model's forward does in every step.
    """
    before: Callable[..., None] = warnings.showwarning
    seen: set[tuple[str, str, str, int]] = set()

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: Any = None,
        line: str | None = None,
    ) -> None:
        key = (str(message), category.__name__, filename, lineno)
        if key in seen:
            return
        seen.add(key)
        if tell is None:
            before(message, category, filename, lineno, file, line)
        else:
            tell(dict(zip(("text", "category", "file", "line"), key, strict=True)))

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = before


def show_warning(told: dict[str, Any]) -> None:
    """Print a warning that another process has raised and passed to `tell`."""
    category = type(told["category"], (UserWarning,), {})  # its own class may not be importable
    warnings.showwarning(told["text"], category, told["file"], told["line"])
