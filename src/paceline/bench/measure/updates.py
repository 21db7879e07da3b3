"""Measure how many gradients per second an asynchronous parameter server applies.

Two workers send a constant gradient, so that nothing but the server takes time.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch

from paceline.launch.failures import root_cause
from paceline.launch.forks import on_forked_ranks
from paceline.registry import strategies, transports
from paceline.run.own_loop import Pace
from paceline.transport.base import Rendezvous, Waits
from paceline.types import Batch

WORKERS, SERVERS = 2, 1
SIDES = (600, 500)  # a linear layer: 300,500 parameters, 1.2 MB
WARM_UP = 50


def updates_per_s(transport: str, updates: int = 600) -> float:
    """Sum the two workers' updates per second."""
    results, failures = on_forked_ranks(
        partial(_rank, transport, updates), WORKERS + SERVERS, waits=Waits(60.0)
    )
    if failures:
        raise root_cause(failures, WORKERS)
    return float(sum(rate for rate in results.values() if rate is not None))


def _rank(transport: str, updates: int, rendezvous: Rendezvous, say: Any) -> float | None:
    torch.set_num_threads(1)
    connected = transports.entry(transport).make.connect(rendezvous)
    strategy = strategies.build("ps:consistency=async")
    pace = Pace(strategy, connected, WORKERS, "none", 0, 0, build=_build)
    if pace.ctx.role == "server":
        pace.serve()
        return None
    pace.prepare(*_build())
    for region in pace.replica.regions:
        region.grads.fill_(1e-6)
    for step in range(WARM_UP + updates):
        if step == WARM_UP:
            pace.ctx.peers.barrier()
            began = time.perf_counter()
        pace.strategy.step(pace.replica, Batch(None, None, 1.0, float(WORKERS), 0, step))
    seconds = time.perf_counter() - began
    pace.ctx.peers.barrier()
    pace.strategy.leave()
    return updates / seconds


def _build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Make what every rank trains; the server builds its own, so that nothing need be sent."""
    model = torch.nn.Linear(*SIDES)
    return model, torch.optim.SGD(model.parameters(), lr=0.01)
