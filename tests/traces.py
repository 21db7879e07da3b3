"""Strategies on the transport `simulated`, with all times given: the messages that they send."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from paceline.codecs.base import Codec
from paceline.codecs.feedback import build_codec
from paceline.collectives import execute
from paceline.collectives.base import schedule_of
from paceline.collectives.execute import SEGMENT_BYTES, compile_for_rank
from paceline.collectives.schedule import Schedule
from paceline.registry import strategies
from paceline.replica.flat import Region
from paceline.replica.replica import Replica
from paceline.run.rank import make_context
from paceline.strategies.parts.pattern import Exchange, PushPull, Reduction, Setting, Swap
from paceline.strategies.parts.serving import ServerSpans, message_spans
from paceline.transport.simulated import Sent, SimulatedHub, SimulatedTransport
from paceline.transport.virtual import Network
from paceline.types import Batch
from tests.small import make_pairs, small_net

BATCH = 4
Message = tuple[int, int, int]  # source, target, bytes


class Silent:
    """A recorder that keeps nothing."""

    def write(self, kind: str, **content: Any) -> None: ...


@dataclass
class Trace:
    """What the ranks of a traced run sent in its steps, and when each worker's step ended."""

    regions: Sequence[Region]
    sent: dict[tuple[int, int], list[Sent]]  # by worker and step; a server's, by its target
    began_s: float  # when the first step began, on all workers: after the set-up
    ended_s: list[list[float]]  # by worker and step, from `began_s` on
    weights: list[list[Tensor]]  # by worker

    def messages(self, step: int) -> Counter[Message]:
        """All messages of a step."""
        return Counter(
            (s.source, s.target, s.size_bytes)
            for (_, at), sent in self.sent.items()
            if at == step
            for s in sent
        )


class _Log(list[Sent]):
    """Sorts messages by the worker and the step in which it is."""

    def __init__(self, workers: int) -> None:
        super().__init__()
        self.step: dict[int, int] = {}  # by worker; none: it is in no step
        self.of: dict[tuple[int, int], list[Sent]] = defaultdict(list)
        self.workers = workers

    def append(self, sent: Sent) -> None:
        worker = sent.source if sent.source < self.workers else sent.target
        if worker in self.step:
            self.of[worker, self.step[worker]].append(sent)


@contextmanager
def without_agreements() -> Iterator[None]:
    """Leave out the comparison of buffers at their first use, for which all ranks wait."""
    with patch.object(execute, "agree", lambda transport, what: None):
        yield


def traced(
    strategy: str,
    compute_s: Sequence[Sequence[float]],
    network: Network | None = None,
    *,
    servers: int = 0,
    codec: str = "none",
    steps_per_epoch: int = 4,
    s_per_byte_added: float = 0.0,
    seed: int = 0,
) -> Trace:
    """Run a strategy whose worker p computes for `compute_s[p][step]` seconds."""
    workers, steps = len(compute_s), len(compute_s[0])
    inputs, targets = make_pairs(workers * BATCH * steps)
    log = _Log(workers)

    def body(transport: SimulatedTransport) -> tuple[Any, ...]:
        own = strategies.build(strategy)
        ctx = make_context(transport, own, workers, codec=codec, seed=seed, recorder=Silent())
        torch.manual_seed(0)
        model = small_net()
        replica = Replica(
            model,
            torch.optim.SGD(model.parameters(), 0.1),
            torch.nn.CrossEntropyLoss(),
            allocate=transport.allocate,
        )
        me = transport.rank
        if me >= workers:
            own.serve(ctx, replica)
            return ()
        own.setup(ctx, replica)
        ctx.peers.barrier()
        began, ended = transport.now(), []
        for step in range(steps):
            first = (step * workers + me) * BATCH
            mine = slice(first, first + BATCH)
            epoch, ends = step // steps_per_epoch, (step + 1) % steps_per_epoch == 0
            batch = Batch(
                inputs[mine], targets[mine], float(BATCH), float(workers * BATCH), epoch, step, ends
            )
            log.step[me] = step
            own.begin(replica, batch)
            replica.forward_backward(batch, own.scale(batch))
            transport.charge(compute_s[me][step])
            own.step(replica, batch)
            ended.append(transport.now() - began)
        del log.step[me]
        ctx.peers.barrier()
        own.finish(replica)
        weights = own.consensus(replica) or replica.weights()
        own.leave()
        return ended, [w.clone() for w in weights], replica.regions, began

    with without_agreements():
        found = SimulatedHub(workers + servers, network, s_per_byte_added, log).run(body)
    for result in found:
        if isinstance(result, BaseException):
            raise result
    ended_s, weights = [f[0] for f in found[:workers]], [f[1] for f in found[:workers]]
    return Trace(found[0][2], dict(log.of), found[0][3], ended_s, weights)


# --- what a pattern means in messages


def declared(
    strategy: str, step: int, setting: Setting, regions: Sequence[Region], codec: str, servers: int
) -> Counter[Message]:
    """The messages of a step as the strategy declares them."""
    exchanges = strategies.build(strategy).pattern(step, setting)
    found: Counter[Message] = Counter()
    for exchange in exchanges:
        for message in _messages(exchange, setting.workers, regions, build_codec(codec), servers):
            found[message] += 1
    return found


def _messages(
    exchange: Exchange, workers: int, regions: Sequence[Region], codec: Codec, servers: int
) -> Iterator[Message]:
    if isinstance(exchange, Reduction):
        name = "ring" if exchange.schedule in ("auto", "native") else exchange.schedule
        for region in regions:
            yield from _reduction(name, workers, region, codec if exchange.coded else None)
    elif isinstance(exchange, Swap):
        sizes = [_size(codec, r.grad_layout, r.grads) for r in regions]
        for worker, partner in enumerate(exchange.partners):
            if partner is not None:
                yield from ((worker, partner, size) for size in sizes)
    else:
        assert isinstance(exchange, PushPull)
        for server, spans in enumerate(ServerSpans(regions, servers).of, start=workers):
            for layout, values in message_spans(regions, spans):
                size = _size(codec, layout, values)
                for worker in range(workers):
                    yield (worker, server, size)
                    yield (server, worker, size)


def _reduction(name: str, workers: int, region: Region, codec: Codec | None) -> Iterator[Message]:
    """Which messages reduce one buffer over the workers."""
    numel, itemsize = region.grads.numel(), region.grads.element_size()
    if codec is None or codec.lossless:
        yield from _plain(schedule_of(name, workers), workers, numel, itemsize)
    elif codec.kind == "gather":
        length = codec.message_bytes(region.grad_layout)
        yield from _plain(schedule_of("all-gather", workers), workers, workers * length, 1)
    elif codec.name in ("fp16", "bf16") and not name.startswith("stepwise"):
        yield from _plain(schedule_of(name, workers), workers, numel, 2)
    else:
        assert codec.wire is not None
        yield from _encoded(schedule_of(name, workers), numel, codec)


def _plain(schedule: Schedule, workers: int, numel: int, itemsize: int) -> Iterator[Message]:
    for rank in range(workers):
        for round_ in compile_for_rank(schedule, rank, numel, SEGMENT_BYTES // itemsize):
            for target, low, high in round_.sends:
                yield (rank, target, (high - low) * itemsize)


def _encoded(schedule: Schedule, numel: int, codec: Codec) -> Iterator[Message]:
    assert codec.wire is not None
    for transfers in schedule.rounds:
        for t in transfers:
            bounds = [schedule.bounds(c, numel) for c in range(t.start, t.stop)]
            size = sum(codec.wire.length(high - low) for low, high in bounds if high > low)
            if size:
                yield (t.source, t.target, size)


def _size(codec: Codec, layout: Any, values: Tensor) -> int:
    return values.nbytes if codec.lossless else codec.message_bytes(layout)
