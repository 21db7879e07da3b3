"""Rules that every engine of `prepare` follows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from paceline.data.prepare.recipe import Join
from paceline.errors import BadRequest

NUMBER = r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$"  # text that is a number


def refuse_many(join: Join, extra: int, example: Callable[[], Iterable[Any]]) -> None:
    """Refuse a join that finds more than one row for a key: it would multiply rows silently."""
    if extra:
        raise BadRequest(
            f"join with {join.source.path} on {', '.join(join.on)}: {extra} of its rows have the"
            f" same key ({', '.join(str(v) for v in example())}, ...): join on columns that"
            " identify a row"
        )
