"""`--faults compute`: compute times that are given, on the transport simulated and elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import paceline
from paceline.errors import BadRequest
from paceline.faults.compute import Compute
from paceline.registry import faults
from paceline.report.document.method import method
from paceline.report.page.details import configuration
from paceline.report.reading import read_study
from paceline.transport.alone import Alone


class Slept(Alone):
    """A transport of one rank that notes how long it was to compute."""

    def __init__(self) -> None:
        super().__init__()
        self.charged: list[float] = []

    def charge(self, seconds: float) -> None:
        self.charged.append(seconds)


@given(st.floats(0.0, 10.0), st.floats(0.0, 2.0), st.integers(0, 64), st.integers(1, 10**6))
def test_a_draw_is_a_function_of_rank_and_step(
    seconds: float, noise: float, rank: int, step: int
) -> None:
    drawn = Compute(seconds, noise).drawn_s(rank, step)
    assert drawn == Compute(seconds, noise).drawn_s(rank, step) >= 0
    assert noise or drawn == seconds


def test_draws_have_the_mean_and_the_noise_that_were_asked_for() -> None:
    fault = Compute(0.02, 0.3)
    drawn = [fault.drawn_s(rank, step) for rank in range(50) for step in range(200)]
    mean = sum(drawn) / len(drawn)
    deviation = math.sqrt(sum((d - mean) ** 2 for d in drawn) / len(drawn))
    assert mean == pytest.approx(0.02, rel=0.02)
    assert deviation / mean == pytest.approx(0.3, rel=0.05)
    assert fault.drawn_s(0, 1) != Compute(0.02, 0.3, seed=1).drawn_s(0, 1)


def test_the_worker_sleeps_for_what_computing_has_left() -> None:
    transport = Slept()
    for seconds, rank in ((0.25, None), (1.0, 0), (1.0, 1)):
        fault = Compute(seconds, rank=rank)
        fault.before_step(1, transport)
        fault.after_compute(0.125, transport)
        fault.after_compute(0.5, transport)
    assert transport.charged == [0.125, 0.0, 0.875, 0.5]


@pytest.mark.parametrize(
    "text", ["compute:seconds=-1", "compute:seconds=inf", "compute:seconds=nan", "compute:noise=-1"]
)
def test_times_out_of_range_are_refused(text: str) -> None:
    with pytest.raises(BadRequest, match="it must be from 0 to"):
        faults.build(text, runs_as="threads")


@pytest.mark.parametrize(
    ("others", "train_s"),
    [
        ([], 1.0),
        (["slow:rank=1,factor=3"], 3.0),
        (["compute:seconds=0.5,rank=1"], 2.0),
        (["compute:seconds=0.125,rank=1"], 1.0),  # at least
    ],
)
def test_faults_pass_virtual_time(
    run_inproc: Callable[..., paceline.Run], others: list[str], train_s: float
) -> None:
    """Four steps of 0.25 s; the slowest worker decides."""
    options: dict[str, Any] = {"strategy": "allreduce", "workers": 2, "steps": 4}
    run = run_inproc(**options, transport="simulated", faults=["compute:seconds=0.25", *others])
    assert run.record["result"]["train_s"] == pytest.approx(train_s)


def test_a_slow_link_passes_virtual_time(run_inproc: Callable[..., paceline.Run]) -> None:
    """Two steps, each two messages of 0.5 s from every worker, which waits for each to be sent."""
    run = run_inproc(
        strategy="allreduce:collective=ring",
        workers=2,
        steps=2,
        transport="simulated",
        faults=["link:latency=500ms"],
    )
    # The ranks agree on the buffer in the first step, over the same link: it takes longer.
    assert run.record["result"]["train_s"] >= 2.0


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"transport": "simulated:network=10mbit"}, "transports have no options"),
        ({"transport": "simulated", "network": "standing"}, "has no hosts"),
        ({"transport": "simulated", "network": "0bit"}, "the rate must be"),
        ({"transport": "simulated", "strategy": "gossip:mode=async"}, "needs real processes"),
        ({"transport": "simulated", "strategy": "allreduce:collective=native"}, "no all-reduce"),
        ({"transport": "simulated", "overlap": "on"}, "overlap=on needs processes"),
    ],
)
def test_what_simulated_cannot_do_is_refused(
    run_inproc: Callable[..., paceline.Run], options: dict[str, Any], told: str
) -> None:
    with pytest.raises(paceline.errors.PacelineError, match=told):
        run_inproc(workers=2, steps=1, **options)


def test_a_study_does_not_compare_simulated_with_measured_times(tmp_path: Path) -> None:
    spec = {"base": {"data": "synthetic", "transport": "simulated"}, "axes": {"workers": [2]}}
    with pytest.raises(BadRequest, match="cannot be compared"):
        paceline.study(spec, out=tmp_path / "study")


def test_a_report_says_that_times_are_simulated(run_inproc: Callable[..., paceline.Run]) -> None:
    simulated, measured = (
        read_study(run_inproc(strategy="allreduce", workers=2, steps=2, transport=name).out)
        for name in ("simulated", "inproc")
    )
    assert "All runs were simulated" in configuration(simulated)
    assert "All runs were simulated" in str(method(simulated))
    assert "were simulated" not in configuration(measured) + str(method(measured))
