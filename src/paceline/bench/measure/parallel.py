"""Measure split models against the whole model in one process, and pipelines against PyTorch's.

All contenders run in turns, in the same two processes, so that noise of the machine hits all alike.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from paceline.launch.failures import root_cause
from paceline.launch.forks import on_forked_ranks
from paceline.launch.split import SplitModel
from paceline.parallel.base import Form, Given
from paceline.parallel.cut import layers_of
from paceline.parallel.staged import StagedPart
from paceline.parallel.timetable import Task, timing
from paceline.registry import forms, models, transports
from paceline.transport.base import Rendezvous, Waits

WORKERS = 2
ONE, TWO, OURS, THEIRS = "one process", "one process, 2 threads", "split", "PyTorch's"


def case_of(name: str) -> tuple[nn.Module, Tensor, Tensor, list[str]]:
    """The model of a case, a batch for it, and the forms that are measured on it."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model: nn.Module
    shape: tuple[int, ...]
    if name == "pipeline":
        layers: list[nn.Module] = []
        for before, after in pairwise([1024] * 9):
            layers += [nn.Linear(before, after), nn.ReLU()]
        model, shape, rows = nn.Sequential(*layers, nn.Linear(1024, 10)), (1024,), 256
        ways = ["pipeline:micro=8,schedule=1f1b"]
    elif name == "tensor":
        model = models.build("mlp:hidden=4096x4096", input_shape=(784,), classes=10)
        shape, rows, ways = (784,), 128, ["tensor"]
    else:
        model = models.build("cnn:dropout=0", input_shape=(1, 512, 512), classes=10)
        shape, rows, ways = (1, 512, 512), 8, ["domain"]
    inputs = torch.randn(rows, *shape, generator=generator)
    return model, inputs, torch.randint(0, 10, (rows,), generator=generator), ways


def bench_parallel(rounds: int, steps: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure each case: the seconds of a batch's passes, and the bytes that a worker holds."""
    cases = {}
    for name in ("pipeline", "tensor", "domain"):
        say(name)
        with tempfile.NamedTemporaryFile(prefix="paceline-bench-") as meet:
            results, failures = on_forked_ranks(
                partial(_rank, name, rounds, steps, f"{meet.name}.store"),
                WORKERS,
                waits=Waits(300.0),
            )
        if failures:
            raise root_cause(failures, WORKERS)
        cases[name] = _summed_up(results)
    return {"cases": cases, "rounds": rounds, "steps": steps}


def _summed_up(results: dict[int, Any]) -> dict[str, Any]:
    first, last = results[0], results[WORKERS - 1]
    taken = {
        way: [max(pair) for pair in zip(first["taken"][way], last["taken"][way], strict=True)]
        if way in last["taken"]
        else first["taken"][way]
        for way in first["taken"]
    }
    ratios = {}
    for way in (ONE, TWO, THEIRS):
        if way in taken:
            each = [a / b for a, b in zip(taken[way], taken[OURS], strict=True)]
            ratios[way] = _spread(each)
    held = [results[rank]["held"] for rank in range(WORKERS)]
    found = {
        "form": first["form"],
        "seconds": {way: _spread(times) for way, times in taken.items()},
        "ratios": ratios,
        "held": max(held) / first["whole"],
    }
    if first["idle"]:
        idle = [statistics.fmean(p) for p in zip(first["idle"], last["idle"], strict=True)]
        table = first["timetable"]
        unavoidable = [
            timing(table, dict(one + other).__getitem__).idle
            for one, other in zip(first["tasks_s"], last["tasks_s"], strict=True)
        ]
        found |= {
            "idle": _spread(idle),
            "idle_in_theory": timing(table).idle,
            "idle_with_measured_tasks": _spread(unavoidable),
        }
    return found


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def _rank(
    name: str, rounds: int, steps: int, store: str, rendezvous: Rendezvous, say: Any
) -> dict[str, Any]:
    torch.set_num_threads(1)
    transport = transports.entry("shm").make.connect(rendezvous)
    model, inputs, targets, (way,) = case_of(name)
    whole = sum(p.numel() for p in model.parameters())
    spec, loss = forms.resolve(way), nn.functional.cross_entropy
    form: Form = forms.build(spec)
    if name == "pipeline":  # the same cut for both
        layers = layers_of(model)
        cut = len(layers) // 2
        spec = forms.resolve(spec.with_option("cut", str(cut)))
        form = forms.build(spec)
    own, *_ = case_of(name)
    given = Given(transport, inputs, 0, transport)
    split = SplitModel(form.split(own, given), spec)

    def alone() -> None:
        loss(model(inputs), targets).backward()

    def with_two_threads() -> None:
        torch.set_num_threads(2)
        alone()
        torch.set_num_threads(1)

    contenders: dict[str, Callable[[], Any]] = {OURS: lambda: split.backward(loss, inputs, targets)}
    if name == "pipeline":
        contenders[THEIRS] = _theirs(cut, inputs, targets, transport.rank, store)
    taken: dict[str, list[float]] = {}
    idle: list[float] = []
    tasks_s: list[list[tuple[Task, float]]] = []  # of the last batch of each round, as is idle
    for number in range(rounds + 1):  # the first warms up
        for contender, make in contenders.items():
            transport.barrier()
            began = time.perf_counter()
            for _ in range(steps):
                make()
            if number:
                taken.setdefault(contender, []).append((time.perf_counter() - began) / steps)
            if number and contender == OURS and isinstance(split.part, StagedPart):
                waited = split.part.executor.waited
                idle.append(waited.idle_s / (waited.idle_s + waited.busy_s))
                tasks_s.append(waited.tasks_s)
        for contender, make in ((ONE, alone), (TWO, with_two_threads)):
            transport.barrier()
            if transport.rank == 0:  # the other waits at the next barrier
                began = time.perf_counter()
                for _ in range(steps):
                    make()
                if number:
                    taken.setdefault(contender, []).append((time.perf_counter() - began) / steps)
        transport.barrier()
    found: dict[str, Any] = {
        "form": str(spec), "taken": taken, "whole": whole, "idle": idle,
        "held": sum(p.numel() for p in split.parameters()),
    }  # fmt: skip
    if isinstance(split.part, StagedPart):
        found["timetable"] = split.part.form.timetable(WORKERS, len(inputs))
        found["tasks_s"] = tasks_s
    return found


def _theirs(cut: int, inputs: Tensor, targets: Tensor, rank: int, store: str) -> Callable[[], Any]:
    """PyTorch's own 1F1B over gloo, on the same cut."""
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    dist.init_process_group("gloo", store=dist.FileStore(store, WORKERS), rank=rank, world_size=2)
    model, *_ = case_of("pipeline")
    own = nn.Sequential(*(list(model)[:cut] if rank == 0 else list(model)[cut:]))  # type: ignore[call-overload]
    stage = PipelineStage(own, rank, WORKERS, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 8, loss_fn=nn.functional.cross_entropy)

    def step() -> None:
        if rank == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=targets, losses=[])

    return step
