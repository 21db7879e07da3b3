"""A collective bound to a transport: what strategies and codecs call. `algorithm` makes one from a
schedule.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor

from paceline.collectives.execute import Executor
from paceline.collectives.schedule import Schedule
from paceline.errors import UnknownName
from paceline.registry import Spec, collectives, operations
from paceline.transport.base import Op, Transport

SCHEDULES: dict[
    str, Callable[..., Schedule]
] = {}  # every all-reduce that is written as a schedule, by name


class Collective(ABC):
    """Built with the transport whose ranks it combines."""

    name: ClassVar[str]

    def __init__(self, transport: Transport) -> None:
        self.transport = transport

    @abstractmethod
    def all_reduce(self, buffer: Tensor, op: Op = "sum") -> None:
        """In place: every rank ends with the combination of all ranks' buffers, bit-identical on
        all of them.
        """

    def prepare(self, buffer: Tensor) -> None:
        """Called by all ranks together, before the first step, with a buffer that will
        come often.
        """
        return

    @property
    def choices(self) -> dict[str, str]:
        """What was chosen by measuring (bytes of the buffer: collective), to be recorded."""
        return {}

    def obey(self, choices: dict[str, str]) -> None:
        """Take an earlier run's choices."""
        return


class Scheduled(Collective):
    """An all-reduce that is written as a schedule."""

    def __init__(self, transport: Transport, schedule: Schedule) -> None:
        super().__init__(transport)
        self.schedule = schedule
        self._executor = Executor(schedule, transport)

    def all_reduce(self, buffer: Tensor, op: Op = "sum") -> None:
        self._executor.run(buffer, op)


def choose(name: str, transport: Transport) -> Collective:
    """A collective by name; `auto` measures which is the fastest (collectives/auto.py)."""
    if name == "auto":
        from paceline.collectives.auto import Auto

        return Auto(transport)
    built: Collective = collectives.build(name, transport=transport)
    return built


def schedule_of(choice: Spec | str, ranks: int) -> Schedule:
    """The schedule that a person names: `ring`, `hierarchical:group=4`, `broadcast:root=2`."""
    collectives.discover()
    spec = Spec.of(choice)
    if spec.name in SCHEDULES:
        return SCHEDULES[spec.name](ranks, **collectives.resolve(choice).options)
    if spec.name in operations:
        return operations.build(spec, ranks=ranks)  # type: ignore[no-any-return]
    known = [*SCHEDULES, *operations.names()]
    raise UnknownName(
        "schedule", spec.name, known, "(native has none: the library keeps its own to itself.)"
    )


def algorithm(name: str) -> Callable[[Callable[..., Schedule]], Callable[..., Schedule]]:
    """Register a function from the number of ranks (and its own options) to an all-reduce
    schedule.
    """

    def decorate(make_schedule: Callable[..., Schedule]) -> Callable[..., Schedule]:
        SCHEDULES[name] = make_schedule

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
