"""Exchanges inside a model: linear maps between ranks, each with its adjoint as backward pass.

copied     each rank goes on with its copy of an equal tensor      backward: summed
summed     each rank gets the sum of all ranks' tensors            backward: copied
stacked    each rank gets all ranks' tensors, one after the other  backward: the own one
over_all   a sum that every rank uses for its own samples or rows  backward: the same sum
moved      rows of images go where they are needed                 backward: they go back, added
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paceline.collectives.base import Collective, usual
from paceline.parallel.rows import Halo, Span, transposed
from paceline.transport.base import Transport


class Exchange:
    """The exchanges of one rank with its group."""

    def __init__(self, group: Transport) -> None:
        self.group = group
        self._collective: Collective | None = None

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, in new memory."""
        total = tensor.detach().clone(memory_format=torch.contiguous_format)
        if self.group.size > 1:
            self._collective = self._collective or usual(self.group)
            self._collective.all_reduce(total)
        return total

    def copied(self, x: Tensor) -> Tensor:
        return _Copied.apply(x, self) if self.group.size > 1 else x

    def summed(self, x: Tensor) -> Tensor:
        return _Summed.apply(x, self) if self.group.size > 1 else x

    def over_all(self, x: Tensor) -> Tensor:
        return _OverAll.apply(x, self) if self.group.size > 1 else x

    def stacked(self, x: Tensor, dim: int, spans: tuple[Span, ...]) -> Tensor:
        """All ranks' tensors along a dimension; `spans`: which part each rank has."""
        if self.group.size == 1:
            return x
        return _Stacked.apply(x, self, dim, spans)  # type: ignore[no-any-return]

    def moved(self, x: Tensor, movement: Halo) -> Tensor:
        """The rows (dimension 2) that this rank holds after a movement."""
        if self.group.size == 1:
            return x
        return _Moved.apply(x, self, movement)  # type: ignore[no-any-return]

    def move(self, x: Tensor, movement: Halo) -> Tensor:
        """Carry a movement out, without gradients."""
        me, group = self.group.rank, self.group
        start, (low, high) = movement.owned[me][0], movement.held[me]
        x = x.detach()
        made = x.new_zeros(*x.shape[:2], high - low, *x.shape[3:])
        coming, going = [], []
        for t in movement.transfers:
            if t.source == t.target:
                continue
            if t.target == me:
                place = x.new_empty(*x.shape[:2], t.high - t.low, *x.shape[3:])
                coming.append((group.irecv(place, t.source), place, t))
            if t.source == me:
                rows = x[:, :, t.low - start : t.high - start].contiguous()
                going.append((group.isend(rows, t.target), rows))
        for t in movement.transfers:
            if t.source == t.target == me:
                rows = x[:, :, t.low - start : t.high - start]
                self._put(made, rows, t.low - low, movement.adds)
        for work, place, t in coming:
            work.wait()
            self._put(made, place, t.low - low, movement.adds)
        for work, _ in going:
            work.wait()
        return made

    @staticmethod
    def _put(made: Tensor, rows: Tensor, at: int, adds: bool) -> None:
        target = made[:, :, at : at + rows.shape[2]]
        target.add_(rows) if adds else target.copy_(rows)

    def stack(self, x: Tensor, dim: int, spans: tuple[Span, ...]) -> Tensor:
        """All ranks' tensors along a dimension, without gradients."""
        me, group = self.group.rank, self.group
        own = x.detach().contiguous()
        shape = list(own.shape)
        parts: list[Tensor] = []
        for rank, (low, high) in enumerate(spans):
            shape[dim] = high - low
            parts.append(own if rank == me else own.new_empty(shape))
        others = [r for r in range(group.size) if r != me]
        coming = [group.irecv(parts[r], r) for r in others if parts[r].numel()]
        going = [group.isend(own, r) for r in others if own.numel()]
        for work in (*coming, *going):
            work.wait()
        return torch.cat(parts, dim)


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.exchange.all_reduce(gradient), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange) -> Tensor:
        return exchange.all_reduce(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class _OverAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.all_reduce(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.exchange.all_reduce(gradient), None


class _Stacked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, exchange: Exchange, dim: int, spans: tuple[Span, ...]
    ) -> Tensor:
        ctx.dim, (ctx.low, ctx.high) = dim, spans[exchange.group.rank]
        return exchange.stack(x, dim, spans)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient.narrow(ctx.dim, ctx.low, ctx.high - ctx.low), None, None, None


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange, movement: Halo) -> Tensor:
        ctx.exchange, ctx.movement = exchange, movement
        return exchange.move(x, movement)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.exchange.move(gradient, transposed(ctx.movement)), None, None
