"""The planner's event queue gives the clocks and the messages of the strategies' own code."""

from __future__ import annotations

import pytest
from tests.contract.test_patterns import ALL, CODED
from tests.traces import Trace, traced

from paceline.codecs.feedback import build_codec
from paceline.planning.engine import Engine
from paceline.planning.programs import Costs, Lineup
from paceline.registry import strategies
from paceline.transport.virtual import Link, Network

STEPS, PER_EPOCH = 6, 3
SLOW_LINK = Link(latency_s=0.05, s_per_byte=1e-3)
GAMMA = 1e-4
MANY = pytest.param(16, marks=pytest.mark.slow)


def compute(worker: int, step: int) -> float:
    return 1 + worker / 8 if step % 2 == 0 else 2.0


def both(
    strategy: str, workers: int, codec: str = "none", per_host: int = 1
) -> tuple[Trace, Engine]:
    """Run the strategy's code on `simulated`, and its declared exchanges in the event queue."""
    servers = 2 if strategies.build(strategy).traits.serves == "ranks" else 0
    hosts = tuple(rank // per_host for rank in range(workers + servers))
    network = Network(hosts, SLOW_LINK, Link(0.01, 1e-4))
    times = [[compute(w, s) for s in range(STEPS)] for w in range(workers)]
    trace = traced(
        strategy, times, network, servers=servers, codec=codec, steps_per_epoch=PER_EPOCH,
        s_per_byte_added=GAMMA,
    )  # fmt: skip
    lineup = Lineup(
        strategies.build(strategy), build_codec(codec), trace.regions[0].grad_layout, workers,
        servers, PER_EPOCH, costs=Costs(GAMMA, summed_s_per_byte=GAMMA), fastest="ring",
    )  # fmt: skip
    engine = Engine(network, keeps=True)
    engine.run(lineup.programs(compute, STEPS))
    return trace, engine


def check(strategy: str, workers: int, codec: str = "none", per_host: int = 1) -> None:
    trace, engine = both(strategy, workers, codec, per_host)
    assert engine.clocks[:workers] == pytest.approx([e[-1] for e in trace.ended_s], rel=1e-9)


@pytest.mark.parametrize("workers", [2, 3, 4, MANY])
@pytest.mark.parametrize("strategy", ALL)
def test_clocks_are_those_of_the_code(strategy: str, workers: int) -> None:
    check(strategy, workers)


@pytest.mark.parametrize(("strategy", "codec"), CODED)
def test_clocks_of_encoded_messages(strategy: str, codec: str) -> None:
    check(strategy, 3, codec)


@pytest.mark.parametrize("strategy", ["allreduce", "allreduce:collective=tree", "ps", "gossip"])
def test_clocks_where_ranks_share_hosts(strategy: str) -> None:
    check(strategy, 4, per_host=2)
