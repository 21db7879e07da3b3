"""PowerSGD (Vogels et al., 2019): each matrix is sent as the product of two thin ones, found by one
step of power iteration.

    P <- sum_p M_p Q ;  orthonormal columns ;  Q_p <- M_p^T P ;  Q <- sum_p Q_p ;  sum_p M_p ~ P Q^T

Both products are linear in M, so any all-reduce sums them. The next step begins with this step's Q.
A convolution is a matrix of (output channels) x (all other dimensions). Vectors, and matrices that
would not get smaller, are sent uncompressed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from paceline.codecs.base import Codec, State, aligned, numbers_at, refuse_nonfinite
from paceline.collectives.base import Collective
from paceline.collectives.moves import Sum
from paceline.errors import BadRequest
from paceline.registry import codecs
from paceline.types import Layout, Slot


class Matrix(NamedTuple):
    """A tensor viewed as a matrix, in memory order."""

    slot: Slot
    rows: int
    columns: int

    def of(self, flat: Tensor) -> Tensor:
        return self.slot.span(flat).view(self.rows, self.columns)


@codecs.register("powersgd")
@dataclass
class PowerSGD(Codec):
    """Matrices as products of two thin matrices."""

    rank: Annotated[int, "columns of the thin matrices"] = 2
    feedback: Annotated[bool, "error feedback: add what is left out to the next message"] = True

    kind = "linear"
    biased = True

    def check(self) -> None:
        if self.rank < 1:
            raise BadRequest(f"powersgd: rank={self.rank}: it must be 1 or more")
        self._splits: dict[int, tuple[list[Matrix], list[Slot], Layout]] = {}

    def start(
        self, layout: Layout, random: torch.Generator, shared_random: torch.Generator
    ) -> State:
        matrices, _ = self._split(layout)
        drawn = torch.randn(sum(m.columns for m in matrices) * self.rank, generator=shared_random)
        return {"q": drawn}

    def message_bytes(self, layout: Layout) -> int:
        matrices, others = self._split(layout)
        return aligned(
            4
            * (self.rank * sum(m.rows + m.columns for m in matrices) + sum(s.numel for s in others))
        )

    def encode(self, values: Tensor, layout: Layout, message: Tensor, state: State) -> int:
        p, q, rest = self._views(layout, message)
        self._multiply(values, layout, self._q(state, values), p)
        self._orthonormal(layout, p)
        self._transposed(values, layout, p, q)
        self._copy_rest(values, layout, rest)
        refuse_nonfinite(torch.stack([q.sum(), rest.sum()]), self.name)
        state["q"] = q.clone()
        return message.numel()

    def decode(self, message: Tensor, layout: Layout, values: Tensor) -> None:
        p, q, rest = self._views(layout, message)
        self._product(layout, p, q, values)
        self._put_rest(rest, layout, values)

    def sums(self, layout: Layout, schedule: str, workers: int) -> tuple[Sum, ...]:
        matrices, others = self._split(layout)
        first = self.rank * sum(m.rows for m in matrices) + sum(s.numel for s in others)
        second = self.rank * sum(m.columns for m in matrices)
        return tuple(Sum(schedule, numbers, 4) for numbers in (first, second) if numbers)

    def reduce(
        self,
        buffer: Tensor,
        layout: Layout,
        collective: Collective,
        state: State,
        sent: Tensor | None = None,
    ) -> None:
        matrices, others = self._split(layout)
        ends = (self.rank * sum(m.rows for m in matrices), sum(s.numel for s in others))
        transport = collective.transport
        first = self.scratch("p and rest", sum(ends), buffer.dtype, buffer.device, transport)
        p, rest = first[: ends[0]], first[ends[0] :]
        q = self._q(state, buffer)
        with self.timer.encoding():
            self._multiply(buffer, layout, q, p)
            self._copy_rest(buffer, layout, rest)
            if sent is not None:
                self._put_rest(rest, layout, sent)
        collective.all_reduce(first)
        with self.timer.encoding():
            refuse_nonfinite(first.sum(), self.name)
            self._orthonormal(layout, p)
            self._transposed(buffer, layout, p, q)
            if sent is not None:
                self._product(layout, p, q, sent)
        if q.numel():
            summed = self.scratch("q", q.numel(), q.dtype, q.device, transport)
            collective.all_reduce(summed.copy_(q))
            q.copy_(summed)
        with self.timer.decoding():
            self._product(layout, p, q, buffer)
            self._put_rest(rest, layout, buffer)

    # --- steps of the algorithm

    def _split(self, layout: Layout) -> tuple[list[Matrix], list[Slot]]:
        """The tensors that get smaller as matrices, and the others."""
        if id(layout) not in self._splits:
            matrices, others = [], []
            for slot in layout.slots:
                matrix = _as_matrix(slot)
                if matrix is not None and self.rank * (matrix.rows + matrix.columns) < slot.numel:
                    matrices.append(matrix)
                else:
                    others.append(slot)
            # Keep the layout too, so that no other object can get its id.
            self._splits[id(layout)] = (matrices, others, layout)
        return self._splits[id(layout)][:2]

    def fits(self, layout: Layout) -> None:
        found = [m for m in map(_as_matrix, layout.slots) if m is not None]
        if found and all(self.rank > min(m.rows, m.columns) for m in found):
            largest = max(found, key=lambda m: min(m.rows, m.columns))
            raise BadRequest(
                f"powersgd: rank={self.rank} is larger than every matrix of this model; the"
                f" largest, {largest.slot.name}, is {largest.rows} x {largest.columns}: use rank 1"
                " to 8"
            )

    def _q(self, state: State, values: Tensor) -> Tensor:
        if state["q"].dtype != values.dtype or state["q"].device != values.device:
            state["q"] = state["q"].to(values.device, values.dtype)
        q: Tensor = state["q"]
        return q

    def _views(self, layout: Layout, message: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        matrices, others = self._split(layout)
        p, at = numbers_at(message, 0, self.rank * sum(m.rows for m in matrices), torch.float32)
        q, at = numbers_at(message, at, self.rank * sum(m.columns for m in matrices), torch.float32)
        rest, _ = numbers_at(message, at, sum(s.numel for s in others), torch.float32)
        return p, q, rest

    def _each(self, layout: Layout, flat: Tensor, side: str) -> list[tuple[Matrix, Tensor]]:
        """Each matrix with its span of a flat P or Q, transposed.

        Products with long rows are four times as fast.
        """
        matrices, _ = self._split(layout)
        lengths = [(m.rows if side == "p" else m.columns) * self.rank for m in matrices]
        return [
            (m, thin.view(self.rank, -1))
            for m, thin in zip(matrices, flat.split(lengths), strict=True)
        ]

    def _multiply(self, values: Tensor, layout: Layout, q: Tensor, p: Tensor) -> None:
        for (matrix, right), (_, left) in zip(
            self._each(layout, q, "q"), self._each(layout, p, "p"), strict=True
        ):
            left.copy_(right @ matrix.of(values).to(right.dtype).t())

    def _transposed(self, values: Tensor, layout: Layout, p: Tensor, q: Tensor) -> None:
        for (matrix, left), (_, right) in zip(
            self._each(layout, p, "p"), self._each(layout, q, "q"), strict=True
        ):
            right.copy_(left @ matrix.of(values).to(left.dtype))

    def _product(self, layout: Layout, p: Tensor, q: Tensor, values: Tensor) -> None:
        for (matrix, left), (_, right) in zip(
            self._each(layout, p, "p"), self._each(layout, q, "q"), strict=True
        ):
            if values.dtype == left.dtype:
                torch.mm(left.t(), right, out=matrix.of(values))
            else:
                matrix.of(values).copy_(left.t() @ right)

    def _orthonormal(self, layout: Layout, p: Tensor) -> None:
        for _, left in self._each(layout, p, "p"):
            exact = torch.promote_types(left.dtype, torch.float32)  # QR has no 16-bit version
            left.copy_(torch.linalg.qr(left.t().to(exact)).Q.t())

    def _copy_rest(self, values: Tensor, layout: Layout, rest: Tensor) -> None:
        at = 0
        for slot in self._split(layout)[1]:
            rest[at : at + slot.numel].copy_(slot.span(values))
            at += slot.numel

    def _put_rest(self, rest: Tensor, layout: Layout, values: Tensor) -> None:
        at = 0
        for slot in self._split(layout)[1]:
            slot.span(values).copy_(rest[at : at + slot.numel])
            at += slot.numel


def _as_matrix(slot: Slot) -> Matrix | None:
    """The slot as a matrix; None for vectors and empty tensors.

    Rows run over the dimension with the largest stride, which is the first in all usual formats.
    """
    if len(slot.shape) < 2 or not slot.numel:
        return None
    outer = max(range(len(slot.shape)), key=lambda d: (slot.shape[d] > 1, slot.stride[d]))
    return Matrix(slot, slot.shape[outer], slot.numel // slot.shape[outer])
