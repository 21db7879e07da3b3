"""Stages of consecutive layers on different workers, for `layers` and for `pipeline`."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from paceline.data.content import cut_rows, rows
from paceline.errors import BadRequest, NotFinite
from paceline.parallel.base import Form, Given, Part, Passes, device_of
from paceline.parallel.cut import (
    Layer,
    balanced,
    by_hand,
    layers_of,
    measured,
    refuse_idle,
    refuse_ties,
    trains,
)
from paceline.parallel.dropout import Place, with_placed_dropout
from paceline.parallel.execute import Executor, Micro
from paceline.parallel.later import Later, compute_later
from paceline.parallel.stage import Stage, Stages
from paceline.parallel.timetable import Timetable, timing
from paceline.parallel.torch_engine import TorchEngine
from paceline.types import Batch


class Staged(Form):
    """A form that cuts the model into stages, through which batches pass by a timetable."""

    stages: int = 0  # workers that hold the model together; 0: all
    cut: str = ""  # the first layers of the stages; empty: by measured time
    engine: str = "ours"  # torch: PyTorch's own schedules make the passes
    _chosen: tuple[int, ...] | None = None  # the cuts, once they are agreed on

    def parts(self) -> int | None:
        return self.stages or None

    @abstractmethod
    def timetable(self, parts: int, samples: int | None = None) -> Timetable:
        """The timetable of a batch with so many samples; None: with enough of them."""

    def check(self, model: nn.Module, parts: int) -> None:
        layers, table = layers_of(model), self.timetable(parts)
        balanced([1.0] * len(layers), table.stages, [*map(trains, layers)])
        if self.cut:
            cuts = self._by_hand(layers, table.stages)
            refuse_ties(layers, cuts)
            refuse_idle(layers, cuts)

    def _by_hand(self, layers: Sequence[Layer], stages: int) -> tuple[int, ...]:
        return by_hand(self.cut.replace(";", ","), layers, stages)

    def split(self, model: nn.Module, given: Given) -> StagedPart:
        model, place = with_placed_dropout(model, given.seed)
        layers = layers_of(model)
        return StagedPart(self, layers, self._cuts(layers, given), given, place)

    def needs(self, model: nn.Module, given: Given) -> Callable[[str], bool]:
        layers, table = layers_of(model), self.timetable(given.group.size)
        edges = pairwise([0, *self._cuts(layers, given), len(layers)])
        own = {
            layer.name
            for stage, (low, high) in enumerate(edges)
            if table.place[stage] == given.group.rank
            for layer in layers[low:high]
        }

        def is_needed(name: str) -> bool:
            words = name.split(".")
            return any(".".join(words[:n]) in own for n in range(1, len(words) + 1))

        return is_needed

    def _cuts(self, layers: Sequence[Layer], given: Given) -> tuple[int, ...]:
        """The first layers of all stages but the first: all ranks agree on them, once."""
        if self._chosen is not None:
            return self._chosen
        table, everyone = self.timetable(given.group.size), given.everyone
        bounds = torch.zeros(max(1, table.stages - 1), dtype=torch.int64)
        if everyone.rank == 0 and table.stages > 1:
            if self.cut:
                chosen = self._by_hand(layers, table.stages)
            else:
                costs, messages = measured(layers, given.inputs)
                chosen = balanced(costs, table.stages, [*map(trains, layers)], messages)
            bounds.copy_(torch.tensor(chosen))
        if everyone.size > 1:
            everyone.uncounted().control.broadcast(bounds, 0)
        cuts = tuple(int(b) for b in bounds[: table.stages - 1])
        refuse_ties(layers, cuts)
        self._chosen = cuts
        return cuts


class StagedPart(Part):
    """The stages of one rank."""

    def __init__(
        self, form: Staged, layers: Sequence[Layer], cuts: Sequence[int], given: Given, place: Place
    ) -> None:
        group = given.group
        table = form.timetable(group.size)
        runs = [layers[low:high] for low, high in pairwise([0, *cuts, len(layers)])]
        own = {s: Stage(run) for s, run in enumerate(runs) if table.place[s] == group.rank}
        super().__init__(Stages(list(own.values())), group)
        self.form, self.cuts, self.place = form, tuple(cuts), place
        self.first_layers = tuple(layers[c].name for c in cuts)
        later = Later()
        if table.weights_apart:
            compute_later(self.model, later)
        self.executor = Executor(group, own, device_of(self.model), self._enter, later)
        self.theirs: TorchEngine | None = None
        if form.engine == "torch" and group.size > 1:
            if given.everyone.size > group.size:
                raise BadRequest("engine=torch has one copy of the model: leave the grid out")
            device = device_of(self.model)
            self.theirs = TorchEngine(group, own, table.stages, device, self._enter)
        self._first = 0
        assert isinstance(self.model, Stages)
        self.model.whole = lambda x: self.executor.forward(table, x)
        self.idle_s = self.busy_s = 0.0

    def _enter(self, first: int) -> None:
        self.place.first = self._first + first

    def begin(self, step: int, first: int) -> None:
        self.place.step, self._first = step, first

    def backward(self, passes: Passes, batch: Batch, scale: float) -> float:
        count = rows(batch.inputs if batch.targets is None else batch.targets)
        table = self.form.timetable(self.size, count)
        micros = list(self._cut(batch, table.micros))

        def scaled(outputs: Tensor, targets: Any) -> Tensor:
            return passes.loss(outputs, targets) * scale

        def loss(outputs: Tensor, micro: Micro) -> Tensor:
            mean = passes.loss(outputs, micro.targets)
            return mean * (scale * micro.rows / count)

        if self.theirs is not None and self.theirs.fits(micros):
            with passes.computing():
                moved = self.executor.moved(table, micros)  # we do not see PyTorch's messages
                made = self.theirs.run(table, batch.inputs, batch.targets, micros, scaled)
            assert self.group is not None
            self.group.settle(moved, 0.0)
        else:
            made = self.executor.run(table, micros, loss, passes.computing)
            waited = self.executor.waited
            self.idle_s, self.busy_s = self.idle_s + waited.idle_s, self.busy_s + waited.busy_s
        value = torch.tensor([made], dtype=torch.float64)
        if self.size > 1:  # the last stage tells the others the loss
            assert self.group is not None
            self.group.uncounted().control.broadcast(value, table.place[-1])
        mean = float(value) / scale if scale else float(value)
        if mean - mean != 0.0:
            raise NotFinite(
                f"the loss is {mean} at step {batch.step + 1}: try a smaller lr, or look for"
                " bad numbers in the data"
            )
        return mean

    def _cut(self, batch: Batch, count: int) -> Iterator[Micro]:
        total = rows(batch.inputs if batch.targets is None else batch.targets)
        ends = [total * i // count for i in range(count + 1)]
        for low, high in pairwise(ends):
            yield Micro(
                cut_rows(batch.inputs, low, high),
                cut_rows(batch.targets, low, high),
                high - low,
                low,
            )

    def norm(self) -> float | None:
        if self.size == 1:
            return None
        assert self.group is not None
        own = [p.grad for p in self.model.parameters() if p.grad is not None]
        squares = torch.tensor(
            [sum(float(g.double().square().sum()) for g in own)], dtype=torch.float64
        )
        self.group.uncounted().control.all_reduce(squares)
        return math.sqrt(float(squares))

    def summary(self) -> dict[str, Any]:
        whole = self.idle_s + self.busy_s
        return {"bubble": self.idle_s / whole} if whole else {}

    def described(self) -> dict[str, Any]:
        table = self.form.timetable(self.size)
        return {
            "stages": table.stages,
            "micro": table.micros,
            "schedule": table.name,
            "cut": list(self.first_layers),
            "bubble_in_theory": timing(table).idle,
        }
