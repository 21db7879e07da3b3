"""A parameter server at work: notes that go with the tensors, who may go on, and what is applied
when.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from paceline.errors import PeerLost, RunFailed
from paceline.strategies.base import Context
from paceline.strategies.parts.mailbox import Inbox, Outbox, Stretch, load_states
from paceline.strategies.parts.momentum import Velocity
from paceline.transport.base import Work
from paceline.transport.metered import Metered
from paceline.types import RegionLike, ReplicaLike

PUSH, PULL, STATE, TAKE, BYE = range(5)
Part = tuple[int, int, int]  # (region, from, to), in elements of its gradients


class Parts:
    """Which server holds what: tensors in order, cut at their boundaries into stretches of about
    equal length.
    """

    def __init__(self, regions: Sequence[RegionLike], servers: int) -> None:
        total = sum(r.grads.numel() for r in regions)
        self.of: list[list[Part]] = [[] for _ in range(servers)]
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


def stretches_of(regions: Sequence[RegionLike], parts: Sequence[Part]) -> list[Stretch]:
    """A server's parts, as what messages are about."""
    cuts = [(regions[region], low, high) for region, low, high in parts]
    return [
        (region.grad_layout.cut(low, high), region.grads[low:high]) for region, low, high in cuts
    ]


class Note:
    """A few numbers beside the payload: what is wanted, clock, norm to clip to, learning rates; and
    the server's answer.
    """

    def __init__(self, groups: int) -> None:
        self.question = torch.zeros(3 + groups, dtype=torch.float64)
        self.answer = torch.zeros(2, dtype=torch.float64)

    def send(self, line: Metered, server: int, kind: int, numbers: Sequence[float]) -> Work:
        self.question[0] = kind
        self.question[1 : 1 + len(numbers)] = torch.tensor(numbers, dtype=torch.float64)
        return line.send_note(self.question, server)

    def listen(self, line: Metered, server: int) -> Work:
        return line.recv_note(self.answer, server)

    def fetch(self, line: Metered, server: int, kind: int) -> Tensor:
        """Bytes that a server keeps."""
        self.send(line, server, kind, []).wait()
        self.listen(line, server).wait()
        content = torch.zeros(int(self.answer[0]), dtype=torch.uint8)
        line.recv_note(content, server).wait()
        return content

    def give(self, line: Metered, server: int, kind: int, content: Tensor) -> None:
        self.send(line, server, kind, [float(content.numel())]).wait()
        line.send_note(content, server).wait()
        self.listen(line, server).wait()

    def bye(self, line: Metered, server: int) -> None:
        self.send(line, server, BYE, []).wait()


@dataclass
class Client:
    """What a server knows of a worker."""

    rank: int
    question: Tensor
    pushed: list[Tensor] = field(default_factory=list)
    clock: int = 0  # gradients that it has pushed
    waits: bool = False  # for an answer
    version: int = 0  # of the weights that it has
    here: bool = True
    ear: Work | None = None  # its next note
    coming: list[Work] = field(default_factory=list)  # its next gradients, made ready for
    inbox: Inbox | None = None  # through a codec: how they come,
    outbox: Outbox | None = None  # how it is told of the weights,
    known: list[Tensor] = field(default_factory=list)  # and what it knows of them


class Server:
    """Holds one part of the weights. `ahead`: clocks that a worker may be ahead of the slowest."""

    def __init__(
        self,
        ctx: Context,
        replica: ReplicaLike,
        parts: list[Part],
        ahead: int,
        adds: bool,
        survives: bool,
    ) -> None:
        self.survives = survives
        self.ctx, self.replica, self.parts, self.ahead, self.adds = ctx, replica, parts, ahead, adds
        self.line = ctx.transport
        self.clients = [
            Client(rank, Note(len(replica.lrs)).question) for rank in range(ctx.workers)
        ]
        self.pending: dict[
            int, list[Client]
        ] = {}  # by clock: gradients that have come and are not yet applied
        self.version = 0
        for client in self.clients:
            client.pushed = [self._place(part) for part in parts]
        for region in replica.regions:
            region.grads.fill_(-0.0)  # nobody has touched what others hold
        self._answer = torch.zeros(2, dtype=torch.float64)
        Velocity.taken(ctx, replica)  # where momentum comes before a codec, it is the workers'

    def _through_codec(self, client: Client) -> None:
        stretches = stretches_of(self.replica.regions, self.parts)
        codec = self.ctx.codec.plain
        client.inbox, client.outbox = (
            Inbox(self.ctx, codec, stretches),
            Outbox(self.ctx, codec, stretches),
        )
        client.known = [part.clone() for part in self._weights()]

    def _weights(self) -> list[Tensor]:
        return [self.replica.regions[region].params[low:high] for region, low, high in self.parts]

    def _place(self, part: Part) -> Tensor:
        region, low, high = part
        grads = self.replica.regions[region].grads
        return self.line.allocate(high - low, grads.dtype, grads.device)

    def run(self) -> None:
        for region, low, high in self.parts:
            self.line.recv(self.replica.regions[region].params[low:high], 0)
        self.line.meter.phase = "train"
        for client in self.clients:
            if not self.ctx.codec.lossless:
                self._through_codec(client)
            self._listen(client)
        while any(c.here for c in self.clients):
            here = [c for c in self.clients if c.ear is not None]
            if not here:
                raise RunFailed("a server has nobody left to listen to")
            self._hear(here[self._next_question([c.ear for c in here if c.ear is not None])])
            self._answer_all()

    def _next_question(self, ears: list[Work]) -> int:
        """Whose note has come. Nobody may have one for long (an evaluation, say); who keeps others
        waiting is told.
        """
        idle, patience = not any(c.waits for c in self.clients), self.line.patience
        with patience.waiting("gradients", gives_up=False, idle=idle) as look:
            while (which := self.line.wait_any(ears, patience.post_s)) is None:
                look()
        return which

    def _listen(self, client: Client) -> None:
        client.ear = self.line.recv_note(client.question, client.rank)
        if client.coming:
            return
        if client.inbox is not None:
            client.coming = client.inbox.listen(self.line, client.rank)
        else:
            client.coming = [self.line.expect(place, client.rank) for place in client.pushed]

    def _hear(self, client: Client) -> None:
        assert client.ear is not None
        ear, client.ear = client.ear, None
        try:
            ear.wait()
            if int(client.question[0]) == PUSH:
                if client.inbox is not None:
                    for place, values in zip(
                        client.pushed, client.inbox.read(self.line, client.rank), strict=True
                    ):
                        place.copy_(values)
                else:
                    for work in client.coming:
                        work.wait()
                client.coming = []
        except PeerLost:
            if not self.survives:
                raise
            client.here = client.waits = False  # the others go on
            return
        kind = int(client.question[0])
        if kind == PUSH:
            self.pending.setdefault(int(client.question[1]), []).append(client)
            client.clock += 1
            client.waits = True
        elif kind == PULL:
            self._apply()
            with self.line.meter.during("evaluate"):
                self._send_weights(client)
        elif kind == BYE:
            client.here = False
        else:
            self._keep_or_take(client, kind)

    def _answer_all(self) -> None:
        """Whoever is allowed to go on is answered, with everything applied that has come."""
        slowest = min((c.clock for c in self.clients if c.here), default=0)
        allowed = [c for c in self.clients if c.waits and c.clock - slowest <= self.ahead]
        if allowed:
            self._apply()
        for client in allowed:
            self._answer[0] = client.clock - slowest
            client.waits = False
            try:
                self._send_weights(client, whole=client.outbox is None)
            except PeerLost:
                if not self.survives:
                    raise
                client.here, client.ear = False, None

    def _send_weights(self, client: Client, whole: bool = True) -> None:
        """All of them, or what a codec makes of how far they are from what this worker knows."""
        self._answer[1] = self.version - client.version
        client.version = self.version
        works = [self.line.send_note(self._answer, client.rank)]
        if whole or client.outbox is None:
            works += [self.line.isend(part, client.rank) for part in self._weights()]
        else:
            client.outbox.follow(self._weights(), client.known)
            works += client.outbox.send(self.line, client.rank)
        for work in works:
            work.wait()
        self._listen(client)

    def _apply(self) -> None:
        """The gradients of a clock are one update: summed in the workers' order, whatever order
        they came in.
        """
        for clock in sorted(self.pending):
            clients = sorted(self.pending.pop(clock), key=lambda c: c.rank)
            for index, (region, low, high) in enumerate(self.parts):
                total = self.replica.regions[region].grads[low:high]
                total.copy_(clients[0].pushed[index])
                for client in clients[1:]:
                    total.add_(client.pushed[index])
                if self.adds:
                    self.replica.regions[region].params[low:high].add_(total)
            if not self.adds:
                said = clients[0].question.tolist()
                self.replica.clip_norm = said[2] or None
                self.replica.set_lrs(said[3:])
                self.replica.attach_gradients()
                self.replica.update(marked=self.ctx.codec.lossless)
            self.version += len(clients)

    def _keep_or_take(self, client: Client, kind: int) -> None:
        if kind == STATE:
            told = [
                {"known": c.known, "codec": c.outbox.states if c.outbox else []}
                for c in self.clients
            ]
            content = to_bytes({"optimizer": self.replica.optimizer.state_dict(), "clients": told})
            self._answer[0] = content.numel()
            self.line.send_note(self._answer, client.rank).wait()
            self.line.send_note(content, client.rank).wait()
        else:
            content = torch.zeros(int(client.question[1]), dtype=torch.uint8)
            self.line.recv_note(content, client.rank).wait()
            asked = [
                {k: v for k, v in g.items() if k != "params"}
                for g in self.replica.optimizer.param_groups
            ]
            kept = from_bytes(content)
            self.replica.optimizer.load_state_dict(kept["optimizer"])
            for own, told in zip(self.clients, kept["clients"], strict=True):
                if own.outbox is not None and told["known"]:
                    load_states(own.outbox, told["codec"])
                    own.known = told["known"]
            for group, options in zip(self.replica.optimizer.param_groups, asked, strict=True):
                group.update(options)
            self.line.send_note(self._answer, client.rank).wait()
        self._listen(client)


def to_bytes(content: Any) -> Tensor:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def from_bytes(content: Tensor) -> Any:
    return torch.load(io.BytesIO(content.numpy().tobytes()), weights_only=True)
