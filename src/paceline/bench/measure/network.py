"""Measure which contender reaches an accuracy first on hosts with slow links.

On a network without cost a step of plain all-reduce takes its computing time only. So no contender
that needs as many steps can be faster than plain all-reduce by more than the bound
(compute + communication) / compute.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from paceline.bench.measure.strategies import folder_and_data
from paceline.collectives.base import choose
from paceline.common.links import Links
from paceline.launch.failures import root_cause
from paceline.launch.forks import on_forked_ranks
from paceline.launch.run import run
from paceline.registry import transports
from paceline.request.config import Config
from paceline.request.prepare import prepare
from paceline.testbed.build import lasting
from paceline.testbed.hosts import Testbed
from paceline.transport.base import Rendezvous, Waits

DDP, PLAIN = "ddp", "allreduce:collective=ring"
CONTENDERS = (
    DDP,
    PLAIN,
    "allreduce/sign",
    "allreduce/powersgd",
    "allreduce/topk",
    "local-sgd:every=16/fp16",
)
ALL_REDUCE_BYTES, ALL_REDUCES = 10_000_000, 5
MOST_STEPS = 3000


def bench_network(
    data_dir: str | None,
    rate: str,
    workers: int,
    model: str,
    batch_size: int,
    target: float,
    rounds: int,
    contenders: tuple[str, ...],
    say: Callable[[str], None],
) -> dict[str, Any]:
    links = Links.read(rate)
    _, data = folder_and_data(data_dir)
    names = list(dict.fromkeys((DDP, PLAIN, *(contenders or CONTENDERS))))
    with lasting(workers, links) as bed:
        say("all-reduce")
        all_reduce = _all_reduce(bed, workers)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        for number in range(rounds):
            for name in names:
                say(f"round {number + 1} of {rounds}: {name}")
                strategy, _, codec = name.partition("/")
                config = {
                    "data": data.name,
                    "model": model,
                    "strategy": strategy,
                    "codec": codec or "none",
                    "workers": workers,
                    "threads": 1,
                    "batch_size": batch_size,
                    "steps": MOST_STEPS,
                    "epochs": 99,
                    "memory_format": "channels_last",
                    "until_accuracy": target,
                    "evaluate_every": "20",
                    "evaluate_samples": 1000,
                    "network": str(links),
                    "transport": "gloo",
                    "seed": number,
                    "deadline_s": 120.0,
                    "out": f"{folder}/{number}-{names.index(name)}",
                    **({"data_dir": data_dir} if data_dir else {}),
                }
                job = prepare(Config.make(config), lambda c: Path(folder))
                runs[name].append(run(job, lambda kind, content: None, clean=True))
    rows = [_row(name, runs[name], runs[DDP]) for name in names]
    plain = next(r for r in rows if r["contender"] == PLAIN)
    bound = (plain["compute_s"] + plain["exchange_s"]) / plain["compute_s"]
    best = max((r["sooner"] for r in rows if r["sooner"] is not None), default=None)
    return {
        "data": data.name,
        "model": model,
        "workers": workers,
        "batch_size": batch_size,
        "target": target,
        "links": str(links),
        "rounds": rounds,
        "all_reduce": all_reduce,
        "rows": rows,
        "bound": bound,
        "of_bound": best / bound if best is not None else None,
    }


def _row(name: str, own: list[dict[str, Any]], ddp: list[dict[str, Any]]) -> dict[str, Any]:
    """Take medians over the rounds; times are per step, averaged over the workers."""

    def per_step(*keys: str) -> float:
        found = [[w for w in r["workers"] if w["role"] == "worker"] for r in own]
        return statistics.median(
            statistics.fmean(sum(w[k] or 0.0 for k in keys) / w["steps"] for w in ws)
            for ws in found
        )

    seconds = [r["result"]["time_to_accuracy_s"] for r in own]
    pairs = [
        (a["result"]["time_to_accuracy_s"], b["result"]["time_to_accuracy_s"])
        for a, b in zip(own, ddp, strict=True)
    ]
    ratios = [theirs / ours for ours, theirs in pairs if ours and theirs]
    return {
        "contender": name,
        "seconds": statistics.median(seconds) if all(s is not None for s in seconds) else None,
        "steps": round(statistics.median(r["result"]["steps"] for r in own)),
        "compute_s": per_step("compute_s"),
        "codec_s": per_step("encode_s", "decode_s"),
        "exchange_s": per_step("sync_s", "idle_s"),
        "sent_bytes": per_step("payload_sent_bytes"),
        "sooner": statistics.median(ratios) if len(ratios) == len(own) else None,
        "sooner_spread": [min(ratios), max(ratios)] if ratios else None,
    }


def _all_reduce(bed: Testbed, workers: int) -> dict[str, Any]:
    """Time all-reduces by their slowest rank, and compare with the time that the links allow."""
    results, failures = on_forked_ranks(_rank, workers, waits=Waits(120.0), bed=bed)
    if failures:
        raise root_cause(failures, workers)
    seconds = [max(results[r][i] for r in range(workers)) for i in range(ALL_REDUCES)]
    rate = bed.links.rate
    theory = 2 * (workers - 1) / workers * ALL_REDUCE_BYTES * 8 / rate if rate else None
    median = statistics.median(seconds)
    return {
        "bytes": ALL_REDUCE_BYTES,
        "seconds": median,
        "min": min(seconds),
        "max": max(seconds),
        "of_theory": median / theory if theory else None,
    }


def _rank(rendezvous: Rendezvous, say: Any) -> list[float]:
    torch.set_num_threads(1)
    transport = transports.entry("gloo").make.connect(rendezvous)
    ring, buffer = choose("ring", transport), torch.zeros(ALL_REDUCE_BYTES // 4)
    found = []
    for number in range(ALL_REDUCES + 1):
        transport.barrier()
        began = time.perf_counter()
        ring.all_reduce(buffer)
        if number:
            found.append(time.perf_counter() - began)
    transport.barrier()
    transport.close()
    return found
