"""A sentence about the data, with the figures behind it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Comment:
    """A sentence; `kind` groups comments, and `figures` are shown on request."""

    kind: str
    text: str
    figures: dict[str, str] = field(default_factory=dict)
