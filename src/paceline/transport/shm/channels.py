"""Messages between two processes on one host.

Short messages go through the channel of their pair of ranks, packet by packet. For a long message
the receiver first posts the address that it wants the message at. If the sender can map that
memory, it writes the message there, so that it is copied once only. Otherwise the message is sent
in packets. Messages of one channel keep their order. Messages with a tag (notes) have their own
channel.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.errors import TransportError
from paceline.transport.base import check_tensor
from paceline.transport.shm.doorbell import CHANNELS, PACKETS

if TYPE_CHECKING:
    from paceline.transport.shm.transport import ShmTransport

PACKET_BYTES = 256 << 10
LONG_BYTES = 64 << 10  # from this size on the receiver posts an address
IN_PACKETS = 0xFFFFFFFF  # posted instead of an address: the receiver's memory is not shared
WORD = 0xFFFFFFFF  # counters have 32 bits and wrap around
SETTLE_S = 0.001  # after it every rank has seen what another has written to shared memory


def channels_bytes(ranks: int) -> int:
    return CHANNELS * ranks * ranks * PACKETS * PACKET_BYTES


class ChannelMessage:
    """A message that is being sent or received; `advance` moves the bytes that can be moved now."""

    def __init__(
        self, transport: ShmTransport, tensor: Tensor, peer: int, sending: bool, tag: int
    ) -> None:
        check_tensor(tensor, transport)
        self.transport, self.tensor, self.peer, self.sending = transport, tensor, peer, sending
        source, target = (transport.rank, peer) if sending else (peer, transport.rank)
        self.channel = (int(tag != 0) * transport.size + source) * transport.size + target
        if transport._counters.given_up[self.channel]:
            raise TransportError(
                f"a message between ranks {source} and {target} was given up: they cannot exchange"
                " any more"
            )
        self._bytes = (
            tensor.detach().view(-1).view(torch.uint8)
            if tensor.numel()
            else torch.empty(0, dtype=torch.uint8)
        )
        self._size, self._moved = tensor.nbytes, 0
        self._long = self._size >= LONG_BYTES
        self._ticket: int | None = None  # the number of the posted receive
        self._in_packets = not self._long
        self.done = tensor.nbytes == 0
        self.lost = False  # an earlier message of the channel was given up

    def advance(self) -> bool:
        """Move what can be moved now; True when the message is complete."""
        if not self.done and not self._in_packets:
            if self.sending:
                self._find_post()
            else:
                self._post()
        if not self.done and self._in_packets:
            self._move_packets()
        return self.done

    def _post(self) -> None:
        """Receiver of a long message: post the address, then wait for the sender to fill it."""
        counters, channel = self.transport._counters, self.channel
        if self._ticket is None:
            if (counters.posted[channel] - counters.filled[channel]) & WORD >= PACKETS:
                return
            entry = channel * PACKETS + counters.posted[channel] % PACKETS
            place = self.transport._memory.find(self.tensor)
            number, offset = place if place is not None else (IN_PACKETS, 0)
            counters.numbers[entry], counters.low[entry], counters.high[entry] = (
                number,
                offset & WORD,
                offset >> 32,
            )
            counters.wanted[entry] = self._size & WORD
            counters.posted[channel] = self._ticket = (counters.posted[channel] + 1) & WORD
            self._in_packets = place is None
            counters.ring(self.peer)
        self.done = (
            not self._in_packets and (counters.filled[channel] - self._ticket) & WORD < 1 << 31
        )

    def _find_post(self) -> None:
        """Sender of a long message: write it to the address that the receiver has posted."""
        counters, channel = self.transport._counters, self.channel
        if counters.posted[channel] == counters.filled[channel]:
            return
        entry = channel * PACKETS + counters.filled[channel] % PACKETS
        if counters.wanted[entry] != self._size & WORD:
            raise TransportError(
                f"rank {self.peer} expects {counters.wanted[entry]} bytes, not {self._size}"
            )
        if counters.numbers[entry] == IN_PACKETS:
            self._in_packets = True
            return
        theirs = self.transport._memory.of(
            self.transport._members[self.peer], counters.numbers[entry]
        )
        offset = counters.low[entry] + (counters.high[entry] << 32)
        counters.writing[channel] = 1
        try:
            if counters.given_up[channel]:
                raise TransportError(f"rank {self.peer} has given this message up")
            theirs.tensor(torch.uint8, offset, self._size).copy_(self._bytes)
        finally:
            counters.writing[channel] = 0
        self._filled()

    def _filled(self) -> None:
        counters = self.transport._counters
        counters.filled[self.channel] = (counters.filled[self.channel] + 1) & WORD
        self.done = True
        counters.ring(self.peer)

    def _move_packets(self) -> None:
        counters, channel = self.transport._counters, self.channel
        written, read = counters.written, counters.read
        counter, moved = (written if self.sending else read), False
        while self._moved < self._size:
            under_way = (written[channel] - read[channel]) & WORD
            if under_way == (PACKETS if self.sending else 0):
                break
            entry = channel * PACKETS + counter[channel] % PACKETS
            length = self._size & WORD
            if self.sending:
                counters.lengths[entry] = length
            elif counters.lengths[entry] != length:
                raise TransportError(
                    f"rank {self.peer} sent {counters.lengths[entry]} bytes; {length} were expected"
                )
            start, size = entry * PACKET_BYTES, min(PACKET_BYTES, self._size - self._moved)
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
                not self._long or (counters.filled[channel] - (self._ticket or 0)) & WORD < 1 << 31
            )
        if moved:
            counters.ring(self.peer)

    def wait(self) -> None:
        transport = self.transport

        def ready() -> bool:
            if self.lost:
                raise TransportError(f"an earlier message of rank {self.peer} was given up")
            if not self.done:
                transport._progress()
            return self.done

        try:
            transport._waiter.wait(ready, self.peer, "a message")
        except BaseException:
            self.give_up()
            raise

    def give_up(self) -> None:
        """Give an unfinished message up: its memory is not written any more.

        The channel cannot be used again, since its next bytes would belong to this message. A
        sender marks itself before it looks whether the message was given up. So after a moment
        either the sender has seen it, or this rank sees the mark and waits until it is gone.
        """
        transport, counters = self.transport, self.transport._counters
        if self.done:
            return
        for work in transport._pending:
            work.lost |= (work.channel, work.sending) == (self.channel, self.sending)
        transport._pending = [work for work in transport._pending if not work.lost]
        counters.given_up[self.channel] = 1
        if not self.sending and self._ticket is not None:
            time.sleep(SETTLE_S)
            while counters.writing[self.channel] and not transport._waiter.has_ended(self.peer):
                time.sleep(SETTLE_S)
