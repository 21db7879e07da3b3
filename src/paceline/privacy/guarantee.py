"""What a private run promises, to whom, and how much noise each worker adds for it.

    trust=peers      every message is protected by itself:  each of P workers adds noise of sigma C
    trust=curator    the released model only:               sigma C / sqrt(P) each, sigma C in the sum

The second works where nothing but the sum over all workers is ever used (all-reduce, a server that
waits for all). Where a worker's own gradient takes effect by itself (local steps, averages with a
neighbour, a server that does not wait), there is nothing for the others' noise to add up with, and
each worker adds all of it, whoever is trusted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from paceline.privacy.accounting import Spent, epsilon_of
from paceline.privacy.settings import Settings


@dataclass(frozen=True)
class Guarantee:
    """`noise`: of each worker, in units of the clip norm. `joins`: it becomes whole only in the sum
    over the workers.
    """

    noise: float
    joins: bool
    sentences: tuple[str, str]

    @classmethod
    def of(cls, settings: Settings, workers: int, adds_up: bool, strategy: str) -> Guarantee:
        assert settings.noise is not None
        joins = settings.trust == "curator" and adds_up and workers > 1
        noise = settings.noise / math.sqrt(workers) if joins else settings.noise
        return cls(noise, joins, _sentences(settings, workers, joins, strategy))

    def weakened(self, settings: Settings, workers: int, strategy: str) -> Guarantee:
        """The same noise, and the promise of these settings."""
        return replace(self, sentences=_sentences(settings, workers, self.joins, strategy))


def _sentences(settings: Settings, workers: int, joins: bool, strategy: str) -> tuple[str, str]:
    if workers == 1:
        return (
            (
                "There is one worker, and what is protected is everything that leaves it: the"
                " released model and all before it."
            ),
            (
                "Who can look into its memory, or knows which samples were drawn, sees the data as"
                " it is."
            ),
        )
    if settings.trust == "peers":
        return (
            (
                "Every message is protected: whoever sees what a worker sends (the ring's partial"
                " sums, a server, a neighbour, the network) learns no more about one person than"
                " epsilon says."
            ),
            f"For that each of the {workers} workers adds the whole noise to what it sends.",
        )
    how = (
        f"Noise is added once in all, a part of it by each of the {workers} workers."
        if joins
        else (
            f"Each worker adds the whole noise all the same: with {strategy} what it does takes"
            " effect by itself."
        )
    )
    return (
        (
            "The released model is protected and nothing else: workers, servers and the network"
            " between them are trusted with what they see."
        ),
        how,
    )


@dataclass(frozen=True)
class Curve:
    """About how much has been spent after so many steps, for a progress bar: exact at the end, a
    little too much before it.
    """

    points: tuple[tuple[float, float], ...]  # (square root of the steps, epsilon)

    @classmethod
    def of(
        cls,
        settings: Settings,
        rate: float,
        steps: int,
        per: int,
        before: tuple[Spent, ...],
        offset: int = 0,
    ) -> Curve:
        assert settings.noise is not None
        count = 4
        marks = sorted({max(1, round(steps * (i / count) ** 2)) for i in range(1, count + 1)})

        def spent(made: int, accountant: str) -> float:
            line = Spent(settings.noise or 0.0, rate, -(-(offset + made) // per))
            return epsilon_of((*before, line), settings.delta, accountant)  # type: ignore[arg-type]

        scale = spent(steps, settings.accountant) / max(1e-12, spent(steps, "rdp"))
        start = epsilon_of(before, settings.delta, settings.accountant)
        return cls(
            ((0.0, start), *((math.sqrt(m), max(start, scale * spent(m, "rdp"))) for m in marks))
        )

    def at(self, steps: int) -> float:
        x = math.sqrt(steps)
        for (low, below), (high, above) in zip(self.points, self.points[1:], strict=False):
            if x <= high:
                return below + (above - below) * (x - low) / (high - low)
        return self.points[-1][1]
