"""What each strategy is mathematically equal to, and how many bytes it sends."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.conftest import identical, make_pairs, small_net, weights_distance

from paceline import Run
from paceline.errors import BadRequest
from paceline.strategies.parts.serving import ServerSpans
from paceline.types import Layout, Slot

RunInproc = Callable[..., Run]
N = sum(p.numel() for p in small_net().parameters())
DOUBLE = {"model": lambda: small_net(torch.float64), "data": make_pairs(60, dtype=torch.float64)}


def sent(run: Run, phase: str = "payload") -> int:
    return sum(
        w[f"{phase}_sent_bytes"] or 0 for w in run.record["workers"] if w["role"] == "worker"
    )


# --- the same as all-reduce


@pytest.mark.parametrize(
    "strategy",
    [
        "allreduce:exchange=weights",
        "allreduce:collective=ring",
        "ring-reduce",
        "ring-reduce:exchange=gradients",
        "local-sgd:every=1,optimizer_state=average",
        "local-sgd:post=1000",
        "ps",
        "ps:exchange=weights",
        "ps:consistency=ssp,staleness=0",
        "diloco:every=1,outer_lr=1,outer_momentum=0",
    ],
)
@pytest.mark.parametrize("batch_size", ["6,4", "6,2,4"])
def test_these_are_the_mean_gradient_in_every_step(
    run_inproc: RunInproc, strategy: str, batch_size: str
) -> None:
    """SGD with momentum is linear: with constant shares, averaging weights averages gradients."""
    workers, whole = batch_size.count(",") + 1, sum(map(int, batch_size.split(",")))
    serial = run_inproc(**DOUBLE, batch_size=whole, epochs=3, lr=0.05)
    many = run_inproc(
        **DOUBLE, strategy=strategy, workers=workers, batch_size=batch_size, epochs=3, lr=0.05
    )
    assert weights_distance(serial.weights, many.weights) < 1e-10


def test_gradients_once_per_epoch_are_full_batch_descent(run_inproc: RunInproc) -> None:
    whole = run_inproc(**DOUBLE, batch_size="all", epochs=4, lr=0.2)
    parts = run_inproc(
        **DOUBLE, strategy="allreduce:when=epoch", workers=3, batch_size=7, epochs=4, lr=0.2
    )
    assert weights_distance(whole.weights, parts.weights) < 1e-10


@pytest.mark.parametrize("servers", [2, 3])
def test_several_servers_are_one_server(run_inproc: RunInproc, servers: int) -> None:
    one, many = (
        run_inproc(
            strategy="ps",
            workers=3,
            servers=k,
            epochs=2,
            lr_schedule="cosine",
            optimizer="adam",
            weight_decay=0.01,
        )
        for k in (1, servers)
    )
    assert identical(one.weights, many.weights)
    assert [w["role"] for w in many.record["workers"]] == ["worker"] * 3 + ["server"] * servers


def test_psgd_is_the_mean_of_workers_who_never_met(run_inproc: RunInproc) -> None:
    """Two halves of the data, trained alone from the same start, averaged by hand."""
    inputs, targets = make_pairs(60, dtype=torch.float64)
    together = run_inproc(
        **DOUBLE, strategy="psgd", workers=2, epochs=2, shard="static", batch_size=30
    )
    halves = [
        run_inproc(
            model=DOUBLE["model"], data=(inputs[part], targets[part]), batch_size=30, epochs=2
        )
        for part in (slice(0, 30), slice(30, 60))
    ]
    mean = {k: (halves[0].weights[k] + halves[1].weights[k]) / 2 for k in together.weights}
    assert weights_distance(together.weights, mean) < 1e-12


def test_psgd_workers_may_stop_each_when_it_has_converged(run_inproc: RunInproc) -> None:
    run = run_inproc(strategy="psgd", workers=3, until_converged=0.02, epochs=40, lr=0.05)
    steps = [w["steps"] for w in run.record["workers"]]
    assert max(steps) < 40 * 3
    assert run.test_accuracy > 0.8


# --- partial averages


def test_stepwise_holds_the_mean_till_each_worker(run_inproc: RunInproc) -> None:
    """After one step the exact average makes replicas equal; the first workers count less."""
    serial = run_inproc(**DOUBLE, batch_size=12, steps=1)
    for options in ("", ":chunked=false,rotate=false", ":exchange=gradients", ":full_every=1"):
        many = run_inproc(**DOUBLE, strategy=f"stepwise{options}", workers=3, batch_size=4, steps=1)
        distances = [w["replica_distance_max"] for w in many.record["workers"]]
        assert max(distances) < 1e-12  # the average at the end, or after the step
        # The later workers of the ring count more than the first ones.
        assert 0 < weights_distance(serial.weights, many.weights) < 0.1


def test_gossip_spreads_to_all(run_inproc: RunInproc) -> None:
    for topology in ("random", "ring"):
        for workers in (2, 3, 4, 5):
            run = run_inproc(
                strategy=f"gossip:topology={topology}",
                workers=workers,
                batch_size=4,
                epochs=6,
                lr=0.05,
            )
            assert run.test_accuracy > 0.8
            assert all(w["replica_distance_max"] < 0.5 for w in run.record["workers"])


# --- staleness


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 10**6), st.integers(0, 4), st.integers(2, 4))
def test_no_worker_runs_further_ahead_than_staleness_allows(
    run_inproc: RunInproc, seed: int, s: int, workers: int
) -> None:
    run = run_inproc(
        strategy=f"ps:consistency=ssp,staleness={s}",
        workers=workers,
        steps=12,
        batch_size=4,
        seed=seed,
    )
    own = [w for w in run.record["workers"] if w["role"] == "worker"]
    assert all(w["staleness_max"] <= s for w in own)
    assert run.record["status"] == "completed"


def test_asynchronous_workers_miss_updates_and_it_is_recorded(run_inproc: RunInproc) -> None:
    own = run_inproc(strategy="ps:consistency=async", workers=3, steps=20, batch_size=4).record[
        "workers"
    ][:3]
    assert max(w["missed_mean"] for w in own) > 0
    sync = run_inproc(strategy="ps", workers=3, steps=20, batch_size=4).record["workers"][:3]
    assert all(w["staleness_max"] == 0 for w in sync)
    # All three workers' gradients of the clock, including the worker's own.
    assert all(w["missed_mean"] == 3 for w in sync)


def test_hogwild_shares_one_set_of_weights(run_inproc: RunInproc) -> None:
    for state in ("private", "shared"):
        for optimizer in ("momentum", "adam"):
            run = run_inproc(
                strategy=f"hogwild:optimizer_state={state}",
                workers=3,
                batch_size=4,
                epochs=6,
                lr=0.01,
                optimizer=optimizer,
            )
            assert run.test_accuracy > 0.8
            assert all(w["staleness_mean"] > 0 for w in run.record["workers"])


# --- bytes: n parameters, T exchanges, summed over workers


@pytest.mark.parametrize(
    "workers", [pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow)]
)
def test_bytes_are_those_of_the_schedule(run_inproc: RunInproc, workers: int) -> None:
    steps, whole = 12, 2 * (workers - 1) * 4 * N
    options = {"workers": workers, "steps": steps, "batch_size": 4}
    for strategy in (
        "allreduce:collective=ring",
        "allreduce:collective=ring,exchange=weights",
        "ring-reduce",
    ):
        assert sent(run_inproc(strategy=strategy, **options)) == steps * whole
    assert sent(run_inproc(strategy="stepwise", **options)) == steps * whole // 2
    assert (
        sent(run_inproc(strategy="stepwise:full_every=4", **options))
        == steps * whole // 2 + 3 * whole
    )
    assert sent(run_inproc(strategy="local-sgd:every=4,collective=ring", **options)) == 3 * whole
    assert sent(run_inproc(strategy="diloco:every=6,collective=ring", **options)) == 2 * whole
    assert (
        sent(run_inproc(strategy="local-sgd:every=4,post=6,collective=ring", **options))
        == 6 * whole + 2 * whole
    )
    psgd = run_inproc(strategy="psgd", **options)
    assert sent(psgd) == 0
    assert sent(psgd, "finish") >= whole  # the one average
    assert sent(run_inproc(strategy="gossip", **options)) == steps * (workers // 2) * 2 * 4 * N
    for servers in (1, 2):
        for consistency in ("sync", "async", "ssp"):
            run = run_inproc(strategy=f"ps:consistency={consistency}", servers=servers, **options)
            for worker in run.record["workers"][:workers]:
                assert (
                    worker["payload_sent_bytes"]
                    == worker["payload_received_bytes"]
                    == steps * 4 * N
                )
            assert (
                sum(w["payload_received_bytes"] for w in run.record["workers"][workers:])
                == workers * steps * 4 * N
            )


# --- what is refused


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"strategy": "local-sgd:every=0"}, "local-sgd: every=0"),
        ({"strategy": "allreduce:exchange=weights,when=epoch"}, "local-sgd:every=epoch"),
        ({"strategy": "allreduce", "servers": 2}, "has no servers"),
        ({"strategy": "ps:staleness=-1"}, "staleness=-1"),
        ({"strategy": "ps", "servers": 0}, "at least one server"),
        ({"strategy": "diloco:outer_momentum=1"}, "outer_momentum=1"),
        ({"strategy": "gossip:every=0"}, "every=0"),
        ({"strategy": "stepwise:full_every=-1"}, "full_every=-1"),
        ({"strategy": "hogwild", "transport": "gloo"}, 'transport="shm"'),
    ],
)
def test_impossible_requests(run_inproc: RunInproc, options: dict[str, object], words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        run_inproc(workers=2, **options)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.integers(1, 5))
def test_servers_hold_every_tensor_once_and_whole(sizes: list[int], servers: int) -> None:
    class Region:
        def __init__(self) -> None:
            offsets = [sum(sizes[:i]) for i in range(len(sizes))]
            self.grad_layout = Layout(
                tuple(
                    Slot(str(i), (n,), (1,), o, n, 0)
                    for i, (n, o) in enumerate(zip(sizes, offsets, strict=True))
                )
            )
            self.grads = torch.zeros(sum(sizes))

    parts = ServerSpans([Region()], servers).of
    held = [(low, high) for own in parts for _, low, high in own]
    assert sorted(held) == held  # in order, so that they do not overlap
    assert [low for low, _ in held] == [0, *(high for _, high in held[:-1])]
    assert held[-1][1] == sum(sizes)
    boundaries = {0, *(sum(sizes[: i + 1]) for i in range(len(sizes)))}
    assert {b for pair in held for b in pair} <= boundaries
