"""A fault hooks into a run at three places; each has a default that does nothing."""

from __future__ import annotations

from typing import ClassVar

from paceline.transport.base import Transport


class Fault:
    """`--faults "slow:rank=1,factor=3"`; a subclass's dataclass fields are its options."""

    name: ClassVar[str]

    def wrap(self, transport: Transport) -> Transport:
        """Put something between the run and its transport."""
        return transport

    def before_step(self, step: int, transport: Transport) -> None:
        """Before step `step` (counted from 1) of this rank."""
        return

    def after_compute(self, seconds: float, transport: Transport) -> None:
        """After a forward and backward pass that took `seconds`."""
        return
