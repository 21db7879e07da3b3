"""What every engine of `prepare` must do alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from paceline.data.prepare.recipe import Join
from paceline.errors import BadRequest

NUMBER = r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$"  # text that counts as a number


def refuse_many(join: Join, extra: int, example: Callable[[], Iterable[Any]]) -> None:
    """A join finds at most one row; otherwise rows would multiply, silently."""
    if extra:
        raise BadRequest(
            f"join with {join.source.path} on {', '.join(join.on)}: {extra} of its rows have the"
            f" same ({', '.join(str(v) for v in example())}, ...): join on columns that tell its"
            " rows apart"
        )
