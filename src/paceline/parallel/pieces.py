"""Which piece of each tensor of a model a rank holds, and how the pieces come together again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.transport.base import Transport


@dataclass(frozen=True)
class Piece:
    """Spans of one dimension of a tensor, one after the other; all of it by default.

    Several spans: the weights of queries, keys and values lie one after the other, and a rank has
    some of each.
    """

    dim: int = 0
    spans: tuple[tuple[int, int], ...] | None = None

    @property
    def whole(self) -> bool:
        return self.spans is None

    def of(self, tensor: Tensor) -> Tensor:
        """This piece of a whole tensor."""
        if self.spans is None:
            return tensor
        parts = [tensor.narrow(self.dim, low, high - low) for low, high in self.spans]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)

    def put(self, piece: Tensor, whole: Tensor) -> None:
        """Write this piece into the whole tensor."""
        if self.spans is None:
            whole.copy_(piece)
            return
        at = 0
        for low, high in self.spans:
            source = piece.narrow(self.dim, at, high - low)
            whole.narrow(self.dim, low, high - low).copy_(source)
            at += high - low


Pieces = Mapping[str, Piece]


def owned(pieces: Pieces, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of whole tensors, the pieces that a rank holds."""
    return {name: pieces[name].of(t).contiguous() for name, t in state.items() if name in pieces}


def gathered(
    group: Transport, pieces: Pieces, state: Mapping[str, Tensor]
) -> dict[str, Tensor] | None:
    """The whole tensors on rank 0, of the pieces that all ranks give; None on the other ranks.

    `pieces`: what this rank gives; a piece that several ranks hold is given by one of them. Each
    rank sends a list of its tensors, then their content.
    """
    control = group.control
    if group.rank:
        tensors = {name: state[name].detach().to("cpu").contiguous() for name in pieces}
        told = json.dumps(
            [
                [name, _code(t.dtype), list(t.shape), pieces[name].dim, pieces[name].spans]
                for name, t in tensors.items()
            ]
        ).encode()
        control.send(torch.tensor([len(told)]), 0)
        control.send(torch.frombuffer(bytearray(told), dtype=torch.uint8), 0)
        for tensor in tensors.values():
            if tensor.numel():
                control.send(tensor.reshape(-1).view(torch.uint8), 0)
        return None
    found: dict[str, list[tuple[Piece, Tensor]]] = {
        name: [(piece, state[name])] for name, piece in pieces.items()
    }
    for source in range(1, group.size):
        length = torch.zeros(1, dtype=torch.int64)
        control.recv(length, source)
        heard = torch.empty(int(length), dtype=torch.uint8)
        control.recv(heard, source)
        for name, code, shape, dim, spans in json.loads(bytes(heard.tolist())):
            tensor = torch.empty(shape, dtype=DTYPES[code])
            if tensor.numel():
                control.recv(tensor.reshape(-1).view(torch.uint8), source)
            cut = None if spans is None else tuple((low, high) for low, high in spans)
            found.setdefault(name, []).append((Piece(dim, cut), tensor))
    return {name: _joined(parts) for name, parts in found.items()}


def _joined(found: Sequence[tuple[Piece, Tensor]]) -> Tensor:
    piece, first = found[0]
    if piece.whole:
        return first
    length = max(high for p, _ in found for _, high in p.spans or ())
    shape = list(first.shape)
    shape[piece.dim] = length
    whole = first.new_zeros(shape)
    for p, tensor in found:
        p.put(tensor.to(whole.device), whole)
    return whole


DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)


def _code(dtype: torch.dtype) -> int:
    return DTYPES.index(dtype)
