"""The ranks of a run of which some ended before they connected: all keep their numbers."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from paceline.errors import PeerLost
from paceline.transport.base import Message, Transport, Work
from paceline.transport.wrapper import Wrapper


def with_absent(transport: Transport, present: Sequence[int], rank: int, size: int) -> Transport:
    """Return the transport as one of all `size` ranks, of which only `present` are connected."""
    if len(present) == size:
        return transport
    return Remaining(transport, tuple(present), rank, size)


class Remaining(Wrapper):
    """Translates the ranks of a run to those of the transport inside.

    Messages to a rank that never connected raise `PeerLost`. Collectives are those of the ranks
    that are there.
    """

    name = "remaining"

    def __init__(self, inner: Transport, present: tuple[int, ...], rank: int, size: int) -> None:
        super().__init__(inner)
        self._present, self.rank, self.size = present, rank, size

    @property
    def present(self) -> tuple[int, ...]:
        return self._present

    def around(self, other: Transport) -> Transport:
        return Remaining(other, self._present, self.rank, self.size)

    def _inside(self, rank: int) -> int:
        if rank not in self._present:
            raise PeerLost(rank, "it ended before the run began")
        return self._present.index(rank)

    def isend(self, tensor: Tensor, to: int, tag: int = 0) -> Work:
        return self.inner.isend(tensor, self._inside(to), tag)

    def irecv(self, tensor: Tensor, source: int, tag: int = 0) -> Work:
        return self.inner.irecv(tensor, self._inside(source), tag)

    def sending(self, tensor: Tensor, to: int) -> Message:
        return self.inner.sending(tensor, self._inside(to))

    def receiving(self, tensor: Tensor, source: int) -> Message:
        return self.inner.receiving(tensor, self._inside(source))

    def group(self, ranks: Sequence[int]) -> Transport:
        return self.inner.group([self._inside(rank) for rank in ranks])

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        self.inner.broadcast(tensor, self._inside(root))

    def share(self, tensor: Tensor, root: int = 0) -> Tensor:
        return self.inner.share(tensor, self._inside(root))
