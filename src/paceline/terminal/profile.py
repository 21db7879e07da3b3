"""A profile on a terminal: a bar while it is measured, and tables at the end."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from paceline.errors import voiced
from paceline.planning.accuracy import Accuracy
from paceline.planning.compute import Steps
from paceline.planning.profile import Profile
from paceline.report.words import percent, size
from paceline.terminal.fitting import Column, drop, fit_table
from paceline.terminal.results import machine_line


class ProfileBar:
    """Shows how far the measurement is: a bar on a terminal, nothing where output is piped.

    It has no thread, because workers are forked from this process while it is shown.
    """

    def __init__(self, shares: dict[str, float]) -> None:
        self.console = Console(stderr=True)
        self._shares = shares
        self._bar = Progress(
            TextColumn("{task.description:10}"),
            BarColumn(bar_width=40),
            TaskProgressColumn(),
            console=self.console,
            auto_refresh=False,
            transient=True,
            disable=not self.console.is_terminal,
        )
        self._task = self._bar.add_task("starting", total=1.0)

    def __enter__(self) -> ProfileBar:
        self._bar.start()
        self._bar.refresh()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def hear(self, kind: str, content: dict[str, Any]) -> None:
        if kind == "notice":
            self.console.print(
                f"note: {voiced(content['text'])}", highlight=False, markup=False, soft_wrap=True
            )
        if kind != "progress":
            return
        done = 0.0
        for part, share in self._shares.items():
            if part == content["part"]:
                done += share * content["share"]
                break
            done += share
        self._bar.update(self._task, completed=done, description=content["part"], refresh=True)


def show_profile(profile: Profile, console: Console) -> None:
    """Print what a profile holds, in tables that fit the terminal, and what it lacks."""
    model = profile.model
    console.print(
        f"{model.name} on {profile.data}: {model.parameters:,} parameters, gradients of"
        f" {size(model.gradient_bytes)}",
        style="bold",
        highlight=False,
        markup=False,
    )
    console.print(_steps(profile, console))
    for sentence in _said(profile):
        console.print(sentence, highlight=False, markup=False)
    if profile.codecs:
        console.print(_codecs(profile, console))
    if profile.links:
        console.print(_links(profile, console))
    for sentence in profile.missing:
        console.print(f"note: {voiced(sentence)}", style="yellow", highlight=False, markup=False)
    if profile.made.machine.get("cpu"):
        machine = {**profile.made.machine, **profile.made.versions}
        console.print(machine_line(machine), style="dim", highlight=False)


def _steps(profile: Profile, console: Console) -> Any:
    steps = profile.compute.steps
    quantiles = [
        Column("5%", [_time(s.quantiles_s[5]) for s in steps]),
        Column("95%", [_time(s.quantiles_s[95]) for s in steps]),
    ]
    parts = [
        Column("CPU" if part == "cpu" else part, [_time(getattr(s, f"{part}_s")) for s in steps])
        for part in ("cpu", "load", "forward", "backward", "update")
        if any(getattr(s, f"{part}_s") is not None for s in steps)
    ]
    count = Column("steps", [f"{s.count:,}" for s in steps])
    columns = [Column("median", [_time(s.median_s) for s in steps]), *quantiles, *parts, count]
    narrow = [drop(count), *(drop(part) for part in parts[1:2])]
    return fit_table(console, "batch size", [_batch(s) for s in steps], columns, narrow)


def _batch(steps: Steps) -> str:
    return f"{steps.batch_size:,}"


def _said(profile: Profile) -> list[str]:
    """Return in sentences what has no table."""
    compute, said = profile.compute, []
    if compute.line is not None:
        said.append(
            f"A step takes {_time(compute.line.fixed)} and {_time(compute.line.slope)} per sample."
        )
    if len(compute.speeds) > 1:
        speeds = ", ".join(f"{speed:.3f}" for speed in compute.speeds)
        said.append(f"Steady speeds of the workers: {speeds}.")
    if compute.together is not None:
        said.append(
            f"A step takes {compute.together:.2f} times as long while the other worker computes."
        )
    if compute.ready:
        first = min(compute.ready)
        said.append(f"The first gradient is ready after {percent(first, 0)} of the backward pass.")
    if profile.memory is not None:
        said.append(
            f"A worker held {size(profile.memory.peak_bytes)} at most, at batch size"
            f" {profile.memory.batch_size:,}."
        )
    if profile.accuracy is not None:
        said += _steps_to(profile.accuracy)
    if profile.measurements:
        said.append(f"{len(profile.measurements):,} rows with several workers are kept.")
    return said


def _steps_to(accuracy: Accuracy) -> list[str]:
    """Return how many steps the accuracy took, by batch and by strategy."""
    counted = "; ".join(
        f"{_mean(branch.steps):,.0f} with batches of {branch.batch_size}"
        for branch in accuracy.branches
    )
    said = [f"Steps to an accuracy of {accuracy.target:g}: {counted}."]
    if accuracy.s_min > 0:
        said.append(
            f"So S(B) = {accuracy.s_min:,.0f} (1 + {accuracy.b_crit:,.0f} / B) steps, with B"
            " samples in a step of all workers."
        )
    said += [
        f"{each.strategy}{'' if each.codec == 'none' else ' + ' + each.codec} with {each.workers}"
        f" workers of {each.batch_size} samples:"
        f" {_mean(each.steps):,.0f} steps."
        for each in accuracy.followed
    ]
    return [*said, *([accuracy.doubt] if accuracy.doubt else [])]


def _mean(steps: Sequence[int]) -> float:
    return sum(steps) / len(steps)


def _codecs(profile: Profile, console: Console) -> Any:
    found, whole = profile.codecs, profile.model.gradient_bytes
    columns = [
        Column("kind", [c.kind for c in found]),
        Column("message", [size(c.message_bytes) for c in found]),
        Column("encode all", [_time(c.encode.at(whole)) for c in found]),
        Column("decode all", [_time(c.decode.at(whole)) for c in found]),
    ]
    return fit_table(console, "codec", [c.name for c in found], columns, [])


def _links(profile: Profile, console: Console) -> Any:
    found = profile.links
    rates = [_gigabits(link.s_per_byte) for link in found]
    columns = [
        Column("latency", [_time(link.latency_s) for link in found]),
        Column("rate", rates),
        Column("add 1 MB", [_time(1e6 * link.s_per_byte_added) for link in found]),
        Column("CPU: send 1 MB", [_time(1e6 * link.cpu_s_per_byte_sent) for link in found]),
        Column("receive 1 MB", [_time(1e6 * link.cpu_s_per_byte_received) for link in found]),
    ]
    return fit_table(console, "transport", [link.transport for link in found], columns, [])


def _gigabits(s_per_byte: float) -> str:
    return f"{8e-9 / s_per_byte:.1f} Gbit/s" if s_per_byte else "no limit seen"


def _time(seconds: float | None) -> str:
    """Return seconds with a fitting unit: `12.3 ms`."""
    if seconds is None:
        return "–"
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} µs"
