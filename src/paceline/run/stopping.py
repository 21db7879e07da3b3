"""When to stop, and which evaluation was the best: rules that look at the evaluations.

They look at the validation set if there is one, otherwise at the test set. All workers see the same
numbers, so they decide alike.
"""

from __future__ import annotations

from typing import Any

from paceline.optim.schedules import Plateau
from paceline.request.config import Config


class Stopping:
    """Follows one number through a run's evaluations: a metric, or the loss."""

    def __init__(self, config: Config, plateau: Plateau | None = None) -> None:
        self.config, self.plateau = config, plateau
        self.best: float | None = None
        self.best_step = 0
        self.waited = 0  # evaluations since the best one
        self.improved = False  # the last evaluation was the best so far
        self.reason: str | None = None  # why the run ends before its last step

    def saw(self, step: int, loss: float, values: dict[str, float], higher: dict[str, bool]) -> str:
        """Take note of an evaluation. Returns the name of the number that decides."""
        name = self.decides_by(values)
        value = loss if name == "loss" else values[name]
        up = name != "loss" and higher[name]
        self.improved = self.best is None or (value > self.best if up else value < self.best)
        if self.improved:
            self.best, self.best_step, self.waited = value, step, 0
        else:
            self.waited += 1
        if self.plateau is not None:
            self.plateau.saw(value, up)
        patience, until = self.config.patience, self.config.until_accuracy
        if patience is not None and self.waited >= patience:
            self.reason = f"{name} has not improved in {patience} evaluations"
        if until is not None and values.get("accuracy", -1.0) >= until:
            self.reason = f"accuracy has reached {until:g}"
        return name

    def decides_by(self, values: dict[str, float]) -> str:
        """The name of the number that decides: as asked; else the metric, else the loss."""
        asked = self.config.best_by
        if asked == "loss" or not values:
            return "loss"
        return next(reversed(values)) if asked in ("auto", "metric") else asked

    def state(self) -> dict[str, Any]:
        return {
            "best": self.best,
            "best_step": self.best_step,
            "waited": self.waited,
            "plateau": self.plateau.state() if self.plateau is not None else None,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.best, self.best_step = state["best"], state["best_step"]
        self.waited = state["waited"]
        if self.plateau is not None and state["plateau"] is not None:
            self.plateau.restore(state["plateau"])
