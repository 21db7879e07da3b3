"""The interface of collectives, which strategies and codecs call.

`algorithm` registers a collective that is written as a schedule.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor

from paceline.collectives.execute import Executor
from paceline.collectives.schedule import Schedule
from paceline.collectives.wire import Wire
from paceline.errors import UnknownName
from paceline.registry import Spec, collectives, operations
from paceline.transport.base import Op, Transport

SCHEDULES: dict[str, Callable[..., Schedule]] = {}  # all-reduces that are schedules, by name
TRIED: dict[str, float] = {}  # those that `auto` tries, with the largest buffer (bytes) for each


class Collective(ABC):
    """Combines buffers over the ranks of a transport."""

    name: ClassVar[str]

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self._wired: list[tuple[Wire, Executor]] = []

    @property
    def schedule(self) -> Schedule:
        """The schedule that encoded messages follow: a ring, unless the collective has its own."""
        return schedule_of("ring", self.transport.size)

    def over(self, wire: Wire) -> Executor:
        """The executor of this collective's schedule with encoded messages."""
        for known, executor in self._wired:
            if known is wire:
                return executor
        executor = Executor(self.schedule, self.transport, wire=wire)
        self._wired.append((wire, executor))
        return executor

    @abstractmethod
    def all_reduce(self, buffer: Tensor, op: Op = "sum") -> None:
        """Replace the buffer by the combination of all ranks' buffers, bit-identical on all."""

    def prepare(self, buffer: Tensor) -> None:
        """Prepare for a buffer that will come often; all ranks call this before the first step."""
        return

    @property
    def choices(self) -> dict[str, str]:
        """The collective that was chosen for each size of a buffer (in bytes), for the record."""
        return {}

    def obey(self, choices: dict[str, str]) -> None:
        """Use an earlier run's choices."""
        return


class Scheduled(Collective):
    """An all-reduce that is written as a schedule."""

    def __init__(self, transport: Transport, schedule: Schedule) -> None:
        super().__init__(transport)
        self._schedule = schedule
        self._executor = Executor(schedule, transport)

    @property
    def schedule(self) -> Schedule:
        return self._schedule

    def all_reduce(self, buffer: Tensor, op: Op = "sum") -> None:
        self._executor.run(buffer, op)


def choose(name: str, transport: Transport) -> Collective:
    """Build a collective by name; `auto` measures which is the fastest (collectives/auto.py)."""
    if name == "auto":
        from paceline.collectives.auto import Auto

        return Auto(transport)
    built: Collective = collectives.build(name, transport=transport)
    return built


def usual(transport: Transport) -> Collective:
    """The transport's own all-reduce, or a ring: for exchanges too rare to measure for."""
    return choose("native" if "all_reduce" in transport.traits.native else "ring", transport)


def schedule_of(choice: Spec | str, ranks: int) -> Schedule:
    """The schedule that the user names: `ring`, `hierarchical:group=4`, `broadcast:root=2`."""
    collectives.discover()
    spec = Spec.of(choice)
    if spec.name in SCHEDULES:
        return SCHEDULES[spec.name](ranks, **collectives.resolve(choice).options)
    if spec.name in operations:
        return operations.build(spec, ranks=ranks)  # type: ignore[no-any-return]
    known = [*SCHEDULES, *operations.names()]
    raise UnknownName(
        "schedule", spec.name, known, "(native has none: the transport's library implements it.)"
    )


def algorithm(
    name: str, *, tried: bool = False, up_to_bytes: float = math.inf
) -> Callable[[Callable[..., Schedule]], Callable[..., Schedule]]:
    """Register a function that makes an all-reduce schedule from the number of ranks.

    `tried`: `collective=auto` tries it for buffers of at most `up_to_bytes`.
    """

    def decorate(make_schedule: Callable[..., Schedule]) -> Callable[..., Schedule]:
        SCHEDULES[name] = make_schedule
        if tried:
            TRIED[name] = up_to_bytes

        def make(transport: Transport, **options: Any) -> Collective:
            return Scheduled(transport, make_schedule(transport.size, **options))

        own = list(inspect.signature(make_schedule).parameters.values())[1:]
        first = inspect.Parameter("transport", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        make.__signature__ = inspect.Signature([first, *own])  # type: ignore[attr-defined]
        make.__annotations__ = {p.name: p.annotation for p in own}
        make.__doc__, make.__module__ = make_schedule.__doc__, make_schedule.__module__
        collectives.register(name)(make)
        return make_schedule

    return decorate
