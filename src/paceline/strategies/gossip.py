"""Gossip: in every round each worker averages its weights with one neighbour (Boyd et al., 2006;
Lian et al., 2017).

    w_p, w_q <- (w_p + w_q) / 2        for the pairs (p, q) of this round's matching

In a round each worker exchanges with one other, so a round costs the same with four workers or four
thousand. Values spread to all workers in about log P rounds. With `topology=random` all workers
draw the same new matching in every round; with `ring` it alternates between left and right
neighbours. `mode=async` has no rounds: after its step a worker sends a request to a random partner,
and a thread of that partner replies at once (parts/async_pairs.py; Lian et al., "Asynchronous
Decentralized Parallel SGD", 2018). The weights are averaged exactly at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch

from paceline.codecs.base import Codec
from paceline.collectives.base import usual
from paceline.common.seeding import generator
from paceline.errors import BadRequest, PeerLost
from paceline.registry import strategies
from paceline.strategies.base import APPROXIMATELY, Context, Resumes, Strategy, Traits
from paceline.strategies.parts.async_pairs import AsyncPairs
from paceline.strategies.parts.averaging import average_weights
from paceline.strategies.parts.pairs import CodedPairing
from paceline.strategies.parts.pattern import Exchange, Setting, Swap
from paceline.transport.base import Transport
from paceline.types import Batch

if TYPE_CHECKING:
    from paceline.replica.replica import Replica
    from paceline.strategies.parts.saved import Saved


@strategies.register("gossip")
@dataclass
class Gossip(Strategy):
    """Each worker averages its weights with one other worker at a time."""

    every: Annotated[int, "steps between rounds"] = 1
    topology: Annotated[Literal["random", "ring"], "how partners are chosen"] = "random"
    mode: Annotated[
        Literal["sync", "async"], "async: a thread of each worker replies to requests"
    ] = "sync"

    traits = Traits(
        exchanges="weights",
        survives=True,
        weighs_equally=True,
        noise_adds_up=False,
        resumes=Resumes(after_loss="told"),
    )

    def __post_init__(self) -> None:
        if self.every < 1:
            raise BadRequest(f"gossip: every={self.every}: it must be 1 or more")
        # For `pattern`: a setting, its generator, and the orders drawn so far.
        self._drawn: tuple[Setting, torch.Generator, list[list[int]]] | None = None
        if self.mode == "async":
            self.traits = replace(
                self.traits,
                in_step=False,
                needs_processes=True,
                needs_second_channel=True,
                resumes=APPROXIMATELY,
            )

    def setup(self, ctx: Context, replica: Replica, saved: Saved | None = None) -> None:
        super().setup(ctx, replica, saved)
        self._gone = set(range(ctx.workers)) - set(ctx.transport.present)
        own = [r.trained for r in replica.regions]
        self._pairs: AsyncPairs | None = None
        self._pairings: dict[int, CodedPairing] = {}  # with a codec: by partner
        self._received: list[torch.Tensor] = []
        if self.mode == "async" and ctx.workers > 1:
            self._pairs = AsyncPairs(ctx, replica)
        elif ctx.codec.lossless:
            self._received = [ctx.transport.allocate(w.numel(), w.dtype, w.device) for w in own]
        else:
            others = [p for p in range(ctx.workers) if p != ctx.worker_index]
            self._pairings = {
                p: CodedPairing(ctx, ctx.codec, replica.regions, self._saved_of(p, saved))
                for p in others
            }

    def refuses(self, codec: Codec) -> str | None:
        return None

    def pattern(self, step: int, setting: Setting) -> Sequence[Exchange]:
        if self.mode == "async":
            return super().pattern(step, setting)
        if (step + 1) % self.every:
            return ()
        if self.topology == "ring":
            number, workers = step // self.every, setting.workers
            return (Swap(tuple(neighbour(p, number, workers) for p in range(workers))),)
        orders = self._orders(setting, step // self.every + 1)
        return (Swap(tuple(matched(orders[-1]))),)

    def _orders(self, setting: Setting, rounds: int) -> list[list[int]]:
        """The orders that the workers of a run draw in its first rounds; they are kept."""
        if self._drawn is None or self._drawn[0] != setting:
            self._drawn = (setting, generator(setting.seed, "strategy"), [])
        _, shared_random, orders = self._drawn
        while len(orders) < rounds:
            orders.append(torch.randperm(setting.workers, generator=shared_random).tolist())
        return orders[:rounds]

    def step(self, replica: Replica, batch: Batch) -> None:
        with self._pairs.lock if self._pairs is not None else nullcontext():
            replica.update()
        if (batch.step + 1) % self.every == 0:
            partner = self.partner(batch.step // self.every)
            if partner is not None and partner not in self._gone:
                try:
                    self._average_with(replica, partner)
                except PeerLost as lost:
                    self._gone.add(partner)
                    if lost.rank not in (None, partner):
                        raise

    def partner(self, round_number: int) -> int | None:
        """This worker's partner in a round; None if it has none."""
        workers, me = self.ctx.workers, self.ctx.worker_index
        if self._pairs is not None and self.topology == "random":
            return (me + int(torch.randint(1, workers, (), generator=self.ctx.random))) % workers
        if self.topology == "random":
            order = torch.randperm(workers, generator=self.ctx.shared_random).tolist()
            return matched(order)[me]
        return neighbour(me, round_number, workers)

    def _average_with(self, replica: Replica, partner: int) -> None:
        if self._pairs is not None:
            self._pairs.average_with(partner)
            return
        transport = self.ctx.transport  # world ranks: `peers` changes when a worker dies
        if self._pairings:
            self._average_coded(replica, self._pairings[partner], transport, partner)
            return
        for region, received in zip(replica.regions, self._received, strict=True):
            own = region.trained
            with transport.together():
                works = [transport.irecv(received, partner), transport.isend(own, partner)]
            for work in works:
                work.wait()
            own.add_(received).mul_(0.5)
            transport.added(received.nbytes)

    def _average_coded(
        self, replica: Replica, pairing: CodedPairing, transport: Transport, partner: int
    ) -> None:
        own = [r.trained for r in replica.regions]
        pairing.prepare(own)
        pairing.listen(transport, partner)
        leaving = pairing.send(transport, partner)
        pairing.receive(transport, partner)
        for work in leaving:
            work.wait()
        pairing.average(own)

    def state(self) -> dict[str, Any]:
        return {"meetings": {str(p): pairing.state() for p, pairing in self._pairings.items()}}

    def _saved_of(self, partner: int, saved: Saved | None) -> Saved | None:
        """What this worker and a partner both remember of each other."""
        if saved is None or not saved["meetings"]:
            return None
        if not {self.ctx.worker_index, partner} <= saved.members:
            saved.anew("what a pair of workers knows of each other's weights")
            return None
        return saved.part("meetings").part(str(partner))

    def finish(self, replica: Replica) -> None:
        if self._pairs is not None:
            self.ctx.peers.barrier()  # no worker sends requests any more
            self._pairs.stop()
        average_weights(self.ctx, replica, 1 / self.ctx.peers.size, usual(self.ctx.peers))


def matched(order: list[int]) -> list[int | None]:
    """The workers' partners: the first in the order has the second, the third the fourth."""
    partners: list[int | None] = [None] * len(order)
    for first, second in zip(order[::2], order[1::2], strict=False):
        partners[first], partners[second] = second, first
    return partners


def neighbour(worker: int, round_number: int, workers: int) -> int | None:
    """A worker's partner in a ring: its right and its left neighbour in turn."""
    other = worker ^ 1 if round_number % 2 == 0 else ((worker + 1) ^ 1) - 1
    if workers % 2 == 0:
        other %= workers
    return other if 0 <= other < workers else None
