"""How the workers are arranged: copies of the model, each of them split over some workers.

--parallel pipeline:stages=2               two workers, one copy
--workers 4 --parallel pipeline:stages=2   two copies of two workers each
--grid data=2,tensor=2                     the same shape, by tensor
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.errors import BadRequest, UnknownName
from paceline.registry import Spec, forms

if TYPE_CHECKING:
    from paceline.parallel.base import Form


WHOLE = "none"


@dataclass(frozen=True)
class Arrangement:
    """Worker r holds part r % parts of copy r // parts."""

    form: Spec | None  # None: every worker has a whole model
    copies: int
    parts: int

    @property
    def workers(self) -> int:
        return self.copies * self.parts

    def ranks_of_copy(self, rank: int) -> tuple[int, ...]:
        """The ranks that hold the same copy as a rank."""
        first = rank - rank % self.parts
        return tuple(range(first, first + self.parts))

    def ranks_of_part(self, rank: int) -> tuple[int, ...]:
        """The ranks that hold the same part of other copies."""
        return tuple(range(rank % self.parts, self.workers, self.parts))

    def build(self) -> Form:
        assert self.form is not None
        built: Form = forms.build(self.form)
        return built

    def __str__(self) -> str:
        return f"data={self.copies},{self.form.name if self.form else 'whole'}={self.parts}"


def arranged(
    parallel: Spec | str | None, grid: str | None, cut: str | None, workers: int
) -> Arrangement:
    """Return the arrangement that the options ask for. `workers` 1: as many as it needs.

    `parallel` none: whole models, whatever the run that is resumed had.
    """
    if parallel is not None and str(parallel) == WHOLE:
        return Arrangement(None, workers, 1)
    if parallel is None and grid is None:
        if cut is not None:
            raise BadRequest(f"cut={cut} says where a model is split: it needs --parallel")
        return Arrangement(None, workers, 1)
    spec = forms.resolve(parallel) if parallel is not None else None
    axes = _axes(grid) if grid is not None else {}
    copies = axes.pop("data", None)
    for name in axes:
        spec = spec or forms.resolve(name)
        if name != spec.name:
            raise BadRequest(f"grid={grid} names {name}, and parallel={spec} names {spec.name}")
    if spec is None:
        raise BadRequest(f"grid={grid} splits nothing: name a second axis, as data=2,pipeline=2")
    if cut is not None:
        if "cut" not in forms.entry(spec).options:
            raise BadRequest(f"cut={cut}: {spec.name} does not cut a model between its layers")
        spec = forms.resolve(spec.with_option("cut", cut.replace(",", ";")))
    parts = axes.get(spec.name)
    own = forms.build(spec).parts()
    if own is not None and parts not in (None, own):
        raise BadRequest(f"grid={grid} and parallel={spec} differ: {parts} and {own} parts")
    parts = parts or own
    if parts is None:
        if copies is not None and workers % copies == 0:
            parts = workers // copies
        elif copies is None:
            parts = workers
        else:
            raise BadRequest(f"grid={grid}: {workers} workers are no {copies} equal groups")
    if copies is None:
        if workers == 1:
            copies = 1
        elif workers % parts:
            raise BadRequest(
                f"{workers} workers with {spec}: its {parts} parts do not divide them; use"
                f" --workers {max(1, workers // parts) * parts}"
            )
        else:
            copies = workers // parts
    made = Arrangement(spec, copies, parts)
    if workers not in (1, made.workers):
        raise BadRequest(f"workers={workers}: {made} is {made.workers} workers")
    return made


def _axes(grid: str) -> dict[str, int]:
    """Read `data=2,pipeline=2`."""
    axes: dict[str, int] = {}
    for pair in grid.split(","):
        name, _, count = (word.strip() for word in pair.partition("="))
        if name != "data" and name not in forms:
            raise UnknownName("axis of a grid", name, ["data", *forms.names()])
        if not count.isdigit() or int(count) < 1 or name in axes:
            raise BadRequest(f"grid={grid}: write each axis once with its size, data=2,pipeline=2")
        axes[name] = int(count)
    if len(set(axes) - {"data"}) > 1:
        raise BadRequest(f"grid={grid}: a grid has two axes, data and one that splits the model")
    return axes
