"""One thing that the data says, with the figures behind it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Comment:
    kind: str
    text: str
    figures: dict[str, str] = field(default_factory=dict)
