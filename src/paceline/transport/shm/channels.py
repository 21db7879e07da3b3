"""Messages between two processes on one host.

Short ones go through the channel of their pair of ranks, piece by piece. For long ones the receiver
first posts where it wants them: when that is memory which both can map, the sender writes there
itself, and nothing is copied twice; otherwise the pieces follow. Messages of one pair keep their
order; those with a tag of their own (notes) have a channel of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.errors import TransportError
from paceline.transport.base import check_tensor
from paceline.transport.shm.doorbell import CHANNELS, PIECES

if TYPE_CHECKING:
    from paceline.transport.shm.transport import ShmTransport

PIECE_BYTES = 256 << 10
LONG_BYTES = 64 << 10  # from here on the receiver posts
IN_PIECES = 0xFFFFFFFF  # what it posts when its memory is its own
WORD = 0xFFFFFFFF


def channels_bytes(ranks: int) -> int:
    return CHANNELS * ranks * ranks * PIECES * PIECE_BYTES


class ChannelMessage:
    """A message under way; `advance` moves what can be moved now."""

    def __init__(
        self, transport: ShmTransport, tensor: Tensor, peer: int, sending: bool, tag: int
    ) -> None:
        check_tensor(tensor, transport)
        self.transport, self.tensor, self.peer, self.sending = transport, tensor, peer, sending
        source, target = (transport.rank, peer) if sending else (peer, transport.rank)
        self.channel = (int(tag != 0) * transport.size + source) * transport.size + target
        self._bytes = (
            tensor.detach().view(-1).view(torch.uint8)
            if tensor.numel()
            else torch.empty(0, dtype=torch.uint8)
        )
        self._size, self._moved = tensor.nbytes, 0
        self._long = self._size >= LONG_BYTES
        self._ticket: int | None = None  # of a receiver that has posted
        self._piecewise = not self._long
        self.done = tensor.nbytes == 0

    def advance(self) -> bool:
        """True when the message is through."""
        if not self.done and not self._piecewise:
            if self.sending:
                self._find_post()
            else:
                self._post()
        if not self.done and self._piecewise:
            self._move_pieces()
        return self.done

    def _post(self) -> None:
        """The receiver says where it wants a long message; then it is filled by the sender, or
        comes in pieces.
        """
        board, channel = self.transport._board, self.channel
        if self._ticket is None:
            if (board.posted[channel] - board.filled[channel]) & WORD >= PIECES:
                return
            slot = channel * PIECES + board.posted[channel] % PIECES
            place = self.transport._memory.find(self.tensor)
            number, offset = place if place is not None else (IN_PIECES, 0)
            board.numbers[slot], board.low[slot], board.high[slot] = (
                number,
                offset & WORD,
                offset >> 32,
            )
            board.wanted[slot] = self._size & WORD
            board.posted[channel] = self._ticket = (board.posted[channel] + 1) & WORD
            self._piecewise = place is None
            board.ring(self.peer, self.transport.rank)
        self.done = not self._piecewise and (board.filled[channel] - self._ticket) & WORD < 1 << 31

    def _find_post(self) -> None:
        """The sender of a long message writes where the receiver wants it."""
        board, channel = self.transport._board, self.channel
        if board.posted[channel] == board.filled[channel]:
            return
        slot = channel * PIECES + board.filled[channel] % PIECES
        if board.wanted[slot] != self._size & WORD:
            raise TransportError(
                f"rank {self.peer} expects {board.wanted[slot]} bytes, not {self._size}"
            )
        if board.numbers[slot] == IN_PIECES:
            self._piecewise = True
            return
        theirs = self.transport._memory.of(self.transport._members[self.peer], board.numbers[slot])
        offset = board.low[slot] + (board.high[slot] << 32)
        theirs.tensor(torch.uint8, offset, self._size).copy_(self._bytes)
        self._filled()

    def _filled(self) -> None:
        board = self.transport._board
        board.filled[self.channel] = (board.filled[self.channel] + 1) & WORD
        self.done = True
        board.ring(self.peer, self.transport.rank)

    def _move_pieces(self) -> None:
        board, channel = self.transport._board, self.channel
        written, read = board.written, board.read
        counter, moved = (written if self.sending else read), False
        while self._moved < self._size:
            under_way = (written[channel] - read[channel]) & WORD
            if under_way == (PIECES if self.sending else 0):
                break
            slot = channel * PIECES + counter[channel] % PIECES
            length = self._size & WORD
            if self.sending:
                board.lengths[slot] = length
            elif board.lengths[slot] != length:
                raise TransportError(
                    f"rank {self.peer} sent {board.lengths[slot]} bytes; {length} were expected"
                )
            start, size = slot * PIECE_BYTES, min(PIECE_BYTES, self._size - self._moved)
            there, here = (
                self.transport._channels[start : start + size],
                self._bytes[self._moved : self._moved + size],
            )
            (there if self.sending else here).copy_(here if self.sending else there)
            counter[channel] = (counter[channel] + 1) & WORD
            self._moved += size
            moved = True
        if self._moved == self._size:
            if self._long and self.sending:
                self._filled()
                return
            self.done = (
                not self._long or (board.filled[channel] - (self._ticket or 0)) & WORD < 1 << 31
            )
        if moved:
            board.ring(self.peer, self.transport.rank)

    def wait(self) -> None:
        transport = self.transport

        def ready() -> bool:
            if not self.done:
                transport._progress()
            return self.done

        transport._waiter.wait(ready, self.peer, "a message")
