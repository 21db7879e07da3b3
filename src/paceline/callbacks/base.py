"""The interface of callbacks: five methods, each with a default that does nothing.

    class Losses(paceline.Callback):
        def __init__(self):
            self.seen = []

        def on_step(self, event):
            self.seen.append(event["loss"])

    losses = Losses()
    paceline.train(data="fashion-mini", workers=2, callbacks=[losses, "csv"])
    losses.seen

The process that starts the run calls them (launch/callbacks.py), never a worker in its step.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from paceline.errors import BadRequest

Event = dict[str, Any]


@dataclass(frozen=True)
class RunInfo:
    """The run that a callback follows."""

    out: Path  # its folder
    config: dict[str, Any]  # every option, as config.json holds it
    total_steps: int | None = None  # None: only the course of the run decides
    from_step: int = 0  # more than 0: the run goes on from a checkpoint at this step
    record: dict[str, Any] | None = None  # run.json, once the run has ended


class Callback:
    """Sees the events of worker 0, in their order, in the process that starts the run.

    One thread of that process calls all methods of all callbacks; no worker waits for them. An
    event is a dict with the fields that docs/records.md lists. An exception stops the run.
    """

    def on_start(self, run: RunInfo) -> None:
        """Called once, before the first event: `run.out`, `run.config`, `run.total_steps`."""

    def on_step(self, event: Event) -> None:
        """Called after each step: `event["step"]`, `event["loss"]`, ..."""

    def on_evaluation(self, event: Event) -> None:
        """Called after each evaluation: `event["step"]`, `event["accuracy"]`, ..."""

    def on_checkpoint(self, event: Event) -> None:
        """Called after each checkpoint: `event["step"]`, `event["path"]`."""

    def on_end(self, run: RunInfo) -> None:
        """Called last, also after a failure or Ctrl-C: `run.record` is the content of run.json."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"


def need(module: str, name: str, extra: str) -> None:
    """Refuse a callback whose extra is not installed. Imports nothing: workers are forked later."""
    if find_spec(module) is None:
        raise BadRequest(
            f"callback {name} needs the package {module}: pip install 'paceline[{extra}]'"
        )


def inside(run: RunInfo, folder: str) -> Path:
    """Return a folder that a user named: a relative one is inside the run's folder."""
    return run.out / Path(folder).expanduser()
