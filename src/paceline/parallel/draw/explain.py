"""What `paceline explain` shows of timetables and of split models, by their names."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.errors import BadRequest
from paceline.parallel.draw import halo, tensor, timeline
from paceline.parallel.draw.built import build
from paceline.parallel.draw.facts import facts_of
from paceline.parallel.draw.scene import Explained

MOST_TIMETABLES = 2


def explain_timetables(names: Sequence[str], stages: int = 4, micros: int = 8) -> Explained:
    """Draw one timetable, or two on one clock; `stages` is the number of workers."""
    if not 1 <= len(names) <= MOST_TIMETABLES:
        raise BadRequest(f"a page shows one or two timetables, not {len(names)}")
    command = f"paceline explain {' '.join(names)} --stages {stages} --micro {micros}"
    return timeline.explained(tuple(facts_of(n, stages, micros) for n in names), command)


def explain_halo(model: str, given: tuple[int, ...], workers: int) -> Explained:
    """Draw which worker owns which rows before and after each layer, and the rows that travel."""
    return halo.explained(build(model, given), workers, _command("halo", model, given, workers))


def explain_tensor(model: str, given: tuple[int, ...], workers: int) -> Explained:
    """Draw which part of each layer's weights a worker has, and what the workers exchange."""
    return tensor.explained(build(model, given), workers, _command("tensor", model, given, workers))


def _command(name: str, model: str, given: tuple[int, ...], workers: int) -> str:
    size = "x".join(map(str, given))
    return f"paceline explain {name} --model {model} --workers {workers} --input {size}"
