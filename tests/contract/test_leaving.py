"""Leaving a run early: all workers leave after one step with a checkpoint, and a run that goes on
from it is the run that was never stopped.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import identical, make_pairs, small_net

import paceline
from paceline.common.asked import Asked
from paceline.data.base import Data, TensorSamples
from paceline.errors import BadRequest, Interrupted
from paceline.launch.signals import relay
from paceline.registry import strategies
from paceline.run import leaving
from paceline.run.leaving import Apart, Looking, Request, Way

STEPS = 12
EXACT = ["allreduce", "local-sgd:every=3", "gossip", "ps", "serial", "psgd", "stepwise"]
TOLD = ["ps:consistency=ssp,staleness=1", "ps:consistency=async", "hogwild"]
NEVER = float("inf")


def slow(*values: Any) -> list[Any]:
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


class Asking(TensorSamples):
    """Samples that ask the run to leave when so many batches have been read."""

    left = 10**9

    def batch(self, indices: torch.Tensor) -> Any:
        self.left -= 1
        if self.left == 0:
            relay(signal.SIGUSR1)
        return super().batch(indices)


def train(out: Path, spec: str, asks_after: int = 10**9, **more: Any) -> paceline.Run:
    data = Asking(*make_pairs(96))
    data.left = asks_after
    options: dict[str, Any] = {
        "model": small_net,
        "data": Data("own", data, None, (6,), 3),
        "strategy": spec,
        "workers": 1 if spec == "serial" else 2,
        "transport": "inproc",
        "memory_format": "contiguous",
        "batch_size": 4,
        "steps": STEPS,
        "progress": False,
        "resume": "auto",
        "out": str(out),
    }
    return paceline.train(**{**options, **more})


def left(out: Path, spec: str, asks_after: int, **more: Any) -> int:
    """Train until the run leaves; return the step of its checkpoint."""
    with pytest.raises(Interrupted) as stop:
        train(out, spec, asks_after, **more)
    assert stop.value.exit_code == 75
    record = json.loads((out / "run.json").read_text())
    newest = max((out / "checkpoints").glob("step-*"))
    step = int(newest.name.removeprefix("step-"))
    said = f"interrupted by SIGUSR1 after a checkpoint at step {step}"
    assert (record["status"], record["error"], str(stop.value)) == ("interrupted", said, said)
    assert len(list(newest.glob("worker-*.pt"))) == (1 if spec == "serial" else 2)
    assert not (out / "model.safetensors").exists()
    return step


def events(out: Path, kind: str, worker: int = 0) -> list[dict[str, Any]]:
    lines = (out / "events" / f"worker-{worker}.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, torch.Tensor]]:
    found: dict[str, dict[str, torch.Tensor]] = {}

    def weights(spec: str) -> dict[str, torch.Tensor]:
        if spec not in found:
            run = train(tmp_path_factory.mktemp("unbroken") / "run", spec)
            found[spec] = run.model.state_dict()
        return found[spec]

    return weights


def in_another_way(monkeypatch: pytest.MonkeyPatch, make: Callable[[Any, Request], Way]) -> None:
    """Let workers on the in-process transport agree as processes do."""
    monkeypatch.setattr(leaving, "_way", make)


def looking(worker: Any, request: Request) -> Way:
    return Looking(request, worker.step, 0.0)  # a look after every step


@pytest.mark.parametrize("spec", [*EXACT[:4], *slow(*EXACT[4:], *TOLD)])
def test_threads_leave_together_and_go_on(
    tmp_path: Path, unbroken: Callable[[str], Any], spec: str
) -> None:
    out = tmp_path / "run"
    step = left(out, spec, asks_after=9)
    assert 1 <= step < STEPS
    run = train(out, spec)
    assert run.record["status"] == "completed"
    assert [start["from_step"] for start in events(out, "start")] == [0, step]
    assert [event["step"] for event in events(out, "step")] == list(range(1, STEPS + 1))
    if spec in EXACT:
        assert strategies.build(spec).traits.resumes.same == "exact"
        assert identical(run.model.state_dict(), unbroken(spec))


@pytest.mark.parametrize("spec", ["allreduce", "local-sgd:every=3", "gossip", "ps", TOLD[0]])
@pytest.mark.parametrize("asks_after", [*slow(1), 9])
def test_workers_in_step_look_together(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    unbroken: Callable[[str], Any],
    spec: str,
    asks_after: int,
) -> None:
    in_another_way(monkeypatch, looking)
    out = tmp_path / "run"
    left(out, spec, asks_after)
    run = train(out, spec)
    if spec in EXACT:
        assert identical(run.model.state_dict(), unbroken(spec))


@pytest.mark.parametrize("spec", ["allreduce", "gossip"])
def test_one_worker_that_is_asked_is_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: str
) -> None:
    def make(worker: Any, request: Request) -> Way:
        own = request if worker.ctx.worker_index == 1 else Request(Asked(), NEVER)
        return looking(worker, own)

    in_another_way(monkeypatch, make)
    assert left(tmp_path / "run", spec, asks_after=9) < STEPS


@pytest.mark.parametrize("spec", ["psgd", *slow("hogwild"), "ps:consistency=async"])
@pytest.mark.parametrize("asks_after", [*slow(1, 5), 9])
def test_workers_apart_leave_after_the_step_of_the_fastest(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    unbroken: Callable[[str], Any],
    spec: str,
    asks_after: int,
) -> None:
    in_another_way(monkeypatch, lambda worker, request: Apart(request))
    out = tmp_path / "run"
    step = left(out, spec, asks_after)
    assert [len(events(out, "step", worker)) for worker in (0, 1)] == [step, step]
    run = train(out, spec)
    assert run.record["status"] == "completed"
    if spec in EXACT:
        assert identical(run.model.state_dict(), unbroken(spec))


@pytest.mark.parametrize("spec", ["psgd", "ps:consistency=async"])
@pytest.mark.parametrize("asked", [*slow(0), 1])
def test_workers_apart_of_which_one_is_asked_leave_at_the_next_checkpoint(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    unbroken: Callable[[str], Any],
    spec: str,
    asked: int,
) -> None:
    def make(worker: Any, request: Request) -> Way:
        own = request if worker.ctx.worker_index == asked else Request(Asked(), NEVER)
        return Apart(own)

    in_another_way(monkeypatch, make)
    out = tmp_path / "run"
    assert left(out, spec, asks_after=3, checkpoint_every="5") == 5
    run = train(out, spec, checkpoint_every="5")
    if spec in EXACT:
        assert identical(run.model.state_dict(), unbroken(spec))


def test_a_worker_apart_that_is_asked_too_late_completes_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one is not asked, and waits at the end already."""

    def make(worker: Any, request: Request) -> Way:
        own = request if worker.ctx.worker_index == 1 else Request(Asked(), NEVER)
        return Apart(own)

    in_another_way(monkeypatch, make)
    assert train(tmp_path / "run", "psgd", asks_after=3).record["status"] == "completed"


def test_the_last_step_is_not_left(tmp_path: Path) -> None:
    """A run that is asked while it makes its last step is complete."""
    run = train(tmp_path / "run", "serial", asks_after=STEPS)
    assert run.record["status"] == "completed"


def test_when_its_time_is_over(tmp_path: Path, unbroken: Callable[[str], Any]) -> None:
    out = tmp_path / "run"
    with pytest.raises(Interrupted, match=r'max_time="0\.001s" is over') as stop:
        train(out, "allreduce", max_time="0.001s")
    assert (stop.value.exit_code, stop.value.number) == (75, 0)
    starts = 1
    while (json.loads((out / "run.json").read_text()))["status"] == "interrupted":
        starts += 1
        # every start makes a step, however little time there is
        try:
            run = train(out, "allreduce", max_time="0.001s" if starts < 4 else "1h")
        except Interrupted:
            continue
    assert starts == 4
    assert [start["from_step"] for start in events(out, "start")] == [0, 1, 2, 3]
    assert identical(run.model.state_dict(), unbroken("allreduce"))


def test_a_run_that_goes_on_by_name_has_the_time_of_its_own(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(Interrupted):
        train(out, "serial", max_time="0.001s")
    run = train(out, "serial", resume=str(out))
    assert run.record["config"]["max_time"] is None


@pytest.mark.parametrize("wrong", ["soon", "5", "0s", "-1min"])
def test_times_that_are_none(tmp_path: Path, wrong: str) -> None:
    with pytest.raises(BadRequest, match="max_time"):
        train(tmp_path / "run", "serial", max_time=wrong)


def test_a_look_is_about_once_in_its_time() -> None:
    """At most twice as far as the last one, so that a wrong estimate is corrected soon."""
    way = Looking(Request(Asked(), NEVER), 0, 3600.0)
    looks = [way._next(step) for step in (1, 3, 7)]
    assert looks == [3, 7, 15]
    assert Looking(Request(Asked(), NEVER), 0, 0.0)._next(1) == 2


def test_a_look_comes_after_an_exchange() -> None:
    way = Looking(Request(Asked(), NEVER), 0, 0.0, every=8)
    assert [way._next(step) for step in (1, 8, 16)] == [8, 16, 24]
    way._looked -= 3600.0  # a step takes minutes: a look does not wait for eight of them
    assert way._next(17) == 18
