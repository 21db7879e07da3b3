"""Save and load a model that is split without holding all of it: each rank has its own pieces.

The file is one of the whole model, which any form and any other program can read. Ranks that see
the same folder write their pieces themselves. Where a rank does not see it, all send theirs to rank
0, which holds one tensor at a time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.parallel.base import Part
from paceline.parallel.pieces import DTYPES, Piece
from paceline.record.sliced import NAMES, Layout, Slices
from paceline.transport.base import Transport


def can_be_sliced(part: Part, *states: Mapping[str, Tensor]) -> bool:
    """Whether the tensors of all ranks have types that a file can be laid out with beforehand.

    All ranks of the group call it.
    """
    wrong = sum(tensor.dtype not in NAMES for state in states for tensor in state.values())
    if part.group is None or part.size == 1:
        return not wrong
    counted = torch.tensor([wrong])
    part.group.control.all_reduce(counted)
    return not int(counted)


def save_pieces(part: Part, state: Mapping[str, Tensor], path: Path) -> None:
    """Write the whole model's tensors to a file. All ranks of the group call it.

    Names may have more after a slash ("fc.weight/exp_avg").
    """
    pieces = part.pieces()
    own = {
        name: (pieces[base], tensor)
        for name, tensor in state.items()
        if (base := name.partition("/")[0]) in pieces and part.gives(base)
    }
    group = part.group
    told = [_told(name, piece, tensor) for name, (piece, tensor) in own.items()]
    if group is None or part.size == 1:
        layout = _layout([told])
        layout.create(path)
        _write(layout, path, own)
        return
    control = group.control
    if group.rank:
        _send(control, told, 0)
        layout = Layout(_receive(control, 0))
    else:
        others = [json.loads(_receive(control, source)) for source in range(1, group.size)]
        layout = _layout([told, *others])
        layout.create(path)
        for target in range(1, group.size):
            _send_bytes(control, layout.header, target)
    sees = torch.tensor([int(layout.is_at(path))])
    control.all_reduce(sees)
    if int(sees) == group.size:
        _write(layout, path, own)
    elif group.rank:
        for _, tensor in own.values():
            if tensor.numel():
                control.send(_bytes_of(tensor), 0)
    else:
        _write(layout, path, own)
        for source, theirs in enumerate(others, 1):
            for name, code, shape, dim, spans in theirs:
                tensor = torch.empty(shape, dtype=DTYPES[code])
                if tensor.numel():
                    control.recv(tensor.reshape(-1).view(torch.uint8), source)
                _write(layout, path, {name: (_piece(dim, spans), tensor)})
    group.control.barrier()


def load_pieces(part: Part, path: Path) -> dict[str, Tensor]:
    """Of a file of the whole model's tensors, the pieces that this part holds."""
    slices = Slices(path)
    return {
        name: read_piece(slices, name, piece)
        for name, piece in part.pieces().items()
        if name in slices.names
    }


def read_piece(slices: Slices, name: str, piece: Piece) -> Tensor:
    if piece.spans is None:
        return slices.whole(name)
    parts = [slices.rows(name, piece.dim, low, high) for low, high in piece.spans]
    return (parts[0] if len(parts) == 1 else torch.cat(parts, piece.dim)).contiguous()


def _told(name: str, piece: Piece, tensor: Tensor) -> list[Any]:
    return [name, DTYPES.index(tensor.dtype), list(tensor.shape), piece.dim, piece.spans]


def _piece(dim: int, spans: Any) -> Piece:
    return Piece(dim, None if spans is None else tuple((low, high) for low, high in spans))


def _layout(told: list[list[list[Any]]]) -> Layout:
    """Lay out the whole tensors, of the pieces that all ranks have told."""
    whole: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for theirs in told:
        for name, code, shape, dim, spans in theirs:
            size = list(shape)
            if spans is not None:
                most = max((high for _, high in spans), default=0)
                before = whole[name][1][dim] if name in whole else 0
                size[dim] = max(most, before)
            whole[name] = DTYPES[code], tuple(size)
    return Layout.of(whole)


def _write(layout: Layout, path: Path, own: Mapping[str, tuple[Piece, Tensor]]) -> None:
    layout.write(path, ((n, piece.dim, piece.spans, tensor) for n, (piece, tensor) in own.items()))


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)


def _send(control: Transport, told: list[Any], target: int) -> None:
    _send_bytes(control, json.dumps(told).encode(), target)


def _send_bytes(control: Transport, content: bytes, target: int) -> None:
    control.send(torch.tensor([len(content)]), target)
    if content:
        control.send(torch.frombuffer(bytearray(content), dtype=torch.uint8), target)


def _receive(control: Transport, source: int) -> bytes:
    length = torch.zeros(1, dtype=torch.int64)
    control.recv(length, source)
    heard = torch.empty(int(length), dtype=torch.uint8)
    if int(length):
        control.recv(heard, source)
    return heard.numpy().tobytes()
