"""A sentence about the data, with the figures behind it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Comment:
    """A sentence; `kind` groups comments, and `figures` are shown on request.

    `commands` are what a reader types to follow the sentence's advice.
    """

    kind: str
    text: str
    figures: dict[str, str] = field(default_factory=dict)
    commands: tuple[str, ...] = ()


def told(*commands: str) -> tuple[str, ...]:
    """Return the commands that are known: there is none for what was made in Python."""
    return tuple(command for command in commands if command)
