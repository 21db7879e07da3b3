"""How many steps an accuracy takes: against the batch of all workers, or as strategies needed it.

Where all workers make every step together, P workers with b samples are one worker with B = P b:

    S(B) = S_min (1 + B_crit / B)          (McCandlish et al. 2018)

S_min and B_crit are fitted to training with two batch sizes that are at least 8 times apart, from
one trained model on (branched training), with several seeds. That model was trained with the
smaller batch. A whole training with a larger one shortens that stage, too: in the same proportion
as what comes after it.

No formula can be trusted for asynchronous and local strategies: there the steps were counted on the
transport `simulated`, with real gradients, for some numbers of workers.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from paceline.registry import Spec
from paceline.strategies.base import Strategy

APART = 8  # the two batch sizes, at least
DISAGREE = 2.0  # the noise scale and the fitted critical batch, by this factor
SAME_STEPS = ("none", "fp16")  # codecs that hardly change how many steps are needed


@dataclass(frozen=True)
class Branch:
    """Steps to the accuracy with one batch size, one number per seed."""

    batch_size: int  # of all workers together
    steps: tuple[int, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.steps)


@dataclass(frozen=True)
class Followed:
    """Steps to the accuracy of one strategy and codec, one number per seed."""

    strategy: str
    workers: int
    batch_size: int  # of each worker
    steps: tuple[int, ...]
    codec: str = "none"


@dataclass(frozen=True)
class StepsTo:
    """An estimate of the steps, with a 95% interval; they are those of every worker."""

    steps: float
    low: float
    high: float


@dataclass(frozen=True)
class Accuracy:
    """What was measured about the steps to one accuracy."""

    target: float
    # Steps that the branches have in common, with the smallest batch; included in theirs.
    branched_at: int
    lr_scaling: str  # of the learning rate against the batch
    branches: tuple[Branch, ...]
    noise_scale: float | None = None  # a second opinion on the critical batch
    followed: tuple[Followed, ...] = ()

    @property
    def s_min(self) -> float:
        """The steps that the largest batch would take."""
        return self._line[0]

    @property
    def b_crit(self) -> float:
        """The batch at which twice the least number of steps is needed."""
        least, slope = self._line
        return slope / least if least > 0 else math.inf

    @property
    def _line(self) -> tuple[float, float]:
        """S = S_min + slope / B of whole trainings, through the smallest and the largest batch."""
        small, large = self.branches[0], self.branches[-1]
        small_steps, large_steps = self._from_start(small.mean), self._from_start(large.mean)
        slope = (small_steps - large_steps) / (1 / small.batch_size - 1 / large.batch_size)
        slope = max(0.0, slope)
        return max(0.0, large_steps - slope / large.batch_size), slope

    def _from_start(self, steps: float) -> float:
        """The steps of a training that had its own batch, or strategy, from its first step on."""
        own = self.branches[0].mean
        return (steps - self.branched_at) * own / max(1.0, own - self.branched_at)

    @property
    def spread(self) -> float:
        """The deviation between seeds, of the logarithm of the steps."""
        logs = [
            math.log(steps / branch.mean)
            for branch in self.branches
            if len(branch.steps) > 1
            for steps in branch.steps
        ]
        freedom = len(logs) - sum(len(branch.steps) > 1 for branch in self.branches)
        return math.sqrt(math.fsum(x * x for x in logs) / freedom) if freedom > 0 else 0.1

    def with_batch(self, batch_size: float) -> StepsTo:
        """Steps with so many samples in a step of all workers together."""
        least, slope = self._line
        return self._within(least + slope / batch_size, min(len(b.steps) for b in self.branches))

    def of(self, strategy: Strategy, spec: str, codec: str, workers: int, batch_size: int
           ) -> StepsTo | None:  # fmt: skip
        """Steps of a strategy; None where they are not known."""
        known = self._of_followed(spec, codec, workers, batch_size)
        same = Spec.of(codec).name in SAME_STEPS
        together = strategy.traits.in_step and strategy.traits.exchanges == "gradients"
        if known is None and same and (workers == 1 or together):
            return self.with_batch(workers * batch_size)
        return known

    def _of_followed(self, spec: str, codec: str, workers: int, batch_size: int) -> StepsTo | None:
        points = {
            each.workers: self._from_start(statistics.fmean(each.steps))
            for each in self.followed
            if Spec.of(each.strategy) == Spec.of(spec)
            and Spec.of(each.codec) == Spec.of(codec)
            and each.batch_size == batch_size
        }
        if not points or workers > max(points):
            return None
        points.setdefault(1, self.with_batch(batch_size).steps)
        return self._within(between(sorted(points.items()), workers), 1)

    def _within(self, steps: float, seeds: int) -> StepsTo:
        off = 1.96 * self.spread / math.sqrt(max(1, seeds))
        return StepsTo(steps, steps * math.exp(-off), steps * math.exp(off))

    @property
    def doubt(self) -> str | None:
        """A sentence where the two opinions on the critical batch differ, or one is missing."""
        if self.s_min <= 0:
            return (
                "The steps fall in proportion to the batch as far as was measured: the critical"
                f" batch is beyond {self.branches[-1].batch_size}, and the steps of larger batches"
                " are guesses."
            )
        if self.noise_scale is None:
            return None
        ratio = self.noise_scale / self.b_crit if self.b_crit else math.inf
        if 1 / DISAGREE <= ratio <= DISAGREE:
            return None
        return (
            f"The critical batch is {self.b_crit:,.0f} by branched training and"
            f" {self.noise_scale:,.0f} by the gradients' noise: they disagree; the plan uses the"
            " first."
        )


def between(points: Sequence[tuple[int, float]], workers: int) -> float:
    """Steps between two measured numbers of workers, on a line over their logarithm."""
    for (low, low_steps), (high, high_steps) in pairwise(points):
        if low <= workers <= high:
            share = math.log(workers / low) / math.log(high / low) if high > low else 0.0
            return low_steps + share * (high_steps - low_steps)
    return points[-1][1]
