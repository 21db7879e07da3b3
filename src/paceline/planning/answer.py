"""The answer of a plan: all settings predicted, the best of them, and what limits it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from paceline.errors import BadRequest
from paceline.planning.accuracy import Accuracy, StepsTo
from paceline.planning.cluster import Cluster
from paceline.planning.predict import Prediction, Setting, Worker, limits, pays_below, predict
from paceline.registry import Spec, strategies
from paceline.strategies.base import Strategy

MAP_RATES = (1e7, 1e8, 1e9, 1e10, 2.5e10)  # bit/s
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
    accuracy: Accuracy | None = None  # how many steps it takes
    forms: Sequence[str] = ()  # of splitting the model


@dataclass(frozen=True)
class Row:
    """One setting with one number of workers."""

    strategy: str
    codec: str
    workers: int
    prediction: Prediction
    speedup: float  # against one worker alone, with the same batch per worker
    price: float | None  # of a million samples
    steps: StepsTo | None = None  # to the accuracy; None: not known
    price_per_s: float | None = None  # of all hosts
    splits: bool = False  # the model: `strategy` is a form

    @property
    def seconds(self) -> tuple[float, float, float] | None:
        """The time to the accuracy, with its 95% interval."""
        if self.steps is None:
            return None
        said, steps = self.prediction, self.steps
        middle = steps.steps * said.step_s
        down = math.hypot(math.log(steps.steps / steps.low), math.log(said.step_s / said.low_s))
        up = math.hypot(math.log(steps.high / steps.steps), math.log(said.high_s / said.step_s))
        return middle, middle * math.exp(-down), middle * math.exp(up)

    @property
    def price_to_accuracy(self) -> float | None:
        if self.seconds is None or self.price_per_s is None:
            return None
        return self.price_per_s * self.seconds[0]

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
    limits: dict[str, float]  # of the fastest row: shares of a step; empty for a split model
    pays: dict[tuple[str, str], float | None]  # (strategy, codec): below which bit/s it pays
    refused: tuple[str, ...] = ()  # combinations that do not exist, in sentences
    notices: tuple[str, ...] = field(default=())
    accuracy: float | None = None  # that rows have a time to

    @property
    def soonest(self) -> Row | None:
        """The setting that reaches the accuracy first."""
        timed = [row for row in self.rows if row.seconds is not None]
        return min(timed, key=lambda row: (row.seconds or (math.inf,))[0], default=None)

    @property
    def cheapest_to_accuracy(self) -> Row | None:
        priced = [row for row in self.rows if row.price_to_accuracy is not None]
        return min(priced, key=lambda row: row.price_to_accuracy or math.inf, default=None)

    def described(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "schema": 1,
            "predicted": True,
            "rows": [_described(row) for row in self.rows],
            "fastest": _described(self.fastest),
            "cheapest": None if self.cheapest is None else _described(self.cheapest),
            "accuracy": self.accuracy,
            "soonest": None if self.soonest is None else _described(self.soonest),
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
    form_at: Callable[[str, int, int], Prediction] | None = None,
) -> Plan:
    """Predict all settings of a request.

    `worker_at(batch_size, codec)` is what one worker costs, from a profile, and a notice where the
    profile does not really know it. `say` is told how many settings are done.
    `form_at(form, workers, batch_size)` predicts a model that is split.
    """
    cells = [
        (strategy, codec, workers)
        for strategy in request.strategies
        for codec in request.codecs
        for workers in request.workers
    ]
    split = [(form, workers) for form in request.forms for workers in request.workers]
    total = len(cells) + len(split)
    rows: list[Row] = []
    refused: dict[str, None] = {}
    notices: dict[str, None] = {}
    alone: dict[int, float] = {}
    for number, (strategy, codec, workers) in enumerate(cells):
        say(number, total)
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
            alone[batch] = _alone(request, batch, worker_at)
        speedup = found.samples_per_s / alone[batch]
        known = request.accuracy
        rows.append(
            Row(
                strategy,
                codec,
                workers,
                found,
                speedup,
                _price(found, request.cluster),
                known.of(setting.strategy, strategy, codec, workers, batch) if known else None,
                _per_second(found, request.cluster),
            )
        )
    for number, (form, workers) in enumerate(split, len(cells)):
        say(number, total)
        try:
            batch = _batch(request, workers)
            assert form_at is not None
            found = form_at(form, workers, batch)
            alone.setdefault(batch, _alone(request, batch, worker_at))
        except BadRequest as error:
            refused[f"{form}, {workers} workers: {error}"] = None
            continue
        rows.append(
            Row(
                form,
                "none",
                workers,
                found,
                found.samples_per_s / alone[batch],
                _price(found, request.cluster),
                request.accuracy.with_batch(workers * batch) if request.accuracy else None,
                _per_second(found, request.cluster),
                splits=True,
            )
        )
    say(total, total)
    if not rows:
        raise BadRequest(
            "none of these settings can be predicted: " + next(iter(refused), "none was named")
        )
    return _answer(request, rows, worker_at, tuple(refused), tuple(notices))


def map_of(
    request: Request, found: Plan, worker_at: Callable[[int, str], tuple[Worker, str | None]]
) -> list[dict[str, Any]]:
    """Every strategy and codec at usual bandwidths, with as many workers as the fastest has."""
    cells: list[dict[str, Any]] = []
    workers = found.fastest.workers
    ways = dict.fromkeys((row.strategy, row.codec) for row in found.rows if not row.splits)
    for strategy, codec in ways:
        for rate in MAP_RATES:
            link = replace(request.cluster.between, s_per_byte=8 / rate)
            try:
                batch = _batch(request, workers)
                worker, _ = worker_at(batch, codec)
                setting = _setting(request, strategy, codec, workers, batch)
                said = predict(setting, worker, replace(request.cluster, between=link))
            except BadRequest:
                continue
            name = strategy if codec == "none" else f"{strategy} + {codec}"
            cells.append({"setting": name, "bit_per_s": rate, "samples_per_s": said.samples_per_s})
    return cells


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
    pays: dict[tuple[str, str], float | None] = {}
    shares: dict[str, float] = {}
    if not fastest.splits:
        setting = _setting(request, fastest.strategy, fastest.codec, fastest.workers, batch)
        worker, _ = worker_at(batch, fastest.codec)
        shares = limits(setting, worker, request.cluster, request.seed)
    for codec in request.codecs:
        if codec == "none" or fastest.workers == 1 or fastest.splits:
            continue
        at = replace(setting, codec="none")
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
        shares,
        pays,
        refused,
        notices,
        request.accuracy.target if request.accuracy else None,
    )


def knee(rows: Sequence[Row]) -> int | None:
    """The largest number of workers up to which every added worker was worth adding."""
    ordered = sorted(rows, key=lambda row: row.workers)
    for before, after in pairwise(ordered):
        added = (after.speedup - before.speedup) / (after.workers - before.workers)
        if added < WORTH:
            return before.workers
    return None


def _alone(
    request: Request,
    batch: int,
    worker_at: Callable[[int, str], tuple[Worker, str | None]],
) -> float:
    """The samples per second of one worker."""
    worker, _ = worker_at(batch, "none")
    one = _setting(request, "serial", "none", 1, batch)
    return predict(one, worker, request.cluster, request.seed).samples_per_s


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


def _per_second(found: Prediction, cluster: Cluster) -> float | None:
    if cluster.price_per_hour is None:
        return None
    return cluster.price_per_hour / 3600 * found.hosts


def _price(found: Prediction, cluster: Cluster) -> float | None:
    per_s = _per_second(found, cluster)
    return None if per_s is None else per_s * 1e6 / found.samples_per_s


def _described(row: Row) -> dict[str, Any]:
    found = row.prediction
    seconds, low_s, high_s = row.seconds or (None, None, None)
    return {
        "strategy": str(Spec.of(row.strategy)),
        "splits_model": row.splits,
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
        "steps_to_accuracy": None if row.steps is None else row.steps.steps,
        "time_to_accuracy_s": seconds,
        "time_to_accuracy_low_s": low_s,
        "time_to_accuracy_high_s": high_s,
        "price_to_accuracy": row.price_to_accuracy,
    }


def _finite(rate: float | None) -> float | str | None:
    return "any" if rate is not None and math.isinf(rate) else rate
