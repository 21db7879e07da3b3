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

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from torch import Tensor

from paceline.codecs.base import Codec
from paceline.errors import BadRequest
from paceline.registry import strategies
from paceline.strategies.base import (
    APPROXIMATELY,
    Context,
    Resumes,
    Strategy,
    Traits,
    average_buffers,
)
from paceline.strategies.parts.mailbox import Inbox, Outbox
from paceline.strategies.parts.momentum import Velocity
from paceline.strategies.parts.pattern import Exchange, PushPull, Setting
from paceline.strategies.parts.reference import Reference
from paceline.strategies.parts.serving import (
    PULL,
    PUSH,
    STATE,
    Note,
    RegionSpan,
    Server,
    ServerSpans,
    memories_of_servers,
    message_spans,
)
from paceline.transport.notes import send_bytes
from paceline.types import Batch

if TYPE_CHECKING:
    from paceline.replica.replica import Replica
    from paceline.strategies.parts.saved import Saved

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

    traits = Traits(serves="ranks")

    def __post_init__(self) -> None:
        if self.staleness < 0:
            raise BadRequest(f"ps: staleness={self.staleness}: it must be 0 or more")
        self.traits = replace(
            self.traits,
            exchanges=self.exchange,
            survives=self.consistency == "async",
            noise_adds_up=(self.exchange, self.ahead) == ("gradients", 0),
            in_step=self.ahead == 0,
            bounded=self.ahead < UNBOUNDED,
            # after a loss worker 0 saves its weights alone
            resumes=Resumes(after_loss="told") if self.ahead == 0 else APPROXIMATELY,
        )

    @property
    def ahead(self) -> int:
        """Clocks that a worker may be ahead of the slowest worker."""
        return {"sync": 0, "ssp": self.staleness, "async": UNBOUNDED}[self.consistency]

    def pattern(self, step: int, setting: Setting) -> Sequence[Exchange]:
        return (PushPull(self.ahead),)

    # --- a worker

    def setup(self, ctx: Context, replica: Replica, saved: Saved | None = None) -> None:
        super().setup(ctx, replica, saved)
        self._note = Note(len(replica.lrs))
        self._server_spans = ServerSpans(replica.regions, len(ctx.servers))
        self._velocity = (
            Velocity.taken(ctx, replica, saved) if self.exchange == "gradients" else None
        )
        self._coded = (
            []
            if ctx.codec.lossless
            else [_Coded(ctx, replica, spans) for spans in self._server_spans.of]
        )
        # exchange=weights: the weights as this worker has pulled them
        self._base = Reference(
            [r.trained for r in replica.regions] if self.exchange == "weights" else []
        )
        if saved is not None:
            self._remember(saved)
        if ctx.worker_index == 0:  # the servers start from worker 0's weights
            memories = memories_of_servers(saved, len(ctx.servers), ctx.workers)
            for server, spans, memory in zip(
                ctx.servers, self._server_spans.of, memories, strict=True
            ):
                for region, low, high in spans:
                    ctx.transport.send(replica.regions[region].params[low:high], server)
                send_bytes(ctx.transport, memory, server)
        ctx.peers.barrier()

    def _remember(self, saved: Saved) -> None:
        """Take over what this worker remembered: the weights that it had pulled last."""
        if saved.own:
            saved.fill("base", self._base.weights)
        kept = saved["codec"]
        if not saved.own or len(kept) != len(self._coded):  # other workers or servers than before
            if kept:
                saved.anew(f"what {self.ctx.codec.name} remembers")
            return
        for coded, memory in zip(self._coded, kept, strict=True):
            coded.outbox.states = memory["states"]
            coded.known.rebase(memory["known"])

    def refuses(self, codec: Codec) -> str | None:
        return None

    def step(self, replica: Replica, batch: Batch) -> None:
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
        if self._base.weights:
            self._base.rebase([region.trained for region in replica.regions])
        self.observed = {
            "staleness": int(self._note.reply[0]),
            "missed": int(self._note.reply[1]),
        }

    def _moves(self, replica: Replica, batch: Batch) -> list[Tensor]:
        """Take a local step; return the change of the weights times this worker's share."""
        replica.update()
        moves = [region.grads for region in replica.regions]
        self._base.difference([region.trained for region in replica.regions], moves)
        return [move.mul_(batch.share) for move in moves]

    def _push_and_pull(
        self, replica: Replica, kind: int, sent: list[Tensor], numbers: list[float]
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
        self, replica: Replica, sent: list[Tensor], numbers: list[float]
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
            coded.known.advance(coded.inbox.read(transport, server))
            coded.known.give(
                [replica.regions[region].params[low:high] for region, low, high in coded.spans]
            )
        for work in works:
            work.wait()

    def consensus(self, replica: Replica) -> list[Tensor] | None:
        """The servers' weights after all workers' last step: worker 0 pulls and broadcasts them."""
        ctx = self.ctx
        ctx.peers.barrier()
        average_buffers(ctx, replica)
        kept = [region.params.clone() for region in replica.regions]
        try:
            if ctx.worker_index == 0:
                self._push_and_pull(replica, PULL, [], [])
            for region in replica.regions:
                ctx.peers.broadcast(region.params)
            return [region.params.clone() for region in replica.regions]
        finally:
            for region, own in zip(replica.regions, kept, strict=True):
                region.params.copy_(own)

    def state(self) -> dict[str, Any]:
        """Worker 0 also saves the servers' state."""
        kept: dict[str, Any] = {
            "base": self._base.weights,
            "velocity": self._velocity.state() if self._velocity is not None else [],
        }
        kept["codec"] = [
            {"states": coded.outbox.states, "known": coded.known.weights} for coded in self._coded
        ]
        if self.ctx.worker_index == 0:
            kept["servers"] = [
                self._note.fetch(self.ctx.transport, server, STATE) for server in self.ctx.servers
            ]
        return kept

    def leave(self) -> None:
        for server in self.ctx.servers:
            self._note.bye(self.ctx.transport, server)

    # --- a server

    def serve(self, ctx: Context, replica: Replica) -> None:
        spans = ServerSpans(replica.regions, len(ctx.servers)).of[ctx.transport.rank - ctx.workers]
        Server(
            ctx,
            replica,
            spans,
            self.ahead,
            adds=self.exchange == "weights",
            survives=self.traits.survives,
        ).run()


class _Coded:
    """A worker's connection with one server through the codec."""

    def __init__(self, ctx: Context, replica: Replica, spans: list[RegionSpan]) -> None:
        self.spans, encoded_spans = spans, message_spans(replica.regions, spans)
        self.outbox, self.inbox = (
            Outbox(ctx, ctx.codec, encoded_spans),
            Inbox(ctx, ctx.codec.plain, encoded_spans),
        )
        self.known = Reference(
            [replica.regions[region].params[low:high] for region, low, high in spans]
        )
