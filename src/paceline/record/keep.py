"""Which checkpoints of a run are kept: `best,last,3`."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import BadRequest

USUAL = 2  # of the last checkpoints: if one is damaged, the one before it is used


@dataclass(frozen=True)
class Keep:
    """The last so many checkpoints (None: all of them), and that of the best evaluation."""

    last: int | None = USUAL
    best: bool = False

    @classmethod
    def read(cls, text: str | None) -> Keep:
        """Read `best`, `last`, `all`, a number, or several of them: `best,3`."""
        if text is None:
            return cls()
        words = [word.strip() for word in str(text).split(",")]
        counts = [1 if word == "last" else int(word) for word in words if _is_count(word)]
        if not all(word in ("best", "all") or _is_count(word) for word in words):
            raise BadRequest(
                f"keep={text}: write best, last, all, a number of the last checkpoints, or several"
                " of them (best,3)"
            )
        last = None if "all" in words else max(counts, default=0)
        return cls(last, "best" in words)


def _is_count(word: str) -> bool:
    return word == "last" or (word.isascii() and word.isdecimal() and int(word) > 0)
