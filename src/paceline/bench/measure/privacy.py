"""Measure the cost of privacy, against plain training and against Opacus, in turns on one thread.

Plain and private are Paceline's own steps on the same samples: batch, forward, backward, clip,
noise, update. Opacus gets the same batches. Memory is measured in a new process for each contender.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import Tensor

from paceline.bench.measure.strategies import folder_and_data
from paceline.bench.peers.opacus_modes import MODES, opacus_step
from paceline.common.allocator import keep_freed_memory
from paceline.data.base import Data, Stream
from paceline.data.batches import ShardBatches
from paceline.data.shards import StaticShards
from paceline.errors import RunFailed
from paceline.objectives.losses import cross_entropy
from paceline.privacy.gradient import PrivateGradient
from paceline.privacy.noise import draw_key
from paceline.privacy.sampling import PoissonBatches
from paceline.privacy.settings import Settings
from paceline.record.resources import rss_peak_bytes
from paceline.registry import models
from paceline.replica.replica import Replica

# By model: the goal against Opacus, and the memory format.
MODELS = {"mlp:hidden=256x128": (1.8, "contiguous"), "cnn": (1.35, "channels_last")}
NOISE, CLIP = 1.1, 1.0
GOAL, MEMORY_GOAL = 0.85, 1.5
WARM_UP = 5
LOOP_STEPS = 2  # one sample at a time is slow
SLOW = 1000  # samples per second
Step = Callable[[], int]  # makes a step and returns its number of samples


@dataclass(frozen=True)
class Case:
    model: str
    batch_size: int
    channels_last: bool


def bench_privacy(
    data_dir: str | None,
    rounds: int,
    steps: int,
    batch_sizes: tuple[int, ...],
    say: Callable[[str], None],
) -> dict[str, Any]:
    keep_freed_memory()  # as in every run
    _, data = folder_and_data(data_dir)
    found: list[dict[str, Any]] = []
    for model, (goal, memory_format) in MODELS.items():
        for size in batch_sizes:
            case = Case(model, size, memory_format == "channels_last")
            say(f"{model}, batches of {size}: {rounds} rounds of {steps} steps each")
            found.append(_case(case, data, data_dir, rounds, steps, goal))
    return {
        "data": data.name,
        "rounds": rounds,
        "steps": steps,
        "noise": NOISE,
        "clip": CLIP,
        "cases": found,
    }


def _case(
    case: Case, data: Data, data_dir: str | None, rounds: int, steps: int, goal: float
) -> dict[str, Any]:
    ours, rates, failed = private(case, data), dict[str, float](), dict[str, str]()
    rates["private"] = _warm(ours)
    rates["plain"] = _warm(usual := plain(case, data))
    rates["one sample at a time"] = _rate(private(case, data, "loop"), LOOP_STEPS)
    peers: dict[str, Step] = {}
    for mode in MODES:
        try:
            peers[mode] = opacus(case, data, mode)
            rates[f"Opacus, {mode}"] = _warm(peers[mode])
        except Exception as error:  # Opacus does not support this model in this mode
            failed[mode] = str(error).splitlines()[0][:100] if str(error) else type(error).__name__
            peers.pop(mode, None)
    ratios = [_neighbours("private / plain", ours, usual, rounds, steps, GOAL)]
    if peers:
        fastest = max(peers, key=lambda mode: rates[f"Opacus, {mode}"])
        title = f"private / Opacus' fastest ({fastest})"
        ratios.append(_neighbours(title, ours, peers[fastest], rounds, steps, goal))
    memory = {name: _memory(case, data_dir, name) for name in ("plain", "private")}
    return {
        "model": case.model,
        "batch_size": case.batch_size,
        "memory_format": "channels_last" if case.channels_last else "contiguous",
        "samples_per_s": rates,
        "ratios": ratios,
        "memory_bytes": memory,
        "memory_ratio": memory["private"]["peak"] / memory["plain"]["peak"],
        "memory_goal": MEMORY_GOAL,
        "left_out": failed,
    }


def _neighbours(
    title: str, ours: Step, theirs: Step, rounds: int, steps: int, goal: float | None
) -> dict[str, Any]:
    """Return the ratios of neighbouring blocks of steps.

    The order is ours, theirs, theirs, ours, so that noise of the machine hits both alike.
    """
    found = []
    for number in range(rounds):
        if number % 2 == 0:
            a, b = _rate(ours, steps), _rate(theirs, steps)
        else:
            b, a = _rate(theirs, steps), _rate(ours, steps)
        found.append(a / b)
    low, middle, high = statistics.quantiles(found, n=4) if len(found) > 1 else found * 3
    return {
        "title": title,
        "median": middle,
        "quarters": [low, high],
        "min": min(found),
        "max": max(found),
        "goal": goal,
    }


def _warm(step: Step) -> float:
    """Warm up (fewer steps for a very slow contender) and return the samples per second."""
    slow = _rate(step, 1) < SLOW
    _rate(step, 1 if slow else WARM_UP)
    return _rate(step, 1 if slow else 2 * WARM_UP)


def _replica(case: Case, data: Data) -> Replica:
    torch.manual_seed(0)
    model = models.build(case.model, input_shape=data.input_shape, classes=data.classes)
    if case.channels_last:
        model = model.to(memory_format=torch.channels_last)
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    return Replica(
        model,
        torch.optim.SGD(trained, lr=0.01, momentum=0.9),
        cross_entropy(),
        channels_last=case.channels_last,
    )


def plain(case: Case, data: Data) -> Step:
    assert not isinstance(data.train, Stream)
    replica = _replica(case, data)
    batches = iter(
        ShardBatches(
            data.train, StaticShards(len(data.train), (case.batch_size,)), 0, torch.device("cpu")
        )
    )

    def step() -> int:
        batch = next(batches)
        replica.forward_backward(batch, 1.0)
        replica.update()
        return int(batch.weight)

    return step


def private(case: Case, data: Data, clipping: str = "bookkeeping") -> Step:
    assert not isinstance(data.train, Stream)
    replica = _replica(case, data)
    settings = Settings.read({"noise": NOISE, "clip": CLIP, "clipping": clipping})
    shards = StaticShards(len(data.train), (case.batch_size,))
    batches = iter(PoissonBatches(data.train, shards, 0, torch.device("cpu"), draw_key(None)))
    gradient = PrivateGradient(replica, settings, NOISE, draw_key(None), case.batch_size)

    def step() -> int:
        gradient.forward_backward(next(batches), 1.0)
        replica.update()
        return gradient.drawn

    return step


def opacus(case: Case, data: Data, mode: str) -> Step:
    assert not isinstance(data.train, Stream)
    replica = _replica(case, data)
    model = models.build(case.model, input_shape=data.input_shape, classes=data.classes)
    if case.channels_last:
        model = model.to(memory_format=torch.channels_last)
    model.train()
    one = opacus_step(mode, model, case.batch_size, NOISE, CLIP)
    batches = iter(
        ShardBatches(
            data.train, StaticShards(len(data.train), (case.batch_size,)), 0, torch.device("cpu")
        )
    )

    def step() -> int:
        batch = next(batches)
        inputs: Tensor = replica.formatted(batch.inputs)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            one(inputs, batch.targets)
        return int(batch.weight)

    return step


def _rate(step: Step, steps: int) -> float:
    began, samples = time.perf_counter(), 0
    for _ in range(steps):
        samples += step()
    return samples / (time.perf_counter() - began)


def _memory(case: Case, data_dir: str | None, name: str) -> dict[str, int]:
    """Return a new process's peak memory, and its memory before the first step."""
    program = (
        "from paceline.bench.measure.privacy import Case, say_memory;"
        f" say_memory({case!r}, {data_dir!r}, {name!r})"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL, check=False
    )
    if done.returncode:
        raise RunFailed(f"measuring memory: {done.stderr.strip().splitlines()[-1]}")
    return dict(json.loads(done.stdout))


def say_memory(case: Case, data_dir: str | None, name: str) -> None:
    """Print the memory of this process before and after some steps, as JSON."""
    torch.set_num_threads(1)
    keep_freed_memory()
    _, data = folder_and_data(data_dir)
    step = plain(case, data) if name == "plain" else private(case, data)
    before = psutil.Process().memory_info().rss
    for _ in range(4 * WARM_UP):
        step()
    print(json.dumps({"before": before, "peak": rss_peak_bytes()}))
