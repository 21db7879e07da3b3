"""Runs of Weights & Biases, offline by default: `wandb sync OUT/wandb/offline-run-*`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated, Any

from paceline.callbacks import scalars
from paceline.callbacks.base import Callback, Event, RunInfo, need
from paceline.registry import callbacks


@callbacks.register("wandb")
@dataclass(repr=False)
class WandB(Callback):
    """Logs to Weights & Biases, offline unless WANDB_MODE says otherwise: into `wandb` in the
    run's folder.
    """

    project: Annotated[str, "the name of the project"] = "paceline"

    def __post_init__(self) -> None:
        need("wandb", "wandb", "wandb")

    def on_start(self, run: RunInfo) -> None:
        """Begin a run of Weights & Biases, with the options as its config."""
        self._own = "wandb" not in sys.modules  # the caller does not use it beside this run
        import wandb

        self._wandb: Any = wandb
        chosen = wandb.setup().settings
        self._run: Any = wandb.init(
            project=self.project,
            name=run.out.resolve().name,
            dir=str(run.out.resolve()),
            config=run.config,
            # `wandb.init` itself reads WANDB_MODE; an argument would win over it.
            mode=None if "mode" in chosen.model_fields_set else "offline",
            reinit="create_new",
            # The record has the resources of all workers; here is only the starting process.
            settings=wandb.Settings(
                silent=True, console="off", disable_git=True, x_disable_stats=True
            ),
        )

    def on_step(self, event: Event) -> None:
        """Log the numbers of a step."""
        self._log(event, scalars.of_step(event))

    def on_evaluation(self, event: Event) -> None:
        """Log the numbers of an evaluation."""
        self._log(event, scalars.of_evaluation(event))

    def on_end(self, run: RunInfo) -> None:
        """End the run of Weights & Biases: exit code 0 means that it was completed."""
        record = run.record or {}
        self._run.summary.update(scalars.of_record(record))
        self._run.finish(exit_code=0 if record["status"] == "completed" else 1)
        if self._own:
            self._wandb.teardown()  # ends its process and its threads

    def _log(self, event: Event, numbers: dict[str, float]) -> None:
        self._run.log({**numbers, "_timestamp": event["t"]}, step=event["step"])
