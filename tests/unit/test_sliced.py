"""Files that several ranks fill with their pieces: the whole tensors, in the usual format."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from paceline.errors import DataCorrupt
from paceline.parallel.base import Part
from paceline.parallel.pieces import Piece
from paceline.parallel.saving import can_be_sliced, load_pieces, save_pieces
from paceline.record.sliced import NAMES, Layout, Slices
from paceline.transport.inproc import Hub

WHOLE = {
    "a.weight": torch.randn(6, 5),
    "a.bias": torch.randn(6).half(),
    "b.weight": torch.randn(3, 8, 2, dtype=torch.float64),
    "steps": torch.tensor(7),
    "none": torch.zeros(0, 4),
    "flags": torch.tensor([True, False, True]),
}


class Held(Part):
    """A part that holds these pieces."""

    def __init__(self, group: Any, pieces: dict[str, Piece]) -> None:
        super().__init__(nn.Module(), group)
        self._pieces = pieces

    def pieces(self) -> dict[str, Piece]:
        return self._pieces


SPLIT: list[dict[str, Piece]] = [
    {
        "a.weight": Piece(0, ((0, 2),)),
        "b.weight": Piece(1, ((0, 2), (6, 8))),
        "steps": Piece(),
        "none": Piece(),
    },
    {"a.weight": Piece(0, ((2, 6),)), "b.weight": Piece(1, ((2, 6),)), "a.bias": Piece()},
    {"flags": Piece()},
]


@pytest.mark.parametrize("shared", [True, False])
def test_ranks_write_and_read_their_pieces_of_one_file(
    tmp_path: Path, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.safetensors"
    if not shared:  # as on hosts that have no folder in common
        monkeypatch.setattr(Layout, "is_at", lambda self, path: False)

    def body(transport: Any) -> dict[str, Tensor]:
        part = Held(transport, SPLIT[transport.rank])
        state = {name: piece.of(WHOLE[name]).clone() for name, piece in part.pieces().items()}
        assert can_be_sliced(part, state)
        save_pieces(part, state, path)
        return load_pieces(part, path)

    read = Hub(3).run(body)
    for result in read:
        assert not isinstance(result, BaseException), result
    found = load_file(path)  # the library reads it
    assert found.keys() == WHOLE.keys()
    for name, tensor in WHOLE.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
    for pieces, own in zip(SPLIT, read, strict=True):
        assert own.keys() == pieces.keys()
        for name, piece in pieces.items():
            assert torch.equal(own[name], piece.of(WHOLE[name])), name


def test_a_type_that_has_no_place_is_found_by_all_ranks() -> None:
    def body(transport: Any) -> bool:
        wide = torch.zeros(2, dtype=torch.complex128 if transport.rank else torch.float32)
        return can_be_sliced(Held(transport, {}), {"w": wide})

    assert Hub(2).run(body) == [False, False]


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=8),
        st.tuples(st.sampled_from(list(NAMES)), st.lists(st.integers(0, 4), max_size=3)),
        max_size=6,
    )
)
def test_a_layout_is_aligned_without_gaps_and_overlaps(
    tensors: dict[str, tuple[torch.dtype, list[int]]],
) -> None:
    layout = Layout.of({name: (dtype, tuple(shape)) for name, (dtype, shape) in tensors.items()})
    assert len(layout.header) % 8 == 0
    ends = 0
    for name, place in layout.places().items():
        low, high = place["data_offsets"]
        dtype, shape = tensors[name]
        assert low == ends
        assert low % dtype.itemsize == 0
        assert high - low == dtype.itemsize * math.prod(shape)
        ends = high
    assert layout.size_bytes == len(layout.header) + ends


def test_a_file_of_another_program_is_read_piece_by_piece(tmp_path: Path) -> None:
    path = tmp_path / "theirs.safetensors"
    save_file(WHOLE, path)
    own = load_pieces(Held(None, SPLIT[1]), path)
    assert torch.equal(own["b.weight"], WHOLE["b.weight"][:, 2:6])
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DataCorrupt, match="theirs"):
        Slices(path)


def test_a_rank_that_does_not_see_the_file(tmp_path: Path) -> None:
    layout = Layout.of({"w": (torch.float32, (2,))})
    path = tmp_path / "f"
    assert not layout.is_at(path)
    layout.create(path)
    assert layout.is_at(path)
    other = Layout.of({"v": (torch.float32, (2,))})
    assert not other.is_at(path)
    assert json.loads(layout.header[8:])["w"]["shape"] == [2]
