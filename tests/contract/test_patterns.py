"""What a strategy declares to exchange is what its code sends, and when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.conftest import identical
from tests.traces import declared, traced

import paceline
from paceline.errors import BadRequest
from paceline.registry import strategies
from paceline.strategies.parts.pattern import Setting
from paceline.transport.virtual import Link, Network

STEPS, PER_EPOCH = 8, 3
THREADS = [
    e.name
    for e in strategies
    if not e.make.traits.needs_processes and e.make.traits.most_workers != 1
]
ALL = [
    *THREADS,
    "allreduce:exchange=weights",
    "allreduce:when=epoch",
    "allreduce:collective=tree",
    "allreduce:collective=halving-doubling",
    "allreduce:collective=hierarchical",
    "allreduce:collective=star",
    "ring-reduce:exchange=gradients",
    "stepwise:chunked=false,rotate=false",
    "stepwise:full_every=3,exchange=gradients",
    "ps:consistency=ssp,staleness=1",
    "ps:consistency=async",
    "ps:exchange=weights",
    "local-sgd:every=3",
    "local-sgd:every=epoch",
    "local-sgd:every=2epochs",
    "local-sgd:every=3,post=4,collective=tree",
    "diloco:every=2",
    "gossip:every=2",
    "gossip:topology=ring",
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
    hosts = tuple(rank // 2 for rank in range(workers + servers))
    network = Network(hosts, Link(0.01, 1e-4), Link(0.001, 1e-5))
    trace = traced(
        strategy, compute, network, servers=servers, codec=codec, steps_per_epoch=PER_EPOCH
    )
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


@given(st.integers(1, 64), st.integers(1, 3), st.sampled_from(["random", "ring"]), st.integers())
def test_gossip_declares_pairs(workers: int, every: int, topology: str, seed: int) -> None:
    """Each worker is its partner's partner, and the answer depends on the step alone."""
    strategy, setting = f"gossip:every={every},topology={topology}", Setting(workers, 5, seed)
    forwards, backwards = strategies.build(strategy), strategies.build(strategy)
    found = [forwards.pattern(step, setting) for step in range(7)]
    assert found == [backwards.pattern(step, setting) for step in reversed(range(7))][::-1]
    assert [bool(f) for f in found] == [(step + 1) % every == 0 for step in range(7)]
    for swap in (exchange for exchanges in found for exchange in exchanges):
        pairs = [(p, q) for p, q in enumerate(swap.partners) if q is not None]
        assert all(swap.partners[q] == p != q for p, q in pairs)
        assert workers - len(pairs) <= 2


def test_serial_and_ddp_declare_their_exchanges() -> None:
    assert strategies.build("serial").pattern(0, Setting(1, 5)) == ()
    assert [e.schedule for e in strategies.build("ddp").pattern(0, Setting(4, 5))] == ["native"]


@pytest.mark.parametrize("strategy", ["gossip:mode=async", "local-sgd:optimizer_state=average"])
def test_what_cannot_be_declared_says_so(strategy: str) -> None:
    with pytest.raises(BadRequest, match="measure it by paceline study"):
        strategies.build(strategy).pattern(0, Setting(4, 5))


# --- when: computed by hand at P = 3. The model has 83 numbers (332 bytes). A server is rank 3.


def test_the_times_of_a_synchronous_server() -> None:
    """A message takes 3.32 s on a link (0.01 s per byte) and arrives 0.5 s later.

    The workers push at 1, 2 and 3. The server's way in takes one message after the other: they
    have left at 4.32, 7.64 and 10.96, and the last is there at 11.46. The server replies one by
    one: the replies have left at 14.78, 18.1 and 21.42, and arrive 0.5 s later.
    """
    network = Network((0, 1, 2, 3), Link(0.5, 0.01))
    trace = traced("ps", [[1.0], [2.0], [3.0]], network, servers=1)
    assert [e[0] for e in trace.ended_s] == pytest.approx([15.28, 18.6, 21.92])


def test_the_times_of_an_asynchronous_server() -> None:
    """The pushes arrive at 4.82, 8.14 and 11.46 (as above). The server replies at once, and its
    reply has left 3.32 s later: at 8.14, 11.46 and 14.78. The first worker has its weights at 8.64,
    computes again, pushes at 9.64 when the way in is busy until 10.96, and so on.
    """
    network = Network((0, 1, 2, 3), Link(0.5, 0.01))
    compute = [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]
    trace = traced("ps:consistency=async", compute, network, servers=1)
    assert [e[0] for e in trace.ended_s] == pytest.approx([8.64, 11.96, 15.28])
    # pushed at 9.64, on the way from 10.96 to 14.28, there at 14.78; replied from 14.78 to 18.1
    assert trace.ended_s[0][1] == pytest.approx(18.6)


def test_the_times_of_local_sgd() -> None:
    """Two local steps, then a ring of four rounds in which a message takes 0.5 s.

    In each round a worker goes on when it has the message of the worker before it:
    (2, 4, 8) -> (8.5, 4, 8) -> (8.5, 9, 8) -> (8.5, 9, 9.5) -> (10, 9, 9.5).
    """
    compute = [[1.0] * 4, [2.0] * 4, [4.0] * 4]
    trace = traced("local-sgd:every=2", compute, Network((0, 1, 2), Link(0.5, 0.0)))
    assert trace.ended_s == [
        [1.0, 10.0, 11.0, 19.5],
        [2.0, 9.0, 11.0, 18.5],
        [4.0, 9.5, 13.5, 19.0],
    ]


def test_the_times_of_gossip() -> None:
    """Round 0 of a ring of three: workers 0 and 1 swap, worker 2 is alone. Round 1: 1 and 2 swap.

    A message takes 0.5 s, and 0.332 s to add. Both of a pair go on at the later one's time.
    """
    compute = [[1.0] * 2, [2.0] * 2, [4.0] * 2]
    network = Network((0, 1, 2), Link(0.5, 0.0))
    trace = traced("gossip:topology=ring", compute, network, s_per_byte_added=0.001)
    assert [e[0] for e in trace.ended_s] == pytest.approx([2.832, 2.332, 4.0])
    # worker 1 sends at 4.332, worker 2 at 8
    assert [e[1] for e in trace.ended_s] == pytest.approx([3.832, 8.832, 8.332])


# --- virtual time changes no weight


@pytest.mark.parametrize(
    "strategy",
    [
        "allreduce:collective=ring",
        "allreduce:collective=tree,exchange=weights",
        "allreduce:collective=halving-doubling,when=epoch",
        "ring-reduce",
        "local-sgd:every=3,collective=ring",
        "diloco:every=2,collective=tree",
        "ps",
        "ps:exchange=weights",
    ],
)
def test_the_weights_are_those_of_inproc(
    run_inproc: Callable[..., paceline.Run], strategy: str
) -> None:
    options: dict[str, Any] = {"strategy": strategy, "workers": 3, "epochs": 2}
    simulated = run_inproc(
        **options,
        transport="simulated",
        network="10mbit,latency=1ms",
        faults=["compute:seconds=0.01,noise=0.5", "compute:seconds=0.03,rank=1"],
    )
    assert identical(simulated.weights, run_inproc(**options).weights)


def test_the_record_has_virtual_times(run_inproc: Callable[..., paceline.Run]) -> None:
    """Five steps that take 0.25 s each and exchange nothing."""
    run = run_inproc(
        strategy="psgd", workers=2, steps=5, transport="simulated", faults=["compute:seconds=0.25"]
    )
    assert run.record["simulated"] is True
    assert run.record["result"]["train_s"] == 1.25
    assert [w["compute_s"] for w in run.record["workers"]] == [1.25, 1.25]
    assert run.samples_per_s == run.record["result"]["samples"] / 1.25


def test_the_same_request_gives_the_same_times(run_inproc: Callable[..., paceline.Run]) -> None:
    options: dict[str, Any] = {
        "strategy": "ps:consistency=async",
        "workers": 3,
        "transport": "simulated",
        "network": "1mbit,latency=1ms",
        "faults": ["compute:seconds=0.01,noise=0.5"],
    }
    first, second = run_inproc(**options), run_inproc(**options)
    assert first.record["result"]["train_s"] == second.record["result"]["train_s"]
    assert identical(first.weights, second.weights)
    slower = run_inproc(**{**options, "network": "100kbit,latency=1ms"})
    assert slower.record["result"]["train_s"] > first.record["result"]["train_s"]
