"""What a private run guarantees, against whom, and how much noise each worker adds for it.

    trust=peers      each message is protected       each of P workers adds noise of sigma C
    trust=curator    the released model only         each adds sigma C / sqrt(P): sigma C in the sum

The smaller noise of `curator` is enough where only the sum over all workers is used (all-reduce, a
server that waits for all workers). Where a worker's own gradient takes effect without the others'
(local steps, averages with a neighbour, a server that does not wait), each worker adds sigma C with
either `trust`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from paceline.privacy.accounting import Spent, epsilon_of
from paceline.privacy.settings import Settings


@dataclass(frozen=True)
class Guarantee:
    """What is promised, and the noise that keeps the promise."""

    noise: float  # of each worker, in units of the clip norm
    joins: bool  # whether each worker adds a part, and only the sum over all has the whole noise
    sentences: tuple[str, str]

    @classmethod
    def of(cls, settings: Settings, workers: int, adds_up: bool, strategy: str) -> Guarantee:
        assert settings.noise is not None
        joins = settings.trust == "curator" and adds_up and workers > 1
        noise = settings.noise / math.sqrt(workers) if joins else settings.noise
        return cls(noise, joins, _sentences(settings, workers, joins, strategy))

    def weakened(self, settings: Settings, workers: int, strategy: str) -> Guarantee:
        """Return a guarantee with the same noise and the promise of these settings."""
        return replace(self, sentences=_sentences(settings, workers, self.joins, strategy))


def _sentences(settings: Settings, workers: int, joins: bool, strategy: str) -> tuple[str, str]:
    if workers == 1:
        return (
            (
                "There is one worker, and everything that leaves it is protected: the released"
                " model and all weights before it."
            ),
            (
                "An attacker that reads its memory, or knows which samples were drawn, sees the"
                " data as it is."
            ),
        )
    if settings.trust == "peers":
        return (
            (
                "Every message is protected: an observer of what a worker sends (the ring's partial"
                " sums, a server, a neighbour, the network) learns no more about one person than"
                " epsilon says."
            ),
            f"For that each of the {workers} workers adds the whole noise to what it sends.",
        )
    how = (
        f"Noise is added once in all, a part of it by each of the {workers} workers."
        if joins
        else (
            f"Each worker adds the whole noise all the same: with {strategy} a worker's gradient"
            " takes effect by itself."
        )
    )
    return (
        (
            "Only the released model is protected: workers, servers and the network between them"
            " are trusted with what they see."
        ),
        how,
    )


@dataclass(frozen=True)
class Curve:
    """An estimate of epsilon after each step, for the progress bar.

    It is exact at the last step and slightly too large before.
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
