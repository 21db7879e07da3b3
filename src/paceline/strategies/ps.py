"""Parameter server: workers push gradients to servers that hold the weights, and pull fresh weights
back.

    server:  w <- optimizer(w, sum of the gradients that have come, each scaled by its share of the round's samples)

How far workers may run apart is one number, s, the clocks (steps) that a worker may be ahead of the
slowest:

    consistency=sync    s = 0          a step when all have reported: the same as all-reduce
    consistency=ssp     s = staleness  stale synchronous parallel (Ho et al., 2013): at clock t a worker sees everybody's
                                       updates up to clock t-s-1, its own always, and newer ones that have arrived
    consistency=async   s = infinite   every gradient is applied as it comes (Dean et al., 2012)

A server answers whoever is allowed to go on; before it answers, it applies all gradients that have
arrived, those of one clock as one update. So with s = 0 there is one combined update per clock, and
with s infinite each gradient is applied on arrival. The optimizer runs on the server; the learning
rate travels with the gradient. Several servers hold one part of the tensors each. A codec works in
both directions: on the gradients (with what was left out remembered by the worker), and on how far
the weights have moved from what this worker knows of them.

With consistency=sync and exchange=gradients this is serial SGD on the whole batch. With
exchange=weights each worker steps its own optimizer: then it is serial SGD only without momentum,
or where the workers' shares of the samples do not change between steps (the partial last step of an
epoch changes them).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from paceline.codecs.base import Codec
from paceline.errors import BadRequest
from paceline.registry import strategies
from paceline.strategies.base import Context, Strategy, average_buffers
from paceline.strategies.parts.averaging import trained
from paceline.strategies.parts.mailbox import Inbox, Outbox, load_states
from paceline.strategies.parts.momentum import Velocity
from paceline.strategies.parts.serving import (
    PULL,
    PUSH,
    STATE,
    TAKE,
    Note,
    Part,
    Parts,
    Server,
    stretches_of,
)
from paceline.types import Batch, ReplicaLike

UNBOUNDED = 1 << 40


@strategies.register("ps")
@dataclass
class ParameterServer(Strategy):
    """Servers hold the weights; workers push gradients and pull weights, in step, nearly in step,
    or not at all.
    """

    consistency: Annotated[Literal["sync", "ssp", "async"], "how far workers may run apart"] = (
        "sync"
    )
    staleness: Annotated[int, "ssp: clocks that a worker may be ahead of the slowest"] = 3
    exchange: Annotated[
        Literal["gradients", "weights"], "what is pushed (weights: how far they moved)"
    ] = "gradients"

    serves = "ranks"

    def __post_init__(self) -> None:
        if self.staleness < 0:
            raise BadRequest(f"ps: staleness={self.staleness}: 0 or more")
        self.exchanges = self.exchange
        self.survives = self.consistency == "async"
        self.noise_adds_up = (self.exchange, self.ahead) == ("gradients", 0)
        self.in_step = self.resumes_exactly = self.ahead == 0  # type: ignore[misc]

    @property
    def ahead(self) -> int:
        return {"sync": 0, "ssp": self.staleness, "async": UNBOUNDED}[self.consistency]

    # --- a worker

    def setup(self, ctx: Context, replica: ReplicaLike) -> None:
        super().setup(ctx, replica)
        self._note = Note(len(replica.lrs))
        self._parts = Parts(replica.regions, len(ctx.servers))
        self._velocity = Velocity.taken(ctx, replica) if self.exchange == "gradients" else None
        self._coded = (
            [] if ctx.codec.lossless else [_Coded(ctx, replica, parts) for parts in self._parts.of]
        )
        self._base = (
            [trained(r.params, r.grads).clone() for r in replica.regions]
            if self.exchange == "weights"
            else []
        )
        if ctx.worker_index == 0:  # its weights are what the servers start from
            for server, parts in zip(ctx.servers, self._parts.of, strict=True):
                for region, low, high in parts:
                    ctx.transport.send(replica.regions[region].params[low:high], server)
        ctx.peers.barrier()

    def refuses(self, codec: Codec) -> str | None:
        return None

    def step(self, replica: ReplicaLike, batch: Batch) -> None:
        if self._velocity is not None:
            self._velocity.advance(replica, batch.share)
        sent = [region.grads for region in replica.regions]
        if self.exchange == "weights":
            sent = self._moves(replica, batch)
        if replica.clip_norm is not None and len(self.ctx.servers) > 1:
            raise BadRequest(
                "ps: no server of several knows the whole gradient's norm: clip with one server"
            )
        numbers = [float(batch.step), replica.clip_norm or 0.0, *replica.lrs]
        if self._coded:
            self._talk_coded(replica, sent, numbers)
        else:
            self._talk(replica, PUSH, sent, numbers)
        for base, region in zip(self._base, replica.regions, strict=False):
            base.copy_(trained(region.params, region.grads))
        self.observed = {
            "staleness": int(self._note.answer[0]),
            "missed": int(self._note.answer[1]),
        }

    def _moves(self, replica: ReplicaLike, batch: Batch) -> list[Tensor]:
        """One step of one's own; what is pushed is how far it went, times this worker's share."""
        replica.update()
        for region, base in zip(replica.regions, self._base, strict=True):
            torch.sub(trained(region.params, region.grads), base, out=region.grads).mul_(
                batch.share
            )
        return [region.grads for region in replica.regions]

    def _talk(
        self, replica: ReplicaLike, kind: int, sent: list[Tensor], numbers: list[float]
    ) -> None:
        """Push (or not) and pull, with all servers at once."""
        line, works = self.ctx.transport, []
        pairs = list(zip(self.ctx.servers, self._parts.of, strict=True))
        for (
            server,
            parts,
        ) in pairs:  # first say where the answer is wanted: it can then be put there at once
            works.append(self._note.listen(line, server))
            works += [
                line.irecv(replica.regions[region].params[low:high], server)
                for region, low, high in parts
            ]
        for server, parts in pairs:
            works.append(self._note.send(line, server, kind, numbers))
            works += [
                line.isend(sent[region][low:high], server) for region, low, high in parts if sent
            ]
        for work in works:
            work.wait()

    def _talk_coded(self, replica: ReplicaLike, sent: list[Tensor], numbers: list[float]) -> None:
        """Push and pull through the codec, with all servers at once."""
        line, works, pairs = (
            self.ctx.transport,
            [],
            list(zip(self.ctx.servers, self._coded, strict=True)),
        )
        for server, coded in pairs:
            works.append(self._note.listen(line, server))
            coded.inbox.listen(line, server)
        for server, coded in pairs:
            works.append(self._note.send(line, server, PUSH, numbers))
            coded.outbox.write([sent[region][low:high] for region, low, high in coded.parts])
            works += coded.outbox.send(line, server)
        for server, coded in pairs:
            news = coded.inbox.read(line, server)
            for (region, low, high), known, moved in zip(
                coded.parts, coded.known, news, strict=True
            ):
                replica.regions[region].params[low:high].copy_(known.add_(moved))
        for work in works:
            work.wait()

    def consensus(self, replica: ReplicaLike) -> list[Tensor] | None:
        """The servers' weights, when all workers have come here: worker 0 asks, and tells the
        others.
        """
        ctx = self.ctx
        ctx.peers.barrier()
        average_buffers(ctx, replica)
        kept = [region.params.clone() for region in replica.regions]
        if ctx.worker_index == 0:
            self._talk(replica, PULL, [], [])
        for region in replica.regions:
            ctx.peers.broadcast(region.params)
        found = [region.params.clone() for region in replica.regions]
        for region, own in zip(replica.regions, kept, strict=True):
            region.params.copy_(own)
        return found

    def state(self) -> dict[str, Any]:
        """Worker 0 keeps what the servers' optimizers remember."""
        kept: dict[str, Any] = {
            "base": self._base,
            "velocity": self._velocity.state() if self._velocity is not None else [],
        }
        kept["codec"] = [
            {"states": coded.outbox.states, "known": coded.known} for coded in self._coded
        ]
        if self.ctx.worker_index == 0:
            kept["servers"] = [
                self._note.fetch(self.ctx.transport, server, STATE) for server in self.ctx.servers
            ]
        return kept

    def load_state(self, state: dict[str, Any]) -> None:
        for base, kept in zip(self._base, state["base"], strict=True):
            base.copy_(kept)
        if self._velocity is not None:
            self._velocity.load(state["velocity"])
        if len(state["codec"]) == len(self._coded):  # as many servers as before
            for coded, kept in zip(self._coded, state["codec"], strict=True):
                load_states(coded.outbox, kept["states"])
                coded.known = kept["known"]
        if self.ctx.worker_index == 0 and len(state["servers"]) == len(self.ctx.servers):
            for server, content in zip(self.ctx.servers, state["servers"], strict=True):
                self._note.give(self.ctx.transport, server, TAKE, content)
        self.ctx.peers.barrier()

    def leave(self) -> None:
        for server in self.ctx.servers:
            self._note.bye(self.ctx.transport, server)

    # --- a server

    def serve(self, ctx: Context, replica: ReplicaLike) -> None:
        parts = Parts(replica.regions, len(ctx.servers)).of[ctx.transport.rank - ctx.workers]
        Server(
            ctx, replica, parts, self.ahead, adds=self.exchange == "weights", survives=self.survives
        ).run()


class _Coded:
    """One server's parts, through the codec: what is sent to it, what comes from it, and what is
    known of its weights.
    """

    def __init__(self, ctx: Context, replica: ReplicaLike, parts: list[Part]) -> None:
        self.parts, stretches = parts, stretches_of(replica.regions, parts)
        self.outbox, self.inbox = (
            Outbox(ctx, ctx.codec, stretches),
            Inbox(ctx, ctx.codec.plain, stretches),
        )
        self.known = [
            replica.regions[region].params[low:high].clone() for region, low, high in parts
        ]
