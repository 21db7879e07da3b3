"""The answer of a plan: all settings predicted, the best of them, and what limits it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from paceline.errors import BadRequest
from paceline.planning.cluster import Cluster
from paceline.planning.predict import Prediction, Setting, Worker, limits, pays_below, predict
from paceline.registry import Spec, strategies
from paceline.strategies.base import Strategy

WORTH = 0.5  # a worker is worth adding that adds at least this share of one worker's speed


@dataclass(frozen=True)
class Request:
    """What to predict: every strategy with every codec and every number of workers."""

    strategies: Sequence[str]
    codecs: Sequence[str]
    workers: Sequence[int]
    cluster: Cluster
    batch_size: int | None = None  # per worker
    global_batch_size: int | None = None
    servers: int = 1  # of strategies that have servers
    samples: int | None = None  # of the data, for the time of an epoch
    seed: int = 0


@dataclass(frozen=True)
class Row:
    """One setting with one number of workers."""

    strategy: str
    codec: str
    workers: int
    prediction: Prediction
    speedup: float  # against one worker alone, with the same batch per worker
    price: float | None  # of a million samples

    @property
    def efficiency(self) -> float:
        return self.speedup / self.workers

    @property
    def name(self) -> str:
        return self.strategy if self.codec == "none" else f"{self.strategy} + {self.codec}"


@dataclass(frozen=True)
class Plan:
    """All predictions, and what follows from them."""

    rows: tuple[Row, ...]
    fastest: Row
    cheapest: Row | None
    knee: int | None  # for the fastest strategy and codec; None: not reached
    limits: dict[str, float]  # of the fastest row: shares of a step
    pays: dict[tuple[str, str], float | None]  # (strategy, codec): below which bit/s it pays
    refused: tuple[str, ...] = ()  # combinations that do not exist, in sentences
    notices: tuple[str, ...] = field(default=())

    def described(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "schema": 1,
            "predicted": True,
            "rows": [_described(row) for row in self.rows],
            "fastest": _described(self.fastest),
            "cheapest": None if self.cheapest is None else _described(self.cheapest),
            "knee": self.knee,
            "limits": self.limits,
            "pays_below_bit_per_s": [
                {"strategy": s, "codec": c, "bit_per_s": _finite(rate)}
                for (s, c), rate in self.pays.items()
            ],
            "refused": list(self.refused),
            "notices": list(self.notices),
        }


def plan(
    request: Request,
    worker_at: Callable[[int, str], tuple[Worker, str | None]],
    say: Callable[[int, int], None] = lambda done, of: None,
) -> Plan:
    """Predict all settings of a request.

    `worker_at(batch_size, codec)` is what one worker costs, from a profile, and a notice where the
    profile does not really know it. `say` is told how many settings are done.
    """
    cells = [
        (strategy, codec, workers)
        for strategy in request.strategies
        for codec in request.codecs
        for workers in request.workers
    ]
    rows: list[Row] = []
    refused: dict[str, None] = {}
    notices: dict[str, None] = {}
    alone: dict[int, float] = {}
    for number, (strategy, codec, workers) in enumerate(cells):
        say(number, len(cells))
        try:
            request.cluster.check(workers)
            batch = _batch(request, workers)
            worker, notice = worker_at(batch, codec)
            setting = _setting(request, strategy, codec, workers, batch)
            found = predict(setting, worker, request.cluster, request.seed)
        except BadRequest as error:
            refused[f"{strategy}, {codec}, {workers} workers: {error}"] = None
            continue
        if notice:
            notices[notice] = None
        if batch not in alone:
            plain, _ = worker_at(batch, "none")
            one = replace(setting, strategy=built("serial"), codec="none", workers=1, servers=0)
            alone[batch] = predict(one, plain, request.cluster, request.seed).samples_per_s
        speedup = found.samples_per_s / alone[batch]
        rows.append(Row(strategy, codec, workers, found, speedup, _price(found, request.cluster)))
    say(len(cells), len(cells))
    if not rows:
        raise BadRequest(
            "none of these settings can be predicted: " + next(iter(refused), "none was named")
        )
    return _answer(request, rows, worker_at, tuple(refused), tuple(notices))


def built(strategy: str) -> Strategy:
    found: Strategy = strategies.build(strategy)
    return found


def _answer(
    request: Request,
    rows: list[Row],
    worker_at: Callable[[int, str], tuple[Worker, str | None]],
    refused: tuple[str, ...],
    notices: tuple[str, ...],
) -> Plan:
    fastest = max(rows, key=lambda row: row.prediction.samples_per_s)
    priced = [row for row in rows if row.price is not None]
    batch = fastest.prediction.batch_size
    setting = _setting(request, fastest.strategy, fastest.codec, fastest.workers, batch)
    worker, _ = worker_at(batch, fastest.codec)
    pays: dict[tuple[str, str], float | None] = {}
    for codec in request.codecs:
        at = replace(setting, codec="none")
        if codec == "none" or fastest.workers == 1:
            continue
        try:
            coded, _ = worker_at(batch, codec)
            pays[fastest.strategy, codec] = pays_below(at, codec, coded, request.cluster)
        except BadRequest:
            continue
    return Plan(
        tuple(rows),
        fastest,
        min(priced, key=lambda row: row.price or math.inf) if priced else None,
        knee([r for r in rows if r.name == fastest.name]),
        limits(setting, worker, request.cluster, request.seed),
        pays,
        refused,
        notices,
    )


def knee(rows: Sequence[Row]) -> int | None:
    """The largest number of workers up to which every added worker was worth adding."""
    ordered = sorted(rows, key=lambda row: row.workers)
    for before, after in pairwise(ordered):
        added = (after.speedup - before.speedup) / (after.workers - before.workers)
        if added < WORTH:
            return before.workers
    return None


def _batch(request: Request, workers: int) -> int:
    if request.global_batch_size is None:
        return request.batch_size or 64
    if request.global_batch_size < workers:
        raise BadRequest(
            f"a global batch of {request.global_batch_size} samples has none for some of"
            f" {workers} workers"
        )
    return round(request.global_batch_size / workers)


def _setting(request: Request, strategy: str, codec: str, workers: int, batch: int) -> Setting:
    made = built(strategy)
    servers = request.servers if made.traits.serves == "ranks" else 0
    samples = request.samples or 1000 * workers * batch
    per_epoch = max(1, -(-samples // (workers * batch)))
    return Setting(made, codec, workers, servers, per_epoch)


def _price(found: Prediction, cluster: Cluster) -> float | None:
    if cluster.price_per_hour is None:
        return None
    return cluster.price_per_hour / 3600 * found.hosts * 1e6 / found.samples_per_s


def _described(row: Row) -> dict[str, Any]:
    found = row.prediction
    return {
        "strategy": str(Spec.of(row.strategy)),
        "codec": row.codec,
        "workers": row.workers,
        "batch_size": found.batch_size,
        "samples_per_s": found.samples_per_s,
        "samples_per_s_low": found.low,
        "samples_per_s_high": found.high,
        "step_s": found.step_s,
        "compute_s": found.compute_s,
        "sent_bytes_per_step": found.sent_bytes,
        "speedup": row.speedup,
        "efficiency": row.efficiency,
        "hosts": found.hosts,
        "price_per_million_samples": row.price,
    }


def _finite(rate: float | None) -> float | str | None:
    return "any" if rate is not None and math.isinf(rate) else rate
