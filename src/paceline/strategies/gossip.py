"""Gossip: in every round each worker averages its weights with one neighbour (Boyd et al., 2006;
Lian et al., 2017).

    w_p, w_q <- (w_p + w_q) / 2        for the pairs (p, q) of this round's matching

Nobody ever talks to more than one other, so a round costs the same with four workers or four
thousand; news spreads in about log P rounds. The matching is drawn anew in every round, the same on
all workers (`topology=random`), or alternates between left and right neighbours (`ring`).
`mode=async` needs no rounds: whoever has made its step asks somebody, drawn at random, and a thread
of the other answers at once (`responder.py`; Lian et al., "Asynchronous Decentralized Parallel
SGD", 2018). There is an exact average at the end.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch

from paceline.codecs.base import Codec
from paceline.errors import BadRequest, PeerLost
from paceline.registry import strategies
from paceline.strategies.base import Context, Strategy
from paceline.strategies.parts.averaging import average_weights, trained
from paceline.strategies.parts.pairs import CodedMeeting
from paceline.strategies.parts.responder import Pairs
from paceline.transport.metered import Metered
from paceline.types import Batch, ReplicaLike


@strategies.register("gossip")
@dataclass
class Gossip(Strategy):
    """Weights averaged with one neighbour at a time."""

    every: Annotated[int, "steps between rounds"] = 1
    topology: Annotated[Literal["random", "ring"], "who meets whom"] = "random"
    mode: Annotated[
        Literal["sync", "async"], "async: a thread of each worker answers whoever asks"
    ] = "sync"

    exchanges = "weights"
    survives = True
    noise_adds_up = False

    def __post_init__(self) -> None:
        if self.every < 1:
            raise BadRequest(f"gossip: every={self.every}: 1 or more")
        self.in_step = self.resumes_exactly = self.mode == "sync"  # type: ignore[misc]
        self.needs_processes = self.mode == "async"  # type: ignore[misc]

    def setup(self, ctx: Context, replica: ReplicaLike) -> None:
        super().setup(ctx, replica)
        self._gone: set[int] = set()
        own = [trained(r.params, r.grads) for r in replica.regions]
        self._pairs: Pairs | None = None
        self._meetings: dict[int, CodedMeeting] = {}  # through a codec: by partner
        self._heard: list[torch.Tensor] = []
        if self.mode == "async" and ctx.workers > 1:
            self._pairs = Pairs(ctx, replica)
        elif ctx.codec.lossless:
            self._heard = [ctx.transport.allocate(w.numel(), w.dtype, w.device) for w in own]
        else:
            others = [p for p in range(ctx.workers) if p != ctx.worker_index]
            self._meetings = {p: CodedMeeting(ctx, ctx.codec, replica.regions) for p in others}

    def refuses(self, codec: Codec) -> str | None:
        return None

    def step(self, replica: ReplicaLike, batch: Batch) -> None:
        with self._pairs.lock if self._pairs is not None else nullcontext():
            replica.update()
        if (batch.step + 1) % self.every == 0:
            partner = self.partner(batch.step // self.every)
            if partner is not None and partner not in self._gone:
                try:
                    self._meet(replica, partner)
                except PeerLost as lost:
                    self._gone.add(partner)
                    if lost.rank not in (None, partner):
                        raise

    def partner(self, round_number: int) -> int | None:
        """Whom this worker meets; None when it is left over."""
        workers, me = self.ctx.workers, self.ctx.worker_index
        if self._pairs is not None and self.topology == "random":
            return (me + int(torch.randint(1, workers, (), generator=self.ctx.random))) % workers
        if self.topology == "random":
            line = torch.randperm(workers, generator=self.ctx.shared_random).tolist()
            where = line.index(me)
            other = where ^ 1
            return line[other] if other < workers else None
        other = me ^ 1 if round_number % 2 == 0 else ((me + 1) ^ 1) - 1
        if workers % 2 == 0:
            other %= workers
        return other if 0 <= other < workers else None

    def _meet(self, replica: ReplicaLike, partner: int) -> None:
        if self._pairs is not None:
            self._pairs.meet(partner)
            return
        line = self.ctx.transport  # by rank: the group of those who are there may change
        if self._meetings:
            self._meet_coded(replica, self._meetings[partner], line, partner)
            return
        for region, heard in zip(replica.regions, self._heard, strict=True):
            own = trained(region.params, region.grads)
            with line.together():
                works = [line.irecv(heard, partner), line.isend(own, partner)]
            for work in works:
                work.wait()
            own.add_(heard).mul_(0.5)

    def _meet_coded(
        self, replica: ReplicaLike, meeting: CodedMeeting, line: Metered, partner: int
    ) -> None:
        own = [trained(r.params, r.grads) for r in replica.regions]
        meeting.prepare(own)
        meeting.listen(line, partner)
        leaving = meeting.send(line, partner)
        meeting.hear(line, partner)
        for work in leaving:
            work.wait()
        meeting.average(own)

    def state(self) -> dict[str, Any]:
        return {"meetings": {str(p): meeting.state() for p, meeting in self._meetings.items()}}

    def load_state(self, state: dict[str, Any]) -> None:
        for partner, meeting in self._meetings.items():
            meeting.load(state["meetings"][str(partner)])

    def finish(self, replica: ReplicaLike) -> None:
        if self._pairs is not None:
            self.ctx.peers.barrier()  # nobody asks any more
            self._pairs.stop()
        average_weights(self.ctx, replica, 1 / self.ctx.peers.size, self.ctx.collective("auto"))
