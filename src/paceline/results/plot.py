"""A picture of a run's course: the loss and the test scores over its steps."""

from __future__ import annotations

import io
from collections.abc import Sequence
from functools import partial
from typing import Any

from paceline.common.extras import need
from paceline.look import LIGHT, WORKERS

SMOOTH_FROM = 60  # steps; with fewer, each step's own loss can be read
SETS = {"test": WORKERS[6], "validation": WORKERS[2]}
Row = dict[str, Any]


def plot(rows: Sequence[Row], title: str, metric: str) -> Any:
    """Draw the loss above the metric, both over the steps; return matplotlib's Figure."""
    need("matplotlib", "matplotlib", "notebook", "run.plot()")
    from matplotlib.figure import Figure

    steps = [r for r in rows if r["kind"] == "step" and r["loss"] is not None]
    tests = [r for r in rows if r["kind"] == "evaluation"]
    scored = any(r.get(f"{on}_{metric}") is not None for on in SETS for r in tests)
    size = (7, 4.4 if scored else 2.8)
    figure: Any = Figure(figsize=size, layout="constrained", facecolor="white")
    axes = figure.subplots(2 if scored else 1, 1, sharex=True, squeeze=False)[:, 0]
    losses = axes[0]
    xs, ys = [r["step"] for r in steps], [r["loss"] for r in steps]
    many = len(ys) >= SMOOTH_FROM
    losses.plot(
        xs,
        ys,
        color=WORKERS[0],
        alpha=0.35 if many else 1,
        linewidth=1,
        label="training, each step" if many else "training",
    )
    if many:
        width = max(2, len(ys) // 30)
        label = f"training, mean of {width} steps"
        losses.plot(xs, running_mean(ys, width), color=WORKERS[0], label=label)
    for on, colour in SETS.items():
        _points(losses, tests, f"{on}_loss", colour, on)
        if scored:
            percent = 100 if metric == "accuracy" else 1
            _points(axes[1], tests, f"{on}_{metric}", colour, on, percent)
    losses.set_ylabel("loss")
    if scored:
        axes[1].set_ylabel("accuracy (%)" if metric == "accuracy" else metric)
    for each in axes:
        if each.lines:
            each.legend(frameon=False, labelcolor=LIGHT["ink"], fontsize=9)
        each.grid(color=LIGHT["line"], linewidth=0.6)
        each.tick_params(colors=LIGHT["soft"])
        for side, edge in each.spines.items():
            edge.set_visible(side in ("left", "bottom"))
            edge.set_color(LIGHT["line"])
    axes[-1].set_xlabel("step")
    losses.set_title(title, color=LIGHT["ink"], fontsize=10, loc="left")
    figure._repr_png_ = partial(_png, figure)  # a notebook draws it, whatever backend is chosen
    return figure


def _png(figure: Any) -> bytes:
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=100)
    return drawn.getvalue()


def _points(
    axes: Any, rows: Sequence[Row], key: str, colour: str, label: str, scale: float = 1
) -> None:
    known = [r for r in rows if r.get(key) is not None]
    if known:
        xs, ys = [r["step"] for r in known], [scale * r[key] for r in known]
        axes.plot(xs, ys, color=colour, marker="o", markersize=4, linewidth=1.4, label=label)


def running_mean(values: Sequence[float], width: int) -> list[float]:
    """Return for each value the mean of it and of the `width - 1` values before it."""
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    return [
        (sums[i + 1] - sums[max(0, i + 1 - width)]) / min(i + 1, width) for i in range(len(values))
    ]
