"""What a loop of the user's own tells its record: losses, and the numbers of evaluations."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from paceline.errors import BadRequest
from paceline.run.loop.record import Record

SETS = ("test", "validation")


class Results:
    """Takes the numbers that the loop has computed. Without `join(out=...)` they are dropped."""

    _record: Record

    def log_loss(self, loss: Tensor) -> Tensor:
        """Record this loss as that of the next step, and return it.

        For loops with `loss.backward()` and `optimizer.step()`; `pace.step(loss)` and
        `pace.backward(loss)` do it themselves. Losses of one step add up, as their gradients do.
        """
        self._record.add_loss(None, loss)
        return loss

    def evaluated(
        self,
        loss: float | Tensor | None = None,
        accuracy: float | Tensor | None = None,
        *,
        on: str = "test",
        higher_is_better: bool | None = None,
        **metrics: float | Tensor,
    ) -> None:
        """Record the numbers of an evaluation at the present step; those of worker 0 count.

        The time since the last step then counts as evaluation, not as training. `on` is "test" or
        "validation". The record shows the accuracy, or without one the first of `metrics`.
        """
        if on not in SETS:
            raise BadRequest(f"pace.evaluated(on={on!r}): it must be one of {', '.join(SETS)}")
        given = {"loss": loss, "accuracy": accuracy, **metrics}
        known = {name: _number(name, value) for name, value in given.items() if value is not None}
        if not known:
            raise BadRequest(
                "pace.evaluated needs a number: pace.evaluated(loss=..., accuracy=...)"
            )
        share = known.get("accuracy")
        if share is not None and not 0 <= share <= 1:
            raise BadRequest(
                f"pace.evaluated(accuracy={share:g}): it must be a share from 0 to 1, such as 0.973"
            )
        test_loss = known.pop("loss", None)
        metric: dict[str, Any] | None = None
        if (name := next(iter(known), None)) is not None:
            metric = {"name": name, "value": known[name]}
            if higher_is_better is not None:
                metric["higher_is_better"] = higher_is_better
        self._record.evaluated(
            {"loss": test_loss, "accuracy": share, "metric": metric, "metrics": known, "on": on}
        )


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise BadRequest(
            f"pace.evaluated({name}=...): it must be a number, not a {type(value).__name__}"
        ) from None
