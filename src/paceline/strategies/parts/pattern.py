"""What a strategy's workers exchange in a step, as data: for the planner.

A strategy declares it by `Strategy.pattern(step, setting)`. A test compares the declaration with
the messages that the strategy's own code sends (tests/contract/test_patterns.py).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Setting:
    """What a pattern may depend on."""

    workers: int
    steps_per_epoch: int
    seed: int = 0  # of the run: gossip draws its pairs from it


@dataclass(frozen=True)
class Reduction:
    """All workers run a schedule on one buffer with as many numbers as the trained weights.

    `schedule` names an all-reduce or an operation with its options ("ring", "stepwise:start=2").
    "auto" and "native" stand for the fastest that the transport has; the planner takes the
    cheapest schedule that `collective=auto` would try.
    """

    schedule: str
    coded: bool = True  # whether the run's codec encodes its messages


@dataclass(frozen=True)
class Swap:
    """Pairs of workers send each other their weights and average them."""

    partners: tuple[int | None, ...]  # by worker


@dataclass(frozen=True)
class PushPull:
    """Every worker pushes a part of its gradients to each server and pulls that server's weights.

    A server replies to a worker that is at most `ahead` steps ahead of the slowest one.
    """

    ahead: int


Exchange = Reduction | Swap | PushPull
