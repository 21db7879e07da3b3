"""What a strategy declares to exchange is what its code sends, and when."""

from __future__ import annotations

import pytest
from tests.traces import declared, traced

from paceline.errors import BadRequest
from paceline.registry import strategies
from paceline.strategies.parts.pattern import Setting

STEPS, PER_EPOCH = 8, 3
ALL = [
    "allreduce",
    "allreduce:exchange=weights",
    "allreduce:when=epoch",
    "allreduce:collective=tree",
    "allreduce:collective=halving-doubling",
    "allreduce:collective=hierarchical",
    "allreduce:collective=star",
    "ring-reduce",
    "ring-reduce:exchange=gradients",
    "stepwise",
    "stepwise:chunked=false,rotate=false",
    "stepwise:full_every=3,exchange=gradients",
    "ps",
    "ps:consistency=ssp,staleness=1",
    "ps:consistency=async",
    "ps:exchange=weights",
    "local-sgd:every=3",
    "local-sgd:every=epoch",
    "local-sgd:every=2epochs",
    "local-sgd:every=2,post=3,collective=tree",
    "diloco:every=2",
    "gossip",
    "gossip:every=2",
    "gossip:topology=ring",
    "psgd",
    "hogwild",
]
CODED = [
    ("allreduce", "fp16"),
    ("allreduce:collective=tree", "int8"),
    ("allreduce", "sign"),
    ("allreduce:when=epoch", "topk"),
    ("ring-reduce", "int8"),
    ("stepwise", "fp16"),
    ("stepwise:full_every=3", "int8"),
    ("ps", "int8"),
    ("ps:consistency=async", "sign"),
    ("local-sgd:every=2", "sign"),
    ("diloco:every=2", "fp16"),
    ("gossip", "int8"),
]
MANY = pytest.param(16, marks=pytest.mark.slow)


def check(strategy: str, workers: int, codec: str = "none") -> None:
    """Worker p computes for 1 + p/8 s in even steps and for 2 s in odd ones."""
    servers = 2 if strategies.build(strategy).traits.serves == "ranks" else 0
    compute = [[1 + p / 8 if s % 2 == 0 else 2.0 for s in range(STEPS)] for p in range(workers)]
    trace = traced(strategy, compute, servers=servers, codec=codec, steps_per_epoch=PER_EPOCH)
    setting = Setting(workers, PER_EPOCH, compressed=codec != "none")
    for step in range(STEPS):
        said = declared(strategy, step, setting, trace.regions, codec, servers)
        assert trace.messages(step) == said, f"step {step}"


@pytest.mark.parametrize("workers", [2, 3, 4, MANY])
@pytest.mark.parametrize("strategy", ALL)
def test_the_messages_are_those_that_are_declared(strategy: str, workers: int) -> None:
    check(strategy, workers)


@pytest.mark.parametrize("workers", [3, MANY])
@pytest.mark.parametrize(("strategy", "codec"), CODED)
def test_encoded_messages_are_those_that_are_declared(
    strategy: str, codec: str, workers: int
) -> None:
    check(strategy, workers, codec)


def test_every_strategy_that_runs_in_threads_is_compared() -> None:
    named = {text.partition(":")[0] for text in ALL}
    alone = {e.name for e in strategies if e.make.traits.most_workers == 1}
    assert {e.name for e in strategies if not e.make.traits.needs_processes} == named | alone


def test_serial_and_ddp_declare_their_exchanges() -> None:
    assert strategies.build("serial").pattern(0, Setting(1, 5)) == ()
    assert [e.schedule for e in strategies.build("ddp").pattern(0, Setting(4, 5))] == ["native"]


@pytest.mark.parametrize("strategy", ["gossip:mode=async", "local-sgd:optimizer_state=average"])
def test_what_cannot_be_declared_says_so(strategy: str) -> None:
    with pytest.raises(BadRequest, match="measure it by paceline study"):
        strategies.build(strategy).pattern(0, Setting(4, 5))
