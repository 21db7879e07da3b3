"""The workers' speeds as `balance` gives them, and a global batch cut in proportion to speeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.common.intervals import interval
from paceline.common.values import convert, parse_pairs
from paceline.data.shards import split
from paceline.errors import BadRequest

HOW = "write measured, measured:every=50, speeds (2,1,1), or seconds per batch (runtime:1.2,3.6)"


@dataclass(frozen=True)
class Speeds:
    """The option `balance`: given speeds, or an interval at which they are measured."""

    speeds: tuple[float, ...] = ()
    every: str | None = None

    @classmethod
    def read(cls, text: str, workers: int) -> Speeds:
        name, _, rest = text.partition(":")
        if name == "measured":
            options = parse_pairs(rest, f"balance={text}") if rest else {}
            if unknown := set(options) - {"every"}:
                raise BadRequest(
                    f"balance={text}: measured knows every, not {', '.join(sorted(unknown))}"
                )
            return cls(every=interval("balance: every", options.get("every", "20")))
        numbers = _numbers(rest if name == "runtime" else text, text)
        if len(numbers) != workers:
            what = "times" if name == "runtime" else "speeds"
            raise BadRequest(f"balance={text} has {len(numbers)} {what} for {workers} workers")
        return cls(tuple(1 / n for n in numbers) if name == "runtime" else numbers)

    def sizes(self, whole: int) -> tuple[int, ...]:
        """Return the global batch cut in proportion to the given speeds."""
        return cut(whole, self.speeds)


def _numbers(text: str, given: str) -> tuple[float, ...]:
    try:
        numbers = tuple(float(convert(part, float, "balance")) for part in text.split(","))
    except BadRequest:
        raise BadRequest(f"balance={given}: {HOW}") from None
    if not all(0 < n < float("inf") for n in numbers):
        raise BadRequest(f"balance={given}: speeds and times are more than 0")
    return numbers


def cut(whole: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """Return batch sizes in proportion to the speeds, each at least 1: without a sample there is no
    speed.
    """
    if whole < len(speeds):
        raise BadRequest(f"a global batch of {whole} cannot be cut for {len(speeds)} workers")
    sizes = list(split(whole, speeds))
    for poorest in (i for i, size in enumerate(sizes) if size == 0):
        sizes[max(range(len(sizes)), key=sizes.__getitem__)] -= 1
        sizes[poorest] = 1
    return tuple(sizes)
