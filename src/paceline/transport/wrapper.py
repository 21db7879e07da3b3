"""A transport around another transport: it forwards all calls, and subclasses override some."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from paceline.transport.base import Op, Transport, Work


class Wrapper(Transport):
    def __init__(self, inner: Transport) -> None:
        super().__init__(inner.rank, inner.size, inner.deadline_s, inner.generation, inner.patience)
        self.inner = inner
        self.native, self.devices, self.runs_as = inner.native, inner.devices, inner.runs_as  # type: ignore[misc]
        self.store = inner.store

    @property
    def kind(self) -> str:
        return self.inner.kind

    @property
    def tolerant(self) -> bool:
        return self.inner.tolerant

    @tolerant.setter
    def tolerant(self, value: bool) -> None:
        self.inner.tolerant = value

    def isend(self, tensor: Tensor, to: int, tag: int = 0) -> Work:
        return self.inner.isend(tensor, to, tag)

    def irecv(self, tensor: Tensor, source: int, tag: int = 0) -> Work:
        return self.inner.irecv(tensor, source, tag)

    def wait_any(self, works: Sequence[Work], patience_s: float | None = None) -> int | None:
        return self.inner.wait_any(works, patience_s)

    def barrier(self) -> None:
        self.inner.barrier()

    def all_reduce(self, tensor: Tensor, op: Op = "sum") -> None:
        self.inner.all_reduce(tensor, op)

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        self.inner.broadcast(tensor, root)

    def all_reduce_bytes(self, length: int, itemsize: int) -> tuple[int, int, int]:
        return self.inner.all_reduce_bytes(length, itemsize)

    def c10d(self) -> str:
        return self.inner.c10d()

    def together(self) -> AbstractContextManager[Any]:
        return self.inner.together()

    def share(self, tensor: Tensor, root: int = 0) -> Tensor:
        return self.inner.share(tensor, root)

    def pause(self) -> None:
        self.inner.pause()

    def assemble(self, ranks: Sequence[int], survivors_suffice: bool = False) -> tuple[int, ...]:
        return self.inner.assemble(ranks, survivors_suffice)

    def agree(self, what: str) -> None:
        self.inner.agree(what)

    def adds(self, dtype: torch.dtype) -> bool:
        return self.inner.adds(dtype)

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.inner.allocate(numel, dtype, device)

    def close(self) -> None:
        self.inner.close()
