"""A profile from the record of an earlier run: computing and memory, but no codecs and no links."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from paceline.errors import BadRequest, PacelineError
from paceline.planning.compute import Compute, Steps
from paceline.planning.fit import median, quantiles
from paceline.planning.profile import Made, Memory, Model, Profile, TensorShape, now, portable
from paceline.record.reader import read_run, read_worker_events
from paceline.registry import Spec, models, transports
from paceline.replica.flat import layout_of

WARM_UP = 5  # steps of each worker that do not count
LEAST_STEPS = 10  # of a batch size, over all workers

Event = dict[str, Any]


def profile_of_run(folder: str | Path) -> Profile:
    """Make a profile of what a run's record holds; its `missing` says what a record lacks."""
    folder = Path(folder)
    record = read_run(folder)
    config, environment = record["config"], record["environment"]
    _refuse(folder, record)
    events = read_worker_events(folder)
    by_size = _seconds(events, servers=_servers(record))
    if not by_size:
        raise BadRequest(
            f"{folder} has no batch size with {LEAST_STEPS} steps after the first {WARM_UP} of a"
            " worker: profile a longer run"
        )
    model, missing = _model(record, events)
    speeds = _speeds(by_size)
    steps = []
    for size, workers in sorted(by_size.items()):
        own = [seconds * speeds.get(w, 1.0) for w, all_ in workers.items() for seconds in all_]
        steps.append(Steps(size, quantiles(own), len(own)))
    if len(steps) == 1:
        missing.append(
            f"The run had one batch size, {steps[0].batch_size}: steps of another batch size"
            " cannot be predicted."
        )
    threads = int(config.get("threads") or 1)
    if threads > 1:
        missing.append(f"The run's workers had {threads} threads each: its steps hold for these.")
    if config.get("oversubscribed"):
        missing.append(
            f"The run had more threads than the {environment.get('cores')} cores: its steps hold"
            " for workers that share cores."
        )
    if str(config.get("overlap")) == "on":
        missing.append("The run overlapped its exchanges: they slowed its backward passes.")
    missing.append(
        "A record does not hold the parts of a step, when gradients are ready, codecs and links:"
        " `paceline profile --model ... --data ...` measures them."
    )
    peaks = [w["rss_peak_bytes"] for w in record["workers"] if w.get("rss_peak_bytes")]
    machine = {k: environment.get(k) for k in ("cpu", "cores", "memory_bytes", "system")}
    versions = {k: str(environment.get(k)) for k in ("paceline", "python", "torch")}
    return Profile(
        source="record",
        model=model,
        data=portable(config.get("data")),
        made=Made(now(), machine, versions),
        compute=Compute(tuple(steps), threads, tuple(speeds[w] for w in sorted(speeds))),
        memory=Memory(max(peaks), max(by_size)) if peaks else None,
        missing=tuple(missing),
    )


def _refuse(folder: Path, record: dict[str, Any]) -> None:
    """Refuse runs whose records do not tell how long a worker computed."""
    config = record["config"]
    strategy = str(config["strategy"]).partition(":")[0]
    workers = [w for w in record["workers"] if w["role"] == "worker"]
    if record.get("privacy"):
        raise BadRequest(f"{folder} is a private run: its record does not tell single steps")
    if any(worker["sync_s"] is None for worker in workers):
        raise BadRequest(
            f"{folder} ran {strategy}, which exchanges inside the backward pass: computing and"
            " waiting cannot be told apart; profile a run with --strategy allreduce"
        )
    transport = str(config.get("transport")).partition(":")[0]
    if transport in transports.names() and transports.entry(transport).make.traits.take_turns:
        raise BadRequest(
            f"{folder} ran on {transport}, whose workers take turns: its times say nothing"
        )


def _servers(record: dict[str, Any]) -> set[int]:
    return {w["rank"] for w in record["workers"] if w["role"] == "server"}


def _seconds(events: Sequence[list[Event]], servers: set[int]) -> dict[int, dict[int, list[float]]]:
    """Return the compute seconds of every step by batch size and worker, after the warm-up."""
    found: dict[int, dict[int, list[float]]] = defaultdict(dict)
    for own in events:
        steps = [e for e in own if e["kind"] == "step"][WARM_UP:]
        for step in steps:
            size = step["n"]
            if step["rank"] in servers or size != int(size) or size < 1 or step["compute_s"] <= 0:
                continue
            found[int(size)].setdefault(step["rank"], []).append(step["compute_s"])
    return {
        size: workers
        for size, workers in found.items()
        if sum(map(len, workers.values())) >= LEAST_STEPS
    }


def _speeds(by_size: dict[int, dict[int, list[float]]]) -> dict[int, float]:
    """Return each worker's steady speed, from the batch sizes that several workers had."""
    ratios: dict[int, list[float]] = defaultdict(list)
    for workers in by_size.values():
        medians = {worker: median(all_) for worker, all_ in workers.items()}
        mean = sum(medians.values()) / len(medians)
        for worker, own in medians.items():
            ratios[worker].append(mean / own)
    found = {worker: median(all_) for worker, all_ in ratios.items()}
    scale = len(found) / sum(found.values())
    return {worker: speed * scale for worker, speed in found.items()}


def _model(record: dict[str, Any], events: Sequence[list[Event]]) -> tuple[Model, list[str]]:
    """Build the model without memory where its name says all, to know its tensors."""
    name, about = portable(record["config"].get("model")), record.get("model")
    starts = [e for own in events for e in own if e["kind"] == "start"]
    count = next((e["parameters"] for e in starts if e.get("parameters")), None)
    if about is not None and Spec.of(name).name in models.names():
        try:
            with torch.device("meta"):
                built = models.build(
                    name, input_shape=tuple(about["input_shape"]), classes=about["classes"]
                )
            tensors = tuple(TensorShape(s.name, s.shape) for s in layout_of(built).slots)
            total = sum(p.numel() for p in built.parameters())
            if count in (None, total):
                return Model(name, total, 4, tensors), []
        except PacelineError:
            pass  # a model of another version: the number of its parameters is still known
    if not isinstance(count, int) or count < 1:
        raise BadRequest("the record does not say how many parameters the model has")
    return Model(name, count, 4), [
        "The shapes of the model's tensors are not known: the messages of powersgd are computed as"
        " if the parameters were one vector, which it does not compress."
    ]
