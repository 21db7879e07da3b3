"""Measure what an exchange costs: strategies run in turns, in blocks of steps, in the same
processes, so that noise of the machine hits all alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from paceline.data.base import Data
from paceline.launch.failures import root_cause
from paceline.launch.forks import on_forked_ranks
from paceline.registry import models, strategies, transports
from paceline.run.own_loop import Pace
from paceline.strategies.base import Strategy
from paceline.transport.base import Rendezvous, Waits
from paceline.transport.choose import best_transport
from paceline.types import Batch

if TYPE_CHECKING:
    from paceline.replica.replica import Replica

WORKERS = 2
STEPS = 16  # a block: local-sgd:every=16 exchanges once in it
ALONE = "one process"
FREE = "no communication"
CONTENDERS = (FREE, "allreduce", "local-sgd:every=16", "hogwild")


class WithoutCommunication(Strategy):
    """Updates each worker on its own. No strategy that exchanges can be faster."""

    name = "without-communication"
    exchanges = "nothing"

    def step(self, replica: Replica, batch: Batch) -> None:
        replica.update()


def bench_blocks(data: Data, batch_size: int, blocks: int) -> dict[str, Any]:
    """Measure the samples per second of each contender, block by block, and the cost of waiting.

    `bound` is the most that a synchronous strategy can reach here: the mean time of a step divided
    by the mean time of the slower worker's step, both from the blocks without communication.
    """
    results, failures = on_forked_ranks(
        partial(_rank, data, batch_size, blocks), WORKERS, waits=Waits(120.0)
    )
    if failures:
        raise root_cause(failures, WORKERS)
    rates = {
        name: [
            sum(r["blocks"][name][i] for r in results.values() if name in r["blocks"])
            for i in range(blocks)
        ]
        for name in (*CONTENDERS, ALONE)
    }
    steps = [results[rank]["steps"] for rank in range(WORKERS)]
    slowest = statistics.fmean(map(max, zip(*steps, strict=True)))
    return {"rates": rates, "bound": statistics.fmean(statistics.fmean(s) for s in steps) / slowest}


def _rank(
    data: Data, batch_size: int, blocks: int, rendezvous: Rendezvous, say: Any
) -> dict[str, Any]:
    torch.set_num_threads(1)
    transport = transports.entry(best_transport()).make.connect(rendezvous)
    loops = {name: _loop(name, transport, data, batch_size) for name in CONTENDERS}
    found: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    if rendezvous.rank == 0:
        found[ALONE] = []
    steps: list[float] = []
    for number in range(blocks + 1):  # the first warms up
        for name, loop in loops.items():
            transport.barrier()
            began = time.perf_counter()
            taken = [next(loop) for _ in range(STEPS)]
            rate = STEPS * batch_size / (time.perf_counter() - began)
            if number:
                found[name].append(rate)
                steps += taken if name == FREE else []
        transport.barrier()
        if rendezvous.rank == 0:  # rank 1 waits at the next barrier
            began = time.perf_counter()
            for _ in range(STEPS):
                next(loops[FREE])
            if number:
                found[ALONE].append(STEPS * batch_size / (time.perf_counter() - began))
    transport.barrier()
    return {"blocks": found, "steps": steps}


def _loop(name: str, transport: Any, data: Data, batch_size: int) -> Iterator[float]:
    """Make endless steps; each yields its seconds."""
    strategy = WithoutCommunication() if name == FREE else strategies.build(name)
    pace = Pace(strategy, transport, WORKERS, "none", 0, 0)
    torch.manual_seed(0)
    model: nn.Module = models.build("cnn", input_shape=data.input_shape, classes=data.classes)
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    prepared, _, batches = pace.prepare(model, optimizer, data.train, batch_size=batch_size)
    return _steps(pace, prepared, batches)


def _steps(pace: Pace, model: nn.Module, batches: Any) -> Iterator[float]:
    while True:
        for inputs, targets in batches:
            began = time.perf_counter()
            formatted = inputs.contiguous(memory_format=torch.channels_last)
            loss = nn.functional.cross_entropy(model(formatted), targets)
            loss.item()
            pace.step(loss)
            yield time.perf_counter() - began
