"""A transport around another transport: it forwards all calls, and subclasses override some."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from paceline.transport.base import Message, Op, Transport, Work


class Wrapper(Transport):
    """Subclasses say in `around` how another transport of the same rank is wrapped."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner.rank, inner.size, inner.deadline_s, inner.generation, inner.patience)
        self.inner, self.traits, self.store = inner, inner.traits, inner.store

    def around(self, other: Transport) -> Transport:
        raise NotImplementedError

    @property
    def kind(self) -> str:
        return self.inner.kind

    @property
    def present(self) -> tuple[int, ...]:
        return self.inner.present

    @property
    def control(self) -> Transport:
        found = self.inner.control
        return self if found is self.inner else self.around(found)

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

    def sending(self, tensor: Tensor, to: int) -> Message:
        return self.inner.sending(tensor, to)

    def receiving(self, tensor: Tensor, source: int) -> Message:
        return self.inner.receiving(tensor, source)

    def wait_any(self, works: Sequence[Work], patience_s: float | None = None) -> int | None:
        return self.inner.wait_any(works, patience_s)

    def barrier(self) -> None:
        self.inner.barrier()

    def group(self, ranks: Sequence[int]) -> Transport:
        return self.around(self.inner.group(ranks))

    def side(self, label: str) -> Transport:
        return self.around(self.inner.side(label))

    def twin(self) -> Transport:
        return self.around(self.inner.twin())

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

    @property
    def now(self) -> Callable[[], float]:
        return self.inner.now

    def charge(self, seconds: float) -> None:
        self.inner.charge(seconds)

    def added(self, size_bytes: int) -> None:
        self.inner.added(size_bytes)

    def adds(self, dtype: torch.dtype) -> bool:
        return self.inner.adds(dtype)

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.inner.allocate(numel, dtype, device)

    def close(self) -> None:
        self.inner.close()
