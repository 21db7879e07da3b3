"""The executor runs any timetable: it receives, computes and sends, task by task.

Receives are posted before they are needed, sends do not wait, and shapes are exchanged once for
each shape of a micro-batch.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from paceline.errors import BadRequest
from paceline.parallel.later import Later, Product
from paceline.parallel.pieces import DTYPES
from paceline.parallel.stage import Stage
from paceline.parallel.timetable import Task, Timetable
from paceline.transport.base import Transport, Work
from paceline.transport.metered import Tally

AHEAD = 2  # receives per rank that are posted before they are needed

Shape = tuple[torch.dtype, tuple[int, ...]]


@dataclass
class Kept:
    """What a stage keeps of a micro-batch between its forward and its backward pass."""

    given: Any
    output: Tensor


@dataclass
class Micro:
    """One micro-batch: the samples and targets, and what begins its forward passes."""

    inputs: Any
    targets: Any
    rows: int
    first: int  # its first row in the batch


@dataclass
class Waited:
    """The seconds that a rank spent in its tasks and in waiting for others, in one step."""

    busy_s: float = 0.0
    idle_s: float = 0.0
    tasks_s: list[tuple[Task, float]] = field(default_factory=list)  # of each task, in order


class Executor:
    """Runs timetables on one rank of a group, which has some stages of a model."""

    def __init__(
        self,
        group: Transport,
        stages: dict[int, Stage],
        device: torch.device,
        enter: Callable[[int], None],
        later: Later | None = None,
    ) -> None:
        self.group, self.stages, self.device, self.enter = group, stages, device, enter
        self.later = later or Later()
        self._shapes: dict[Any, dict[int, Shape]] = {}  # of each stage's output
        self.waited = Waited()

    def run(
        self,
        timetable: Timetable,
        micros: Sequence[Micro],
        loss: Callable[[Tensor, Micro], Tensor],
        computing: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> float:
        """Make all forward and backward passes of a batch. Returns the sum of the micro-batches'
        losses, on the last stage's rank. `computing`: in which forward passes are made.
        """
        with computing():
            shapes = [self._output_shapes(timetable, micro.inputs) for micro in micros]
        line = _Line(self.group, timetable, shapes, self.device)
        kept: dict[tuple[int, int], Kept] = {}
        last, value, now = timetable.stages - 1, 0.0, self.group.now
        self.waited = waited = Waited()
        self.later.active = timetable.weights_apart
        products: dict[tuple[int, int], list[Product]] = {}
        for task in timetable.ranks[self.group.rank]:
            began = now()
            arrived = line.take(task)
            ready = now()
            waited.idle_s += ready - began
            self.enter(micros[task.micro].first)
            stage, key = self.stages[task.stage], (task.stage, task.micro)
            if task.kind == "F":
                given = micros[task.micro].inputs if task.stage == 0 else arrived
                if task.stage and given.is_floating_point():
                    given.requires_grad_()
                with computing():
                    output = stage(given)
                    if task.stage == last:
                        output = loss(output, micros[task.micro])
                if task.stage == last:
                    value += float(output.detach())
                else:
                    _single(output, task.stage)
                    line.give(task, output.detach())
                kept[key] = Kept(given, output)
            elif task.kind == "B":
                held = kept.pop(key)
                if held.output.requires_grad:
                    held.output.backward(None if task.stage == last else arrived)
                if task.stage:
                    gradient = held.given.grad
                    line.give(task, torch.zeros_like(held.given) if gradient is None else gradient)
                products[key] = self.later.taken()
            else:
                self.later.make(products.pop(key))
            done = now()
            waited.busy_s += done - ready
            waited.tasks_s.append((task, done - ready))
        self.later.active = False
        line.finish()
        return value

    def forward(self, timetable: Timetable, inputs: Any) -> Tensor:
        """Pass a batch through all stages, without gradients; all ranks get the output."""
        place, last = timetable.place, timetable.stages - 1
        shapes = self._output_shapes(timetable, inputs)
        value: Any = inputs
        for stage in range(timetable.stages):
            if place[stage] == self.group.rank:
                value = self.stages[stage](value)
                if stage < last and (target := place[stage + 1]) != self.group.rank:
                    self.group.send(value.contiguous(), target)
            elif stage < last and place[stage + 1] == self.group.rank:
                dtype, shape = shapes[stage]
                value = torch.empty(shape, dtype=dtype, device=self.device)
                self.group.recv(value, place[stage])
        if self.group.size > 1:
            dtype, shape = shapes[last]
            if place[last] != self.group.rank:
                value = torch.empty(shape, dtype=dtype, device=self.device)
            value = value.contiguous()
            self.group.broadcast(value, place[last])
        return value  # type: ignore[no-any-return]

    def moved(self, timetable: Timetable, micros: Sequence[Micro]) -> Tally:
        """What this rank sends and receives in a batch, computed from its timetable."""
        me, tally = self.group.rank, Tally()
        shapes = [self._output_shapes(timetable, micro.inputs) for micro in micros]
        for other in range(self.group.size):
            out, into = timetable.sends(me, other), timetable.sends(other, me)
            tally.messages += len(out)
            tally.sent_bytes += sum(_size_bytes(shapes, task) for task in out)
            tally.received_bytes += sum(_size_bytes(shapes, task) for task in into)
        return tally

    def _output_shapes(self, timetable: Timetable, inputs: Any) -> dict[int, Shape]:
        """The shape of each stage's output. All ranks see the same inputs, so all agree."""
        key = (_signature(inputs), torch.is_autocast_enabled(self.device.type), timetable.place)
        found = self._shapes.get(key)
        if found is None:
            found = self._shapes[key] = self._exchanged(timetable, inputs)
        return found

    def _exchanged(self, timetable: Timetable, inputs: Any) -> dict[int, Shape]:
        """Each stage computes its output once and tells the others its shape."""
        shapes: dict[int, Shape] = {}
        value: Any = inputs
        modes = [(m, m.training) for s in self.stages.values() for m in s.modules()]
        try:
            for module, _ in modes:
                module.training = False  # batch statistics stay as they are
            with torch.no_grad():
                for stage in range(timetable.stages):
                    shapes[stage] = self._one_shape(timetable.place[stage], stage, value)
                    dtype, shape = shapes[stage]
                    value = torch.zeros(shape, dtype=dtype, device=self.device)
        finally:
            for module, mode in modes:
                module.training = mode
        return shapes

    def _one_shape(self, owner: int, stage: int, value: Any) -> Shape:
        head = torch.zeros(16, dtype=torch.int64)
        if owner == self.group.rank:
            output = _single(self.stages[stage](value), stage)
            numbers = [output.dim(), DTYPES.index(output.dtype), *output.shape]
            head[: len(numbers)] = torch.tensor(numbers)
        if self.group.size > 1:
            self.group.uncounted().control.broadcast(head, owner)
        dims = int(head[0])
        return DTYPES[int(head[1])], tuple(int(n) for n in head[2 : 2 + dims])


class _Line:
    """The messages of one batch: what each pair of ranks sends, in the order of sending."""

    def __init__(
        self,
        group: Transport,
        timetable: Timetable,
        shapes: Sequence[dict[int, Shape]],
        device: torch.device,
    ) -> None:
        self.group, self.timetable, self.shapes, self.device = group, timetable, shapes, device
        me = group.rank
        self._coming = {source: deque(timetable.sends(source, me)) for source in range(group.size)}
        self._posted: dict[Task, tuple[Work, Tensor]] = {}
        self._open = dict.fromkeys(self._coming, 0)  # receives that are posted and not taken
        self._sent: list[tuple[Work, Tensor]] = []
        self._here: dict[Task, Tensor] = {}  # between two stages of this rank
        for source in self._coming:
            self._post(source)

    def take(self, task: Task) -> Any:
        """What a task needs of another stage; None: nothing."""
        message = self.timetable.message(task)
        if message is None:
            return None
        source = self.timetable.place[message.stage]
        if source == self.group.rank:
            return self._here.pop(message)
        while message not in self._posted:  # messages that are needed later come first
            self._post(source, more=True)
        work, tensor = self._posted.pop(message)
        work.wait()
        self._open[source] -= 1
        self._post(source)
        return tensor

    def give(self, task: Task, result: Tensor) -> None:
        """Send what a task made to the stage that needs it."""
        after = self.timetable.after(task)
        assert after is not None
        target = self.timetable.place[after.stage]
        if target == self.group.rank:
            self._here[task] = result
            return
        result = result.contiguous()
        self._sent.append((self.group.isend(result, target), result))

    def finish(self) -> None:
        for work, _ in self._sent:
            work.wait()

    def _post(self, source: int, more: bool = False) -> None:
        coming = self._coming[source]
        while coming and (more or self._open[source] < AHEAD):
            more = False
            task = coming.popleft()
            dtype, shape = _result(self.shapes, task)
            tensor = torch.empty(shape, dtype=dtype, device=self.device)
            self._posted[task] = (self.group.irecv(tensor, source), tensor)
            self._open[source] += 1


def _result(shapes: Sequence[dict[int, Shape]], task: Task) -> Shape:
    """Of what a task gives to another stage: its output, or the gradient of its input."""
    return shapes[task.micro][task.stage if task.kind == "F" else task.stage - 1]


def _size_bytes(shapes: Sequence[dict[int, Shape]], task: Task) -> int:
    dtype, shape = _result(shapes, task)
    return dtype.itemsize * math.prod(shape)


def _single(output: Any, stage: int) -> Tensor:
    if not isinstance(output, Tensor):
        raise BadRequest(
            f"stage {stage} gives a {type(output).__name__}: only single tensors go from stage to"
            " stage; cut the model elsewhere"
        )
    return output


def _signature(inputs: Any) -> Any:
    """The shapes of inputs, which decide the shapes of all outputs."""
    if isinstance(inputs, Tensor):
        return (str(inputs.dtype), tuple(inputs.shape))
    if isinstance(inputs, (list, tuple)):
        return tuple(_signature(v) for v in inputs)
    if isinstance(inputs, dict):
        return tuple((k, _signature(v)) for k, v in sorted(inputs.items()))
    return type(inputs).__name__
