"""Parameter server: workers push gradients to servers that hold the weights, and pull new weights.

    server:  w <- optimizer(w, sum_p s_p g_p)     over the gradients that have arrived;
                                                  s_p: worker p's share of the step's samples

One number, s, bounds how far workers may run apart: the clocks (steps) that a worker may be ahead
of the slowest worker.

    consistency=sync    s = 0          one update when all workers have pushed: same as all-reduce
    consistency=ssp     s = staleness  stale synchronous parallel (Ho et al., 2013): at clock t a
                                       worker sees all workers' updates up to clock t-s-1, all of
                                       its own, and newer ones that have arrived
    consistency=async   s = infinite   every gradient is applied on arrival (Dean et al., 2012)

A server replies to every worker that may go on. Before it replies, it applies all gradients that
have arrived, those of one clock as one update. So with s = 0 there is one combined update per
clock, and with s infinite each gradient is applied on arrival. The optimizer runs on the server,
and the learning rate is sent with the gradient. If there are several servers, each holds some of
the tensors. A codec encodes both directions: the gradients (with error feedback on the worker), and
the difference between the weights and the worker's copy of them.

With consistency=sync and exchange=gradients this is serial SGD on the whole batch. With
exchange=weights each worker steps its own optimizer: then it is serial SGD only without momentum,
or if the workers' shares of the samples do not change between steps (the partial last step of an
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
    RegionSpan,
    Server,
    ServerSpans,
    message_spans,
)
from paceline.types import Batch, ReplicaLike

UNBOUNDED = 1 << 40


@strategies.register("ps")
@dataclass
class ParameterServer(Strategy):
    """Servers hold the weights; workers push gradients and pull weights, synchronously,
    stale-synchronously or asynchronously.
    """

    consistency: Annotated[Literal["sync", "ssp", "async"], "how far workers may run apart"] = (
        "sync"
    )
    staleness: Annotated[int, "ssp: clocks that a worker may be ahead of the slowest"] = 3
    exchange: Annotated[
        Literal["gradients", "weights"], "what is pushed (weights: their change)"
    ] = "gradients"

    serves = "ranks"

    def __post_init__(self) -> None:
        if self.staleness < 0:
            raise BadRequest(f"ps: staleness={self.staleness}: it must be 0 or more")
        self.exchanges = self.exchange
        self.survives = self.consistency == "async"
        self.noise_adds_up = (self.exchange, self.ahead) == ("gradients", 0)
        self.in_step = self.resumes_exactly = self.ahead == 0  # type: ignore[misc]

    @property
    def ahead(self) -> int:
        """Clocks that a worker may be ahead of the slowest worker."""
        return {"sync": 0, "ssp": self.staleness, "async": UNBOUNDED}[self.consistency]

    # --- a worker

    def setup(self, ctx: Context, replica: ReplicaLike) -> None:
        super().setup(ctx, replica)
        self._note = Note(len(replica.lrs))
        self._server_spans = ServerSpans(replica.regions, len(ctx.servers))
        self._velocity = Velocity.taken(ctx, replica) if self.exchange == "gradients" else None
        self._coded = (
            []
            if ctx.codec.lossless
            else [_Coded(ctx, replica, spans) for spans in self._server_spans.of]
        )
        self._base = (
            [trained(r.params, r.grads).clone() for r in replica.regions]
            if self.exchange == "weights"
            else []
        )
        if ctx.worker_index == 0:  # the servers start from worker 0's weights
            for server, spans in zip(ctx.servers, self._server_spans.of, strict=True):
                for region, low, high in spans:
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
                f"ps: clip_norm requires one server: none of {len(self.ctx.servers)} servers has"
                " the whole gradient. Use --servers 1"
            )
        numbers = [float(batch.step), replica.clip_norm or 0.0, *replica.lrs]
        if self._coded:
            self._push_and_pull_coded(replica, sent, numbers)
        else:
            self._push_and_pull(replica, PUSH, sent, numbers)
        for base, region in zip(self._base, replica.regions, strict=False):
            base.copy_(trained(region.params, region.grads))
        self.observed = {
            "staleness": int(self._note.reply[0]),
            "missed": int(self._note.reply[1]),
        }

    def _moves(self, replica: ReplicaLike, batch: Batch) -> list[Tensor]:
        """Take a local step; return the change of the weights times this worker's share."""
        replica.update()
        for region, base in zip(replica.regions, self._base, strict=True):
            torch.sub(trained(region.params, region.grads), base, out=region.grads).mul_(
                batch.share
            )
        return [region.grads for region in replica.regions]

    def _push_and_pull(
        self, replica: ReplicaLike, kind: int, sent: list[Tensor], numbers: list[float]
    ) -> None:
        """Push `sent` (if any) and pull the weights, with all servers at once."""
        transport, works = self.ctx.transport, []
        pairs = list(zip(self.ctx.servers, self._server_spans.of, strict=True))
        for server, spans in pairs:  # receives first, so that replies can be written in place
            works.append(self._note.listen(transport, server))
            works += [
                transport.irecv(replica.regions[region].params[low:high], server)
                for region, low, high in spans
            ]
        for server, spans in pairs:
            works.append(self._note.send(transport, server, kind, numbers))
            works += [
                transport.isend(sent[region][low:high], server)
                for region, low, high in spans
                if sent
            ]
        for work in works:
            work.wait()

    def _push_and_pull_coded(
        self, replica: ReplicaLike, sent: list[Tensor], numbers: list[float]
    ) -> None:
        """Push and pull through the codec, with all servers at once."""
        transport, works = self.ctx.transport, []
        pairs = list(zip(self.ctx.servers, self._coded, strict=True))
        for server, coded in pairs:
            works.append(self._note.listen(transport, server))
            coded.inbox.listen(transport, server)
        for server, coded in pairs:
            works.append(self._note.send(transport, server, PUSH, numbers))
            coded.outbox.write([sent[region][low:high] for region, low, high in coded.spans])
            works += coded.outbox.send(transport, server)
        for server, coded in pairs:
            changes = coded.inbox.read(transport, server)
            for (region, low, high), known, moved in zip(
                coded.spans, coded.known, changes, strict=True
            ):
                replica.regions[region].params[low:high].copy_(known.add_(moved))
        for work in works:
            work.wait()

    def consensus(self, replica: ReplicaLike) -> list[Tensor] | None:
        """The servers' weights after all workers' last step: worker 0 pulls and broadcasts them."""
        ctx = self.ctx
        ctx.peers.barrier()
        average_buffers(ctx, replica)
        kept = [region.params.clone() for region in replica.regions]
        if ctx.worker_index == 0:
            self._push_and_pull(replica, PULL, [], [])
        for region in replica.regions:
            ctx.peers.broadcast(region.params)
        found = [region.params.clone() for region in replica.regions]
        for region, own in zip(replica.regions, kept, strict=True):
            region.params.copy_(own)
        return found

    def state(self) -> dict[str, Any]:
        """Worker 0 also saves the servers' state."""
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
        spans = ServerSpans(replica.regions, len(ctx.servers)).of[ctx.transport.rank - ctx.workers]
        Server(
            ctx, replica, spans, self.ahead, adds=self.exchange == "weights", survives=self.survives
        ).run()


class _Coded:
    """A worker's connection with one server through the codec."""

    def __init__(self, ctx: Context, replica: ReplicaLike, spans: list[RegionSpan]) -> None:
        self.spans, encoded_spans = spans, message_spans(replica.regions, spans)
        self.outbox, self.inbox = (
            Outbox(ctx, ctx.codec, encoded_spans),
            Inbox(ctx, ctx.codec.plain, encoded_spans),
        )
        self.known = [
            replica.regions[region].params[low:high].clone() for region, low, high in spans
        ]
