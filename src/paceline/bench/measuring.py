"""`paceline bench measuring`: what measuring itself costs, as throughput with it over throughput
without.

One run of two workers; every block of steps is either recorded and sampled or not, in turns, so
that noise hits both alike.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from paceline.bench.strategies import folder_and_data
from paceline.launch.failures import root_cause
from paceline.launch.forks import on_forked_ranks
from paceline.record.resources import Task
from paceline.record.sampler import Sampler
from paceline.record.writer import Recorder
from paceline.registry import transports
from paceline.request.config import Config
from paceline.request.job import Job
from paceline.request.prepare import prepare
from paceline.request.session import Session
from paceline.run.worker import Worker
from paceline.transport.base import Rendezvous

WORKERS, BLOCK = 2, 20
GOAL = 0.98
WARM_UP = 4 * BLOCK


class InTurns:
    """A recorder that records some blocks of steps and not others, in the order + - - +, and times
    them all.
    """

    def __init__(self, recorder: Recorder, sampler: PausingSampler) -> None:
        self.recorder, self.sampler = recorder, sampler
        self.steps, self.began = 0, 0.0
        self.blocks: dict[bool, list[float]] = {True: [], False: []}

    @property
    def on(self) -> bool:
        return self.steps // BLOCK % 4 in (0, 3)

    def write(self, kind: str, **fields: Any) -> None:
        on = self.on
        if on:
            self.recorder.write(kind, **fields)
        if kind != "step":
            return
        self.steps += 1
        if self.steps % BLOCK == 0:
            now = time.perf_counter()
            if self.began and self.steps > WARM_UP:
                self.blocks[on].append(now - self.began)
            self.sampler.on, self.began = self.on, now


class PausingSampler(Sampler):
    """Sleeps while it is not wanted."""

    on = True

    def _sample(self) -> None:
        if self.on:
            super()._sample()


def bench_measuring(
    data_dir: str | None = None, blocks: int = 200, batch_size: int = 64, every_s: float = 0.5
) -> dict[str, Any]:
    """The ratio of samples per second with and without, of each pair of neighbouring blocks."""
    _, data = folder_and_data(data_dir)
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        config = {
            "data": data.name, "data_dir": data_dir, "model": "cnn", "strategy": "allreduce", "workers": WORKERS, "threads": 1,
            "batch_size": batch_size, "steps": WARM_UP + 2 * BLOCK * blocks, "epochs": 10_000, "memory_format": "channels_last",
            "evaluate_every": "10000epochs", "out": f"{folder}/run", "sample_every_s": every_s,
        }  # fmt: skip
        job = prepare(
            Config.make({k: v for k, v in config.items() if v is not None}), lambda c: Path(folder)
        )
        results, failures = on_forked_ranks(partial(_rank, job), WORKERS, deadline_s=600.0)
    if failures:
        raise root_cause(failures, WORKERS)
    blocks_of = [results[0][key] for key in ("with", "without")]
    pairs = [without / measured for measured, without in zip(*blocks_of, strict=False)]
    return {
        "data": data.name,
        "batch_size": batch_size,
        "pairs": len(pairs),
        "sample_every_s": every_s,
        "median": statistics.median(pairs),
        "quarters": statistics.quantiles(pairs, n=4),
        "own_share": statistics.fmean(r["spent_s"] / sum(r["with"]) for r in results.values()),
        "goal": GOAL,
    }


def _rank(job: Job, rendezvous: Rendezvous, say: Any) -> dict[str, Any]:
    torch.set_num_threads(1)
    transport = transports.entry(job.transport).declared.connect(rendezvous)
    recorder = Recorder(job.out / "events" / f"worker-{rendezvous.rank}.jsonl", rendezvous.rank)
    sampler = PausingSampler(
        recorder, job.config.sample_every_s, Task(), whole_machine=rendezvous.rank == 0
    )
    turns = InTurns(recorder, sampler)
    worker = Worker(Session(job, job.out), transport, turns, lambda kind, content: None)
    sampler.start()
    worker.train()
    sampler.stop()
    transport.barrier()
    spent = recorder.spent_s + sampler.spent_s
    return {"with": turns.blocks[True], "without": turns.blocks[False], "spent_s": spent}
