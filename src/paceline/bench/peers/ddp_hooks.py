"""PyTorch's own ways of sending less (DDP communication hooks), called as DDP calls them, on one
rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook


class Bucket:
    """What DDP hands to a hook: one flat buffer, and the gradients in it."""

    def __init__(self, buffer: Tensor, shapes: list[tuple[int, ...]]) -> None:
        self._buffer, self._shapes = buffer, shapes

    def buffer(self) -> Tensor:
        return self._buffer

    def gradients(self) -> list[Tensor]:
        lengths = [torch.Size(s).numel() for s in self._shapes]
        return [
            piece.view(shape)
            for piece, shape in zip(self._buffer.split(lengths), self._shapes, strict=True)
        ]

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


# Process groups are never freed. A hook's callbacks hold a group too, in gloo's own threads. If
# such a thread frees it last, the thread waits for its own end, and PyTorch 2.13 ends the process
# ("Resource deadlock avoided").
_groups: list[Any] = []


class Hooks:
    """Holds a process group of one rank, and the two hooks that Paceline has a codec for."""

    def __init__(self) -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        _groups.append(dist.group.WORLD)
        self._state: Any = powerSGD_hook.PowerSGDState(
            None,
            matrix_approximation_rank=2,
            start_powerSGD_iter=2,
            use_error_feedback=False,
            warm_start=True,
        )

    def fp16(self, bucket: Bucket) -> None:
        default_hooks.fp16_compress_hook(None, bucket).wait()  # type: ignore[arg-type]

    def powersgd(self, bucket: Bucket) -> None:
        powerSGD_hook.powerSGD_hook(self._state, bucket).wait()  # type: ignore[arg-type]

    def close(self) -> None:
        dist.destroy_process_group()
