"""A worker that is killed before a step, or that loses its connections."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from typing import Annotated

from paceline.errors import RunFailed
from paceline.faults.base import Fault
from paceline.registry import faults
from paceline.transport.base import Transport


@faults.register("die")
@dataclass
class Die(Fault):
    """One worker is killed (SIGKILL) before a step."""

    rank: Annotated[int, "which worker"] = 0
    step: Annotated[int, "before this step, counted from 1"] = 1

    def before_step(self, step: int, transport: Transport) -> None:
        if (transport.rank, step) == (self.rank, self.step):
            if transport.traits.runs_as == "processes":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RunFailed(f"died before step {step}, as --faults asked")


@faults.register("drop")
@dataclass
class Drop(Fault):
    """One worker loses its connections before a step; its process continues."""

    rank: Annotated[int, "which worker"] = 0
    step: Annotated[int, "before this step, counted from 1"] = 1

    def before_step(self, step: int, transport: Transport) -> None:
        if (transport.rank, step) == (self.rank, self.step):
            transport.close()
            raise RunFailed(f"lost its connections before step {step}, as --faults asked")
