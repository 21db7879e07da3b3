"""The planner: clocks by hand, arrays against the event queue, and orderings of the field."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.codecs.feedback import build_codec
from paceline.collectives.base import schedule_of
from paceline.collectives.moves import Sum
from paceline.errors import BadRequest
from paceline.planning.answer import Request, plan
from paceline.planning.arrays import Clocks, rounds_of
from paceline.planning.cluster import (
    Cluster,
    read_hosts,
    read_link,
    read_speeds,
    read_workers,
)
from paceline.planning.engine import Engine
from paceline.planning.fit import Line
from paceline.planning.predict import Setting, Worker, fastest, limits, pays_below, predict
from paceline.planning.programs import Costs, Lineup, Overlap
from paceline.registry import strategies
from paceline.transport.virtual import Link, Network
from paceline.types import Layout, Slot

RINGS = ["ring", "stepwise", "stepwise:start=1", "all-gather"]
SCHEDULES = [*RINGS, "tree", "halving-doubling", "hierarchical", "star", "ring-reduce"]


def layout_of(numbers: int, *more: int) -> Layout:
    slots, at = [], 0
    for index, numel in enumerate((numbers, *more)):
        slots.append(Slot(f"w{index}", (numel,), (1,), at, numel, 0))
        at += numel
    return Layout(tuple(slots))


def lineup(strategy: str, workers: int, numbers: int, servers: int = 0, **more: object) -> Lineup:
    made = strategies.build(strategy)
    return Lineup(made, build_codec("none"), layout_of(numbers), workers, servers, **more)  # type: ignore[arg-type]


def clocks(strategy: str, workers: int, numbers: int, link: Link, steps: int = 1, servers: int = 0,
           gamma: float = 0.0) -> list[float]:  # fmt: skip
    """Every worker computes for 1 s in a step."""
    network = Network(tuple(range(workers + servers)), link)
    asked = lineup(strategy, workers, numbers, servers, costs=Costs(gamma))
    return Engine(network).run(asked.programs(lambda worker, step: 1.0, steps))[:workers]


# --- by hand: 3 workers, 300 numbers = 1,200 bytes, 1 ms per byte, a latency of 0.1 s

LINK = Link(latency_s=0.1, s_per_byte=1e-3)


def test_a_ring_by_hand() -> None:
    # 4 rounds; in each every rank sends 400 bytes: 0.4 s and 0.1 s of latency
    found = clocks("allreduce:collective=ring", 3, 300, LINK)
    assert found == pytest.approx([1 + 4 * 0.5] * 3)


def test_a_ring_that_adds_by_hand() -> None:
    # two of the rounds add 400 bytes, at 2 ms per byte
    found = clocks("allreduce:collective=ring", 3, 300, LINK, gamma=2e-3)
    assert found == pytest.approx([1 + 4 * 0.5 + 2 * 0.8] * 3)


def test_a_tree_by_hand() -> None:
    # Ranks 1 and 2 both send 1,200 bytes to rank 0 through its one way in: 1.2 and 2.4 s. Then rank
    # 0 sends to rank 2 (ends at 3.7 s), and after that to rank 1 (ends at 4.9 s).
    found = clocks("allreduce:collective=tree", 3, 300, LINK)
    ends = 1 + 2.4 + 0.1
    assert found == pytest.approx([ends + 2.4, ends + 2.4 + 0.1, ends + 1.2 + 0.1])


def test_a_server_by_hand() -> None:
    # Three pushes through the server's way in, 1.2 s each; then three replies, one by one.
    found = clocks("ps", 3, 300, LINK, servers=1)
    applied = 1 + 3 * 1.2 + 0.1
    assert found == pytest.approx([applied + 1.2 * n + 0.1 for n in (1, 2, 3)])


def test_local_sgd_by_hand() -> None:
    # 4 steps of 1 s, one ring after each second step
    found = clocks("local-sgd:every=2,collective=ring", 3, 300, LINK, steps=4)
    assert found == pytest.approx([4 + 2 * 4 * 0.5] * 3)


def test_cores_that_are_shared_are_busy_with_moving_bytes() -> None:
    """4 workers on a host with 2 cores: 4 steps of 1 s, and 2 * 3 * 4,000 bytes at 1 ms each."""
    busy = replace(worker(1000, 1.0), costs=Costs(moved_s_per_byte=1e-3))
    host = Cluster(Link(), Link(), per_host=4, cores=2)
    asked = setting("allreduce:collective=ring", 4)
    assert predict(asked, worker(1000, 1.0), host).step_s == pytest.approx(2.0)
    assert predict(asked, busy, host).step_s == pytest.approx((4 + 24) / 2)
    # With a core for each the bytes move while the worker waits.
    assert predict(asked, busy, replace(host, cores=None)).step_s == pytest.approx(1.0)


def test_overlap_by_hand() -> None:
    """A step of 1 s: 0.2 s before the backward pass, 0.6 s backward, 0.2 s of update.

    Bucket 1 (150 numbers) is ready in the middle of the backward pass, at 0.5 s; its ring on 3
    workers has 4 rounds of 200 bytes: 4 * (0.2 + 0.1) s. Bucket 2, ready at 0.8 s, waits for it.
    """
    asked = lineup("allreduce:collective=ring", 3, 300)
    asked.overlap = Overlap(0.2, 0.6, ((150, 0.5), (150, 1.0)))
    network = Network((0, 1, 2), LINK)
    found = Engine(network).run(asked.programs(lambda worker, step: 1.0, 1))
    assert found == pytest.approx([0.5 + 2 * 4 * 0.3 + 0.2] * 3)
    # A fast link: everything is exchanged when the backward pass ends, but for the last bucket.
    quick = Network((0, 1, 2), Link(0.0, 1e-6))
    found = Engine(quick).run(asked.programs(lambda worker, step: 1.0, 1))
    assert found == pytest.approx([1.0 + 4 * 200e-6] * 3)


def test_overlap_is_refused_where_there_is_none() -> None:
    early = replace(worker(), overlap=Overlap(0.2, 0.6, ((1000, 1.0),)))
    for strategy, codec, workers in (("gossip", "none", 4), ("allreduce", "fp16", 4)):
        asked = replace(setting(strategy, workers), codec=codec)
        with pytest.raises(BadRequest, match="overlap is predicted for"):
            predict(asked, early, GBIT)
    with pytest.raises(BadRequest, match="64 workers"):
        predict(setting("allreduce", 65), early, GBIT)
    plain = predict(setting("allreduce", 4), worker(), GBIT)
    assert predict(setting("allreduce", 4), early, GBIT).step_s <= plain.step_s + 1e-12


# --- arrays


FEW = [(schedule, ranks) for schedule in SCHEDULES for ranks in (2, 3, 4, 7, 16)]
MANY = [(schedule, ranks) for schedule in (*RINGS, "hierarchical") for ranks in (33, 64)]


@pytest.mark.parametrize(
    ("schedule", "ranks"), [*FEW, *(pytest.param(*case, marks=pytest.mark.slow) for case in MANY)]
)
def test_schedules_as_arrays_are_those_as_objects(schedule: str, ranks: int) -> None:
    found = [
        sorted(zip(r.source.tolist(), r.target.tolist(), r.start.tolist(), r.stop.tolist(),
                   [r.adds] * len(r.source), strict=True))
        for r in rounds_of(schedule, ranks)
    ]  # fmt: skip
    made = [
        sorted((t.source, t.target, t.start, t.stop, t.adds) for t in round_)
        for round_ in schedule_of(schedule, ranks).rounds
    ]
    assert found == made


@given(
    st.sampled_from(["ring", "stepwise", "all-gather", "star", "ring-reduce"]),
    st.integers(2, 9),
    st.integers(1, 60),
    st.lists(st.floats(0.0, 5.0), min_size=9, max_size=9),
    st.sampled_from([0.0, 1e-3]),
)
def test_clocks_as_arrays_are_those_of_the_event_queue(
    schedule: str, ranks: int, each: int, starts: list[float], gamma: float
) -> None:
    numbers = each * ranks  # so that all chunks are equal
    network = Network(tuple(range(ranks)), LINK)
    arrays = Clocks(network, gamma)
    arrays.now += np.array(starts[:ranks])
    run = Sum(schedule, numbers, 4)
    arrays.sum(run, ranks)
    asked = Lineup(
        strategies.build("allreduce"), build_codec("none"), layout_of(numbers), ranks,
        costs=Costs(gamma),
    )  # fmt: skip
    engine = Engine(network)
    programs = [_one(asked, run, rank, starts[rank]) for rank in range(ranks)]
    assert arrays.now.tolist() == pytest.approx(engine.run(programs))
    assert arrays.sent_bytes.tolist() == engine.posted_bytes


def _one(asked: Lineup, run: Sum, rank: int, start: float):  # type: ignore[no-untyped-def]
    from paceline.planning.engine import Spend
    from paceline.strategies.parts.pattern import Reduction

    yield Spend(start)
    yield from asked.reduction(rank, Reduction(run.schedule))


# --- what is asked


@pytest.mark.parametrize("text", ["0mbit", "0", "fast", "10gbit,delay=1ms", ""])
def test_a_network_that_cannot_be(text: str) -> None:
    with pytest.raises(BadRequest, match="network"):
        read_link(text)


@pytest.mark.parametrize("text", ["0", "x4", "4x0", "-1", "4 4", "many"])
def test_hosts_that_cannot_be(text: str) -> None:
    with pytest.raises(BadRequest, match="16x4"):
        read_hosts(text)


@pytest.mark.parametrize("text", ["0", "", "4-2", "two", "1,,2", "-3"])
def test_workers_that_cannot_be(text: str) -> None:
    with pytest.raises(BadRequest, match="1-16"):
        read_workers(text)


@pytest.mark.parametrize("text", ["", "0", "1,-1", "nan", "inf", "fast"])
def test_speeds_that_cannot_be(text: str) -> None:
    with pytest.raises(BadRequest, match="above 0"):
        read_speeds(text)


def test_what_is_asked_is_read() -> None:
    assert read_link("10gbit,latency=50us").s_per_byte == pytest.approx(8e-10)
    assert read_link("lan") == read_link("1gbit,latency=100us")
    assert read_hosts("16x4") == (16, 4)
    assert read_workers("1-3,8") == [1, 2, 3, 8]
    assert Cluster(LINK, per_host=2).network(3, servers=1).hosts == (0, 0, 1, 2)
    assert Cluster(LINK, per_host=4, cores=2).speed(0, 4) == 0.5


def test_more_workers_than_hosts_hold() -> None:
    with pytest.raises(BadRequest, match="3x2"):
        Cluster(LINK, hosts=2, per_host=2).network(5)


# --- predictions

GBIT = Cluster(Link(50e-6, 8 / 1e9))


def worker(numbers: int = 100_000, step_s: float = 0.1, **more: object) -> Worker:
    return Worker(layout_of(numbers), [step_s], 64, **more)  # type: ignore[arg-type]


def setting(strategy: str, workers: int, codec: str = "none", servers: int = 0) -> Setting:
    return Setting(strategies.build(strategy), codec, workers, servers)


def test_one_worker_is_its_own_computing() -> None:
    found = predict(setting("serial", 1), worker(), GBIT)
    assert found.step_s == pytest.approx(0.1)
    assert found.low_s < 0.1 < found.high_s
    assert found.sent_bytes == 0


def test_a_synchronous_step_waits_for_the_slowest_draw() -> None:
    noisy = replace(worker(4), quantiles_s=np.linspace(0.0, 1.0, 101).tolist())
    free = Cluster(Link())
    found = predict(setting("allreduce:collective=ring", 16), noisy, free)
    assert found.step_s == pytest.approx(16 / 17, rel=0.05)  # the mean of the largest of 16 draws
    alone = predict(setting("psgd", 16), noisy, free)
    assert alone.step_s == pytest.approx(0.5, rel=0.12)


def test_bytes_are_those_of_the_schedule() -> None:
    found = predict(setting("allreduce:collective=ring", 4), worker(1000), GBIT)
    assert found.sent_bytes == 2 * 3 * 4 * 1000


def test_the_same_request_gives_the_same_answer() -> None:
    noisy = replace(worker(), quantiles_s=[0.1, 0.2, 0.4], deviation=0.1)
    asked = setting("ps:consistency=async", 5, servers=2)
    assert predict(asked, noisy, GBIT) == predict(asked, noisy, GBIT)


def test_what_limits() -> None:
    slow = Cluster(Link(0.0, 8 / 1e6))
    found = limits(setting("allreduce:collective=ring", 4), worker(), slow)
    assert max(found, key=lambda name: found[name]) == "bandwidth"
    far = Cluster(Link(0.5, 0.0))
    found = limits(setting("allreduce:collective=ring", 4), worker(), far)
    assert max(found, key=lambda name: found[name]) == "latency"
    slower = replace(GBIT, speeds=(1.0, 0.25))
    found = limits(setting("allreduce:collective=ring", 4), worker(1000), slower)
    assert found["waiting"] == pytest.approx(0.75, abs=0.05)
    assert found["computing"] == pytest.approx(0.25, abs=0.05)


# --- orderings of the field, from cited inputs


def resnet_101() -> Worker:
    """44,549,160 parameters (torchvision); 64 images per step and GPU.

    Horovod's documentation (benchmarks.rst): 1656.82 images/s on 16 Pascal GPUs.
    """
    return worker(44_549_160, 64 / (1656.82 / 16))


def vgg_16() -> Worker:
    """138,357,544 parameters (torchvision); 64 images per step and GPU.

    TensorFlow's benchmarks of May 2017 (r1/guide/performance/benchmarks.md): 154 images/s on one
    P100.
    """
    return worker(138_357_544, 64 / 154)


def efficiency(of: Worker, workers: int, cluster: Cluster) -> float:
    found = predict(setting("allreduce:collective=ring", workers), of, cluster)
    return found.compute_s / found.step_s


def test_vgg_16_scales_worse_than_resnet_101() -> None:
    """Horovod's documentation: 68% and 90% on 128 servers with 4 GPUs each, at 25 Gbit/s."""
    for rate in (1e9, 25e9):
        cluster = Cluster(Link(30e-6, 8 / rate))
        assert efficiency(vgg_16(), 16, cluster) < efficiency(resnet_101(), 16, cluster)
    servers = Cluster(Link(30e-6, 8 / 25e9), hosts=128, per_host=4)
    vgg, resnet = (efficiency(model(), 512, servers) for model in (vgg_16, resnet_101))
    # Nothing overlaps here, and Horovod overlaps; so both are below, in the same order.
    assert vgg < 0.68
    assert vgg < resnet < 0.90


def test_compression_pays_on_slow_links_only() -> None:
    """Encoding at 1 GB/s and decoding at 1 GB/s, as a codec on a processor does."""
    costs = Costs(encode=Line(0.0, 1e-9), decode=Line(0.0, 1e-9))
    asked = setting("allreduce:collective=ring", 4)
    below = pays_below(asked, "int8", replace(resnet_101(), costs=costs), GBIT)
    assert below is not None
    assert 1e8 < below < 25e9


def test_ring_loses_to_halving_doubling_with_4096_workers() -> None:
    cluster = Cluster(Link(50e-6, 8 / 100e9))
    assert fastest(4096, 4 * 1_000_000, cluster) == "halving-doubling"
    clock = Clocks(cluster.network(4096))
    clock.sum(Sum("halving-doubling", 1_000_000, 4), 4096)
    ring_latency = 2 * 4095 * 50e-6
    assert clock.now.max() < ring_latency / 10


# --- the answer


def request(**more: object) -> Request:
    asked = Request(("allreduce:collective=ring",), ("none",), (1, 2, 4, 8), GBIT, 64)
    return replace(asked, **more)  # type: ignore[arg-type]


def test_the_fastest_the_knee_and_the_price() -> None:
    slow = Cluster(Link(1e-3, 8 / 20e6), price_per_hour=1.0)
    found = plan(request(cluster=slow), lambda batch, codec: (worker(), None))
    assert (
        found.fastest.workers
        == max(found.rows, key=lambda row: row.prediction.samples_per_s).workers
    )
    assert found.cheapest is not None
    assert found.cheapest.workers == 1  # no exchange, one host
    assert found.knee in (1, 2, 4)
    alone = next(row for row in found.rows if row.workers == 1)
    assert alone.speedup == pytest.approx(1.0)
    assert alone.price == pytest.approx(1e6 / 640 / 3600)


def test_what_does_not_exist_is_left_out_with_its_reason() -> None:
    asked = request(strategies=("stepwise", "hogwild"), codecs=("none", "topk"))
    found = plan(asked, lambda batch, codec: (worker(), None))
    assert {row.strategy for row in found.rows} == {"stepwise", "hogwild"}
    assert any("topk" in reason for reason in found.refused)
    assert any("1x8" in reason for reason in found.refused)
    assert math.isfinite(found.described()["fastest"]["samples_per_s"])


def test_nothing_that_can_be_predicted() -> None:
    with pytest.raises(BadRequest, match="none of these settings"):
        plan(request(strategies=("gossip:mode=async",)), lambda batch, codec: (worker(), None))


def test_a_global_batch_is_divided() -> None:
    found = plan(
        request(batch_size=None, global_batch_size=64),
        lambda batch, codec: (replace(worker(), batch_size=batch), None),
    )
    assert [row.prediction.batch_size for row in found.rows] == [64, 32, 16, 8]


@pytest.mark.parametrize("schedule", SCHEDULES[len(RINGS) :])
def test_every_all_reduce_of_more_workers_than_are_run_exactly(schedule: str) -> None:
    found = predict(setting(f"allreduce:collective={schedule}", 80), worker(800), GBIT)
    sent = sum(schedule_of(schedule, 80).sent(rank, 800) for rank in range(80))
    assert found.sent_bytes == 4 * sent
    assert found.step_s > 0.1


@pytest.mark.slow
def test_4096_workers_of_every_strategy() -> None:
    noisy = replace(worker(), quantiles_s=[0.1, 0.12, 0.2])
    for name in ("allreduce", "allreduce:collective=ring", "ring-reduce", "stepwise", "ps",
                 "ps:consistency=async", "local-sgd", "diloco", "gossip", "psgd"):  # fmt: skip
        servers = 4 if name.startswith("ps:") or name == "ps" else 0
        found = predict(setting(name, 4096, servers=servers), noisy, GBIT)
        assert found.samples_per_s > 0
