"""PyTorch's own pipelines (torch.distributed.pipelining) on our stages, as a yardstick."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import BadRequest
from paceline.parallel.execute import Micro
from paceline.parallel.stage import Stage
from paceline.parallel.timetable import Timetable
from paceline.transport.base import Transport

SCHEDULES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
}


class TorchEngine:
    """Runs batches by PyTorch's schedules, over a process group of its own."""

    def __init__(
        self,
        group: Transport,
        stages: dict[int, Stage],
        count: int,
        device: torch.device,
        enter: Callable[[int], None],
    ) -> None:
        import torch.distributed as dist
        from torch.distributed.pipelining import PipelineStage

        engine = self

        class Told(PipelineStage):
            """Tells which micro-batch it computes."""

            def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
                enter(engine._firsts[fwd_chunk_id])
                return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

        if group.store is None:
            raise BadRequest(
                f"engine=torch requires a torch.distributed store, which transport {group.kind}"
                " does not have: use --transport gloo"
            )
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore("pipeline", group.store),
            rank=group.rank,
            world_size=group.size,
            timeout=timedelta(hours=1),
        )
        self.group, self._count = group, count
        self._own = frozenset(stages)
        self._firsts: tuple[int, ...] = ()
        self._make = lambda: [Told(s, number, count, device) for number, s in stages.items()]
        self._kept: dict[Any, Any] = {}
        self._loss: Callable[[Tensor, Any], Tensor] = nn.functional.cross_entropy

    def fits(self, micros: Sequence[Micro]) -> bool:
        """PyTorch's schedules want micro-batches of one size."""
        return len({micro.rows for micro in micros}) == 1

    def run(
        self,
        timetable: Timetable,
        inputs: Any,
        targets: Any,
        micros: Sequence[Micro],
        loss: Callable[[Tensor, Any], Tensor],
    ) -> float:
        """Make all passes of a batch. Returns the mean loss, on the last stage's rank."""
        from torch.distributed.pipelining import schedules

        key = (timetable.name, len(micros), micros[0].rows)
        if key not in self._kept:
            stages = self._make()
            kind = getattr(schedules, SCHEDULES[timetable.name])
            given = stages if timetable.name == "interleaved" else stages[0]
            self._kept[key] = kind(given, len(micros), loss_fn=self._current_loss)
        self._loss = loss
        self._firsts = tuple(micro.first for micro in micros)
        losses: list[Tensor] = []
        first, last = 0 in self._own, self._count - 1 in self._own
        args = (inputs,) if first else ()
        kwargs = {"target": targets, "losses": losses} if last else {}
        self._kept[key].step(*args, **kwargs, return_outputs=False)
        return float(torch.stack(losses).detach().mean()) if losses else 0.0

    def _current_loss(self, outputs: Tensor, targets: Any) -> Tensor:
        return self._loss(outputs, targets)
