"""Event files of TensorBoard: `tensorboard --logdir OUT/tensorboard`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any

from paceline.callbacks import scalars
from paceline.callbacks.base import Callback, Event, RunInfo, inside, need
from paceline.registry import callbacks


@callbacks.register("tensorboard")
@dataclass(repr=False)
class TensorBoard(Callback):
    """Writes event files that TensorBoard shows, into the folder `tensorboard` of the run's."""

    folder: Annotated[str, "of the event files; a relative path is inside the run's folder"] = (
        "tensorboard"
    )

    def __post_init__(self) -> None:
        need("tensorboard", "tensorboard", "tensorboard")

    def on_start(self, run: RunInfo) -> None:
        """Begin an event file. A resumed run purges what an earlier session wrote after its
        checkpoint.
        """
        from torch.utils.tensorboard import SummaryWriter

        purge = run.from_step + 1 if run.from_step else None
        self._writer: Any = SummaryWriter(str(inside(run, self.folder)), purge_step=purge)
        text = json.dumps(run.config, indent=2)
        self._writer.add_text("config", "\n".join("    " + line for line in text.splitlines()))

    def on_step(self, event: Event) -> None:
        """Write the numbers of a step."""
        self._write(event, scalars.of_step(event))

    def on_evaluation(self, event: Event) -> None:
        """Write the numbers of an evaluation."""
        self._write(event, scalars.of_evaluation(event))
        self._writer.flush()

    def on_end(self, run: RunInfo) -> None:
        """Close the event file."""
        self._writer.close()

    def _write(self, event: Event, numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, event["step"], walltime=event["t"])
