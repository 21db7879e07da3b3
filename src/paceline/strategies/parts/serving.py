"""A parameter server: the notes beside its messages, when it replies, and when it applies
gradients.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.errors import PeerLost, RunFailed
from paceline.strategies.base import Context
from paceline.strategies.parts.mailbox import Inbox, Outbox, Span
from paceline.strategies.parts.momentum import Velocity
from paceline.strategies.parts.reference import Reference
from paceline.strategies.parts.saved import Saved, on_device
from paceline.transport.base import Transport, Work
from paceline.transport.notes import receive_bytes

if TYPE_CHECKING:
    from paceline.replica.flat import Region
    from paceline.replica.replica import Replica

PUSH, PULL, STATE, BYE = range(4)
RegionSpan = tuple[int, int, int]  # (index of a region, start, stop): a span of its gradients


class ServerSpans:
    """The spans that each server holds: whole tensors in order, about equally many numbers each."""

    def __init__(self, regions: Sequence[Region], servers: int) -> None:
        total = sum(r.grads.numel() for r in regions)
        self.of: list[list[RegionSpan]] = [[] for _ in range(servers)]
        seen = 0
        for index, region in enumerate(regions):
            for slot in region.grad_layout.slots:
                if not slot.numel:
                    continue
                server = min(servers - 1, (seen + slot.numel // 2) * servers // max(1, total))
                mine = self.of[server]
                if mine and mine[-1][0] == index and mine[-1][2] == slot.offset:
                    mine[-1] = (index, mine[-1][1], slot.offset + slot.numel)
                else:
                    mine.append((index, slot.offset, slot.offset + slot.numel))
                seen += slot.numel


def message_spans(regions: Sequence[Region], spans: Sequence[RegionSpan]) -> list[Span]:
    """A server's spans as an `Inbox` and an `Outbox` need them."""
    cuts = [(regions[region], low, high) for region, low, high in spans]
    return [
        (region.grad_layout.cut(low, high), region.grads[low:high]) for region, low, high in cuts
    ]


class Note:
    """The few numbers that accompany the payload.

    A request holds its kind, the clock, the norm to clip to and the learning rates. A reply holds
    the worker's lead over the slowest worker and the number of updates since its last pull.
    """

    def __init__(self, groups: int) -> None:
        self.request = torch.zeros(3 + groups, dtype=torch.float64)
        self.reply = torch.zeros(2, dtype=torch.float64)

    def send(self, transport: Transport, server: int, kind: int, numbers: Sequence[float]) -> Work:
        self.request[0] = kind
        self.request[1 : 1 + len(numbers)] = torch.tensor(numbers, dtype=torch.float64)
        return transport.send_note(self.request, server)

    def listen(self, transport: Transport, server: int) -> Work:
        return transport.recv_note(self.reply, server)

    def fetch(self, transport: Transport, server: int, kind: int) -> Tensor:
        """Request a server's state, as bytes."""
        self.send(transport, server, kind, []).wait()
        self.listen(transport, server).wait()
        content = torch.zeros(int(self.reply[0]), dtype=torch.uint8)
        transport.recv_note(content, server).wait()
        return content

    def bye(self, transport: Transport, server: int) -> None:
        self.send(transport, server, BYE, []).wait()


@dataclass
class Client:
    """A server's view of one worker."""

    rank: int
    request: Tensor
    pushed: list[Tensor] = field(default_factory=list)
    clock: int = 0  # how many gradients it has pushed
    waits: bool = False  # whether it waits for a reply
    version: int = 0  # the version of the weights that it has
    here: bool = True  # False: it has left or died
    next_note: Work | None = None  # the receive of its next note
    next_gradients: list[Work] = field(default_factory=list)  # the receives of its next gradients
    inbox: Inbox | None = None  # with a codec: decodes this worker's gradients
    outbox: Outbox | None = None  # with a codec: encodes changes of the weights for it
    known: Reference = field(default_factory=lambda: Reference([]))  # with a codec: its weights


class Server:
    """Holds some spans of the weights.

    `ahead`: the clocks that a worker may be ahead of the slowest. `adds`: workers push changes of
    the weights, not gradients.
    """

    def __init__(
        self,
        ctx: Context,
        replica: Replica,
        spans: list[RegionSpan],
        ahead: int,
        adds: bool,
        survives: bool,
    ) -> None:
        self.survives = survives
        self.ctx, self.replica, self.spans, self.ahead, self.adds = ctx, replica, spans, ahead, adds
        self.transport = ctx.transport
        self.clients = [Client(rank, Note(len(replica.lrs)).request) for rank in range(ctx.workers)]
        # By clock: the workers whose gradients have arrived and are not applied yet.
        self.pending: dict[int, list[Client]] = {}
        self.version = 0
        self.step = 0  # of the run: the last one for which gradients have arrived
        for client in self.clients:
            client.pushed = [self._place(span) for span in spans]
        for region in replica.regions:
            region.grads.fill_(-0.0)  # marks the parameters of other servers as untouched
        self._reply = torch.zeros(2, dtype=torch.float64)
        Velocity.taken(ctx, replica)  # if the workers apply momentum, the server must not

    def _use_codec(self, client: Client) -> None:
        encoded_spans = message_spans(self.replica.regions, self.spans)
        codec = self.ctx.codec.plain
        client.inbox, client.outbox = (
            Inbox(self.ctx, codec, encoded_spans),
            Outbox(self.ctx, codec, encoded_spans),
        )
        client.known = Reference(self._weights())

    def _weights(self) -> list[Tensor]:
        return [self.replica.regions[region].params[low:high] for region, low, high in self.spans]

    def _place(self, span: RegionSpan) -> Tensor:
        region, low, high = span
        grads = self.replica.regions[region].grads
        return self.transport.allocate(high - low, grads.dtype, grads.device)

    def run(self) -> None:
        for region, low, high in self.spans:
            self.transport.recv(self.replica.regions[region].params[low:high], 0)
        memory = receive_bytes(self.transport, 0)
        self.transport.enter("train")
        for client in self.clients:
            if not self.ctx.codec.lossless:
                self._use_codec(client)
        if memory.numel():
            self._remember(from_bytes(memory))
        for client in self.clients:
            if client.rank in self.transport.present:
                self._listen(client)
            else:
                client.here = False  # it ended before the run began
        while any(c.here for c in self.clients):
            here = [c for c in self.clients if c.next_note is not None]
            if not here:
                raise RunFailed(f"server {self.transport.rank} has no worker left to serve")
            try:
                self._receive(here[self._wait_for_note(here)])
            except PeerLost as lost:  # the store has noticed the end of a worker
                gone = [c for c in here if c.rank == lost.rank]
                if not self.survives or not gone or lost.rank == 0:
                    raise
                gone[0].here, gone[0].waits, gone[0].next_note = False, False, None
            self._reply_to_all()

    def _wait_for_note(self, clients: list[Client]) -> int:
        """The index of a note that has arrived.

        None may arrive for a long time (during an evaluation). If workers wait for a reply
        meanwhile, the slow ranks are reported.
        """
        idle, patience = not any(c.waits for c in self.clients), self.transport.patience
        notes = [c.next_note for c in clients if c.next_note is not None]
        ranks = [c.rank for c in clients]
        with patience.waiting("gradients", ranks, gives_up=False, idle=idle) as look:
            while (which := self.transport.wait_any(notes, patience.post_s)) is None:
                look()
        return which

    def _listen(self, client: Client) -> None:
        client.next_note = self.transport.recv_note(client.request, client.rank)
        if client.next_gradients:
            return
        if client.inbox is not None:
            client.next_gradients = client.inbox.listen(self.transport, client.rank)
        else:
            client.next_gradients = [
                self.transport.expect(place, client.rank) for place in client.pushed
            ]

    def _receive(self, client: Client) -> None:
        assert client.next_note is not None
        next_note, client.next_note = client.next_note, None
        try:
            next_note.wait()
            if int(client.request[0]) == PUSH:
                if client.inbox is not None:
                    for place, values in zip(
                        client.pushed, client.inbox.read(self.transport, client.rank), strict=True
                    ):
                        place.copy_(values)
                else:
                    for work in client.next_gradients:
                        work.wait()
                client.next_gradients = []
        except PeerLost:
            # Worker 0 is needed for the run, and where it only connects again, so does the server.
            if not self.survives or client.rank == 0:
                raise
            client.here = client.waits = False  # the other workers go on
            return
        kind = int(client.request[0])
        if kind == PUSH:
            self.pending.setdefault(int(client.request[1]), []).append(client)
            client.clock += 1
            client.waits = True
            self.step = max(self.step, int(client.request[1]) + 1)
            self.transport.patience.activity.enter("exchange", self.step)
        elif kind == PULL:
            self._apply()
            with self.transport.during("evaluate"):
                self._send_weights(client)
        elif kind == BYE:
            client.here = False
        else:
            self._send_state(client)

    def _reply_to_all(self) -> None:
        """Apply all gradients that have arrived and reply to every worker that may go on."""
        slowest = min((c.clock for c in self.clients if c.here), default=0)
        allowed = [c for c in self.clients if c.waits and c.clock - slowest <= self.ahead]
        if allowed:
            self._apply()
        for client in allowed:
            self._reply[0] = client.clock - slowest
            client.waits = False
            try:
                self._send_weights(client, whole=client.outbox is None)
            except PeerLost:
                if not self.survives or client.rank == 0:
                    raise
                client.here, client.next_note = False, None

    def _send_weights(self, client: Client, whole: bool = True) -> None:
        """Send the whole weights, or their encoded difference from this worker's copy of them."""
        self._reply[1] = self.version - client.version
        client.version = self.version
        works = [self.transport.send_note(self._reply, client.rank)]
        if whole or client.outbox is None:
            works += [self.transport.isend(span, client.rank) for span in self._weights()]
        else:
            client.outbox.write_changes(self._weights(), client.known)
            works += client.outbox.send(self.transport, client.rank)
        for work in works:
            work.wait()
        self._listen(client)

    def _apply(self) -> None:
        """Apply the gradients of each clock as one update, summed in the order of the ranks."""
        for clock in sorted(self.pending):
            clients = sorted(self.pending.pop(clock), key=lambda c: c.rank)
            for index, (region, low, high) in enumerate(self.spans):
                total = self.replica.regions[region].grads[low:high]
                total.copy_(clients[0].pushed[index])
                for client in clients[1:]:
                    total.add_(client.pushed[index])
                    self.transport.added(total.nbytes)
                if self.adds:
                    self.replica.regions[region].params[low:high].add_(total)
            if not self.adds:
                said = clients[0].request.tolist()
                self.replica.clip_norm = said[2] or None
                self.replica.set_lrs(said[3:])
                self.replica.attach_gradients()
                self.replica.update(marked=self.ctx.codec.lossless)
            self.version += len(clients)

    def _send_state(self, client: Client) -> None:
        """Send what a checkpoint saves of this server, and record what it served up to here."""
        self.ctx.recorder.write("served", step=self.step, **served(self.transport.counted("train")))
        told = [
            {"known": c.known.weights, "codec": c.outbox.states if c.outbox else []}
            for c in self.clients
        ]
        content = to_bytes({"optimizer": self.replica.optimizer.state_dict(), "clients": told})
        self._reply[0] = content.numel()
        self.transport.send_note(self._reply, client.rank).wait()
        self.transport.send_note(content, client.rank).wait()
        self._listen(client)

    def _remember(self, memory: dict[str, Any]) -> None:
        self.replica.load_optimizer(memory["optimizer"])
        for client, told in zip(self.clients, memory["clients"], strict=True):
            if client.outbox is not None and told is not None and told["known"]:
                client.outbox.states = on_device(told["codec"], client.known.weights[0].device)
                client.known.rebase(told["known"])


def served(total: Any) -> dict[str, int]:
    """What a server has exchanged in training, for the record; nothing where nothing counts it."""
    if total is None:
        return {}
    return {
        "served_sent_bytes": total.sent_bytes,
        "served_received_bytes": total.received_bytes,
        "served_messages": total.messages,
    }


def memories_of_servers(saved: Saved | None, servers: int, workers: int) -> list[Tensor]:
    """What each server is set up with, as bytes; none for a new run.

    An optimizer's memory is kept by tensor, and a server holds whole tensors, so any number of
    servers can go on with it. What they know of a worker's weights is for that worker only.
    """
    if saved is None or not saved["servers"]:
        return [torch.zeros(0, dtype=torch.uint8)] * servers
    kept = [from_bytes(content) for content in saved["servers"]]
    same = len(kept) == servers
    moments = {key: value for one in kept for key, value in one["optimizer"]["state"].items()}
    return [
        to_bytes(
            {
                "optimizer": (
                    kept[server]["optimizer"]
                    if same
                    else {**kept[0]["optimizer"], "state": moments}
                ),
                "clients": [
                    kept[server]["clients"][w] if same and w in saved.members else None
                    for w in range(workers)
                ],
            }
        )
        for server in range(servers)
    ]


def to_bytes(content: Any) -> Tensor:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def from_bytes(content: Tensor) -> Any:
    """Read what `to_bytes` wrote, onto the CPU: another rank may have other devices."""
    return torch.load(io.BytesIO(content.numpy().tobytes()), weights_only=True, map_location="cpu")
