"""What a strategy's workers exchange in a step, as data: for the planner.

A strategy declares it by `Strategy.pattern(step, setting)`. A test compares the declaration with
the messages that the strategy's own code sends (tests/contract/test_patterns.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.common.intervals import due


@dataclass(frozen=True)
class Setting:
    """What a pattern may depend on."""

    workers: int
    steps_per_epoch: int
    seed: int = 0  # of the run: gossip draws its pairs from it
    compressed: bool = False  # whether the run has a lossy codec

    def ends_epoch(self, step: int) -> bool:
        return (step + 1) % self.steps_per_epoch == 0

    def due(self, interval: str, step: int) -> bool:
        """Whether what happens at `interval` ("8", "epoch", "2epochs") is due after this step."""
        return due(interval, step + 1, step // self.steps_per_epoch + 1, self.ends_epoch(step))


@dataclass(frozen=True)
class Reduction:
    """All workers run a schedule on one buffer with as many numbers as the trained weights.

    `schedule` names an all-reduce or an operation with its options ("ring", "stepwise:start=2").
    "auto" and "native" stand for the fastest that the transport has; the planner takes the
    cheapest schedule that `collective=auto` would try. On `simulated` both are a ring.
    """

    schedule: str
    coded: bool = True  # whether the run's codec encodes its messages


@dataclass(frozen=True)
class Swap:
    """Pairs of workers send each other their weights, through the run's codec, and average them."""

    partners: tuple[int | None, ...]  # by worker; None: it has no partner in this step


@dataclass(frozen=True)
class PushPull:
    """Every worker pushes a part of its gradients to each server and pulls that server's weights.

    The run's codec encodes both. A server replies to a worker that is at most `ahead` steps ahead
    of the slowest one.
    """

    ahead: int


Exchange = Reduction | Swap | PushPull
