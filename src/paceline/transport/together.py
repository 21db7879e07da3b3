"""What all ranks of a transport can do together with its messages alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from paceline.errors import PeerLost, TransportError

if TYPE_CHECKING:
    from paceline.transport.base import Transport, Work

Op = Literal["sum", "max", "min"]
REDUCE: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}
WELL, UNWELL = 1, 2  # what a rank says when it comes to an assembly; 0: it has not come
AGREEMENT_TAG, AGREEMENT_BYTES, ASSEMBLY_TAG = 99, 160, 98


def all_reduce(transport: Transport, tensor: Tensor, op: Op = "sum") -> None:
    """All-reduce through rank 0."""
    if transport.rank == 0:
        other = allocate_like(transport, tensor)
        for peer in range(1, transport.size):
            transport.recv(other, peer)
            REDUCE[op](tensor, other, out=tensor)
    else:
        transport.send(tensor, 0)
    broadcast(transport, tensor)


def broadcast(transport: Transport, tensor: Tensor, root: int = 0) -> None:
    """Send the root's tensor to each other rank."""
    if transport.rank == root:
        others = [peer for peer in range(transport.size) if peer != root]
        for work in [transport.isend(tensor, peer) for peer in others]:
            work.wait()
    else:
        transport.recv(tensor, root)


def allocate_like(transport: Transport, tensor: Tensor) -> Tensor:
    """Memory of the transport with the shape of a tensor."""
    return transport.allocate(tensor.numel(), tensor.dtype, tensor.device).view(tensor.shape)


def agree(transport: Transport, what: str) -> None:
    """Raise on all ranks unless all give the same description of what they are about to do.

    The metered payload does not include it.
    """
    line = transport.uncounted().control
    own = torch.zeros(AGREEMENT_BYTES, dtype=torch.uint8)
    text = what.encode()[:AGREEMENT_BYTES]
    own[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    heard = [own if peer == line.rank else torch.empty_like(own) for peer in range(line.size)]
    others = [peer for peer in range(line.size) if peer != line.rank]
    works = [line.irecv(heard[peer], peer, AGREEMENT_TAG) for peer in others]
    works += [line.isend(own, peer, AGREEMENT_TAG) for peer in others]
    for work in works:
        work.wait()
    said = [bytes(h.tolist()).rstrip(b"\0").decode(errors="replace") for h in heard]
    if len(set(said)) > 1:
        told = "; ".join(f"rank {rank}: {words}" for rank, words in enumerate(said))
        raise TransportError(f"the ranks call different operations ({told})")


def assemble(
    transport: Transport, ranks: Sequence[int], survivors_suffice: bool = False
) -> tuple[int, ...]:
    """Wait for these ranks, however long they take; return those that came, the same on all.

    A rank that has ended raises `PeerLost` on all of them, unless `survivors_suffice`.
    """
    return assemble_with(transport, ranks, True, survivors_suffice)[0]


def assemble_with(
    transport: Transport, ranks: Sequence[int], well: bool, survivors_suffice: bool = False
) -> tuple[tuple[int, ...], bool]:
    """Assemble, and return also whether every rank that came said that it is `well`.

    The first rank collects the others' messages and answers them, so that all return the same.
    """
    words = assemble_saying(transport, ranks, WELL if well else UNWELL, survivors_suffice)
    return tuple(words), all(word == WELL for word in words.values())


def assemble_saying(
    transport: Transport, ranks: Sequence[int], own: int, survivors_suffice: bool = False
) -> dict[int, int]:
    """Assemble, and return what each rank that came says: a number that is not 0."""
    line = transport.uncounted().control
    first, word = ranks[0], torch.zeros(line.size, dtype=torch.int64)
    word[line.rank] = own
    if line.rank != first:
        said, heard = line.isend(word, first, ASSEMBLY_TAG), torch.zeros_like(word)
        answer = line.irecv(heard, first, ASSEMBLY_TAG)
        _await_one(line, [answer], [first])
        answer.wait()
        said.wait()
        return _came(heard, ranks)
    awaited: dict[int, Work] = {}
    words = {rank: torch.zeros_like(word) for rank in ranks[1:]}
    for rank in ranks[1:]:
        with suppress(PeerLost) if survivors_suffice else nullcontext():
            awaited[rank] = line.irecv(words[rank], rank, ASSEMBLY_TAG)
    while awaited:
        order = list(awaited)
        try:
            rank = order[_await_one(line, [awaited[r] for r in order], order)]
        except PeerLost as lost:  # the store has noticed it
            if not survivors_suffice or awaited.pop(lost.rank or 0, None) is None:
                raise
            continue
        with suppress(PeerLost) if survivors_suffice else nullcontext():
            awaited.pop(rank).wait()
            word[rank] = words[rank][rank]
    came = _came(word, ranks)
    for rank in list(came)[1:]:
        with suppress(PeerLost) if survivors_suffice else nullcontext():
            line.send(word, rank, ASSEMBLY_TAG)
    return came


def _came(word: Tensor, ranks: Sequence[int]) -> dict[int, int]:
    return {rank: int(word[rank]) for rank in ranks if word[rank]}


def _await_one(transport: Transport, works: Sequence[Work], ranks: Sequence[int]) -> int:
    """The index of a complete work, however long that takes; slow ranks are reported."""
    patience = transport.patience
    with patience.waiting("all to come together", ranks, gives_up=False) as look:
        while (which := transport.wait_any(works, patience.post_s)) is None:
            look()
    return which
