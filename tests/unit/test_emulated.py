"""The transport `emulated`: virtual time with the processor time of the threads' own computing."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.traces import without_agreements
from tests.unit.test_profile import profile

from paceline import Run
from paceline.errors import BadRequest
from paceline.planning.forms import predict_form
from paceline.planning.profile import Model
from paceline.transport.emulated import EmulatedHub, EmulatedTransport
from paceline.transport.virtual import Link, Network

WORK = {"model": "mlp:hidden=16x16", "data": "fashion-mini", "steps": 4, "evaluate_samples": 10}


def emulate(size: int, body: Callable[[EmulatedTransport], Any], link: Link) -> list[Any]:
    network = Network(tuple(range(size)), link)
    with without_agreements():
        found = EmulatedHub(size, network, kind=EmulatedTransport).run(body)
    for result in found:
        if isinstance(result, BaseException):
            raise result
    return found


def computed(least_s: float) -> float:
    """Compute for so much processor time; return how much it was."""
    began = time.thread_time()
    while time.thread_time() - began < least_s:
        sum(range(1000))
    return time.thread_time() - began


def test_a_thread_that_computes_moves_its_own_time_and_sleep_moves_none() -> None:
    def body(transport: EmulatedTransport) -> tuple[float, float]:
        used = computed(0.05) if transport.rank == 0 else 0.0
        if transport.rank == 1:
            time.sleep(0.05)
        return used, transport.now()

    (used, busy), (_, idle) = emulate(2, body, Link())
    assert busy >= used
    assert idle < used


def test_a_message_starts_after_the_computing_before_it() -> None:
    """The receiver's time is the sender's computing, and the link's time."""

    def body(transport: EmulatedTransport) -> tuple[float, float]:
        buffer = torch.zeros(25)
        if transport.rank == 0:
            used = computed(0.02)
            transport.isend(buffer, 1).wait()
            return used, transport.now()
        transport.irecv(buffer, 0).wait()
        return 0.0, transport.now()

    (used, sent), (_, received) = emulate(2, body, Link(5.0, 1.0))
    assert sent >= used + 100
    assert received >= used + 105


def test_ranks_that_compute_at_once_do_not_add_up() -> None:
    """Two threads on one core in turns: after a barrier both have the time of the slower one."""

    def body(transport: EmulatedTransport) -> tuple[float, float]:
        used = computed(0.05)
        transport.barrier()
        return used, transport.now()

    found = emulate(2, body, Link())
    slowest, both = max(used for used, _ in found), sum(used for used, _ in found)
    for _, now in found:
        assert slowest <= now < both


def test_weights_are_those_of_inproc_and_the_network_costs_time(
    run_inproc: Callable[..., Run],
) -> None:
    plain = run_inproc(strategy="allreduce:collective=ring", workers=3, **WORK)
    slow = run_inproc(
        strategy="allreduce:collective=ring",
        workers=3,
        transport="emulated",
        network="1gbit,latency=1s",
        **WORK,
    )
    for (name, ours), theirs in zip(
        slow.model.state_dict().items(), plain.model.state_dict().values(), strict=True
    ):
        assert torch.equal(ours, theirs), name
    assert slow.record["simulated"] is True
    assert slow.record["result"]["train_s"] >= 4 * 4 * 1.0  # 4 rounds of 1 s in each of 4 steps


@pytest.mark.parametrize("form", ["pipeline:micro=2", "tensor", "layers"])
def test_a_form_is_predicted_by_running_it(form: str) -> None:
    known = profile()
    model = Model("mlp:hidden=16x16", 1, 4)
    known = replace(known, model=model, data="fashion-mini")
    fast = predict_form(form, 2, 8, known, "100gbit", {})
    slow = predict_form(form, 2, 8, known, "100gbit,latency=1s", {})
    assert fast.samples == 16
    assert fast.low < fast.samples_per_s < fast.high
    assert slow.step_s >= 1.0 + fast.compute_s
    assert fast.sent_bytes > 0
    with pytest.raises(BadRequest, match="2 to 16 workers"):
        predict_form(form, 17, 8, known, "100gbit", {})
    with pytest.raises(BadRequest, match="built-in"):
        predict_form(form, 2, 8, replace(known, model=replace(model, name="own")), "1gbit", {})
