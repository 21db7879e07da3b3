"""Predict the speed of one setting: its ranks run in virtual time on a described cluster.

Each worker draws the time of each step from the measured distribution, so a synchronous step waits
for the slowest of P draws. What is sent follows from the strategy's declared exchanges, the codec
and the schedules. Nothing of that is fitted.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from paceline.errors import BadRequest
from paceline.planning.arrays import Clocks, Floats
from paceline.planning.cluster import Cluster
from paceline.planning.engine import Engine
from paceline.planning.programs import Costs, Lineup, Overlap
from paceline.planning.queues import PIECE_BYTES
from paceline.strategies.base import Strategy, codec_for
from paceline.strategies.parts.pattern import PushPull, Reduction, Swap
from paceline.transport.virtual import Link
from paceline.types import Layout

EXACTLY_UP_TO = 64  # workers; above, the clocks are arrays (arrays.py)
LEAST_STEPS, LEAST_STEPS_APART = 12, 48  # the second: of a few workers that drift apart
FEWEST_STEPS, MOST_STEPS = 200, 2000  # in which exchanges are looked for that repeat
FEW = 16
REPLICAS = 4  # predictions with different draws
# What a profile cannot know of another machine (the interval includes it), as a relative deviation:
# the median error of checks whose workers had cores of their own was 2% to 12% (docs/planning.md).
UNSEEN = 0.06
WORTH_SAYING = 0.01  # a codec pays where a step becomes shorter by this share
BYTES = 4  # of a float32 number
OVERLAPPING = ("serial", "allreduce")


@dataclass(frozen=True)
class Worker:
    """What one worker costs: from a profile."""

    layout: Layout
    quantiles_s: Sequence[float]  # of a step's computing, for this batch size
    batch_size: int
    costs: Costs = Costs()
    deviation: float = 0.0  # of the workers' persistent speeds, relative
    overlap: Overlap | None = None  # where the exchange begins inside the backward pass


@dataclass(frozen=True)
class Setting:
    """What is predicted."""

    strategy: Strategy
    codec: str
    workers: int
    servers: int = 0
    steps_per_epoch: int = 1000


@dataclass(frozen=True)
class Prediction:
    """What a setting would do. A step is one step of every worker."""

    workers: int
    batch_size: int
    step_s: float
    low_s: float  # a 95% interval of step_s
    high_s: float
    compute_s: float  # the mean of a worker's computing in a step
    sent_bytes: float  # of all ranks, in a step
    messages: float  # the same
    coding_s: float  # the same: processor time of encoding, decoding and adding
    hosts: int

    @property
    def samples(self) -> int:
        """Of all workers, in a step."""
        return self.workers * self.batch_size

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.step_s

    @property
    def low(self) -> float:
        """Samples per second, the lower end of the interval."""
        return self.samples / self.high_s

    @property
    def high(self) -> float:
        return self.samples / self.low_s


def predict(setting: Setting, worker: Worker, cluster: Cluster, seed: int = 0) -> Prediction:
    """Predict one setting. The same request gives the same answer."""
    lineup = _lineup(setting, worker, cluster)
    cluster.check(setting.workers)
    repeats = _period(lineup)
    # The slowest of very many draws hardly differs from step to step.
    many = setting.workers > EXACTLY_UP_TO
    few = 1 < setting.workers <= FEW and _drift_apart(lineup)
    least = 3 if many else LEAST_STEPS_APART if few else LEAST_STEPS
    steps = repeats * max(1, -(-least // repeats))
    logs, computes, sent, messages, coding = [], [], 0.0, 0.0, 0.0
    for replica in range(2 if many else REPLICAS):
        times = _times(setting, worker, cluster, steps, seed + replica)
        step_s, sent, messages, coding = _run(lineup, cluster, times, repeats, seed + replica)
        logs.append(math.log(step_s))
        computes.append(float(times.mean()))
    middle = statistics.fmean(logs)
    busy_s = _busy_s(setting, worker, cluster, statistics.fmean(computes), sent, messages)
    middle = max(middle, math.log(busy_s)) if busy_s else middle
    deviation = math.hypot(statistics.stdev(logs), UNSEEN)
    return Prediction(
        setting.workers,
        worker.batch_size,
        math.exp(middle),
        math.exp(middle - 1.96 * deviation),
        math.exp(middle + 1.96 * deviation),
        statistics.fmean(computes),
        sent,
        messages,
        coding,
        cluster.hosts_used(setting.workers, setting.servers),
    )


def limits(setting: Setting, worker: Worker, cluster: Cluster, seed: int = 0) -> dict[str, float]:
    """The share of a step that each thing costs: what would be gained without it."""
    steady = replace(worker, quantiles_s=[float(np.mean(worker.quantiles_s))], deviation=0.0)
    without_latency = replace(cluster, between=replace(cluster.between, latency_s=0.0))
    without_bytes = replace(cluster, between=replace(cluster.between, s_per_byte=0.0))
    free = replace(cluster, between=Link(), inside=Link(), speeds=(1.0,))
    whole = predict(setting, worker, cluster, seed).step_s
    same_speed = replace(cluster, speeds=(1.0,))

    def gained(with_: Worker, on: Cluster) -> float:
        return max(0.0, 1 - predict(setting, with_, on, seed).step_s / whole)

    found = {
        "latency": gained(worker, without_latency),
        "bandwidth": gained(worker, without_bytes),
        "waiting": gained(steady, same_speed),
        "coding": gained(replace(worker, costs=Costs()), cluster),
    }
    compute = predict(setting, replace(steady, costs=Costs()), free, seed).step_s / whole
    return {"computing": min(1.0, compute), **found}


def _lineup(setting: Setting, worker: Worker, cluster: Cluster) -> Lineup:
    strategy = setting.strategy
    codec = codec_for(strategy, setting.codec)
    most = strategy.traits.most_workers
    if most is not None and setting.workers > most:
        raise BadRequest(f"strategy {strategy.name} has at most {most} workers")
    if strategy.traits.needs_shared_memory and setting.workers > cluster.per_host:
        raise BadRequest(
            f"strategy {strategy.name} needs memory that all workers share: {setting.workers}"
            f" workers must be on one host; use --hosts 1x{setting.workers}"
        )
    codec.fits(worker.layout)
    if worker.overlap is not None:
        _refuse_overlap(setting, codec.lossless)
    return Lineup(
        strategy,
        codec,
        worker.layout,
        setting.workers,
        setting.servers,
        setting.steps_per_epoch,
        costs=worker.costs,
        fastest=fastest(setting.workers, BYTES * worker.layout.numel, cluster),
        overlap=worker.overlap if setting.workers > 1 else None,
    )


def _refuse_overlap(setting: Setting, lossless: bool) -> None:
    if setting.strategy.name not in OVERLAPPING or not lossless:
        raise BadRequest(
            f"overlap is predicted for {' and '.join(OVERLAPPING)}, without a codec: leave it out"
        )
    if setting.workers > EXACTLY_UP_TO:
        raise BadRequest(f"overlap is predicted for up to {EXACTLY_UP_TO} workers")


def fastest(workers: int, size_bytes: int, cluster: Cluster) -> str:
    """The all-reduce that `collective=auto` would find to be the fastest."""
    link = cluster.between if workers > cluster.per_host else cluster.inside
    alpha, sending = link.latency_s, size_bytes * link.s_per_byte
    levels = math.ceil(math.log2(workers)) if workers > 1 else 0
    share = (workers - 1) / workers
    seconds = {
        "ring": 2 * (workers - 1) * alpha + 2 * share * sending,
        "halving-doubling": 2 * levels * alpha + 2 * share * sending,
        "tree": 2 * levels * (alpha + sending),
    }
    return min(seconds, key=lambda name: seconds[name])


def _busy_s(
    setting: Setting,
    worker: Worker,
    cluster: Cluster,
    compute_s: float,
    sent: float,
    messages: float,
) -> float:
    """What the cores of a host need for a step, where a person has said how many there are.

    Computing, and the processor time of moving bytes: a step cannot be shorter.
    """
    if cluster.cores is None:
        return 0.0
    hosts = -(-setting.workers // cluster.per_host)
    crowd = cluster.speed(0, setting.workers) / cluster.speeds[0]  # 1 where each has a core
    costs = worker.costs
    moving = sent * costs.moved_s_per_byte + messages * costs.moved_s_per_message
    return (setting.workers * compute_s * crowd + moving) / hosts / cluster.cores


def _drift_apart(lineup: Lineup) -> bool:
    """Whether workers do not wait for all others: their first steps are not like later ones."""
    return any(
        isinstance(exchange, Swap) or (isinstance(exchange, PushPull) and exchange.ahead > 0)
        for exchange in lineup.strategy.pattern(0, lineup.setting)
    )


def period(setting: Setting, worker: Worker) -> int:
    """Steps after which the exchanges of a setting repeat."""
    return _period(_lineup(setting, worker, Cluster(Link())))


def _period(lineup: Lineup) -> int:
    """Steps after which the exchanges repeat: the first step that has the most of them."""
    if lineup.workers == 1 and not lineup.servers:
        return 1
    counts = [
        len(lineup.strategy.pattern(step, lineup.setting))
        for step in range(min(max(lineup.steps_per_epoch, FEWEST_STEPS), MOST_STEPS))
    ]
    return counts.index(max(counts)) + 1 if max(counts) else 1


def _times(setting: Setting, worker: Worker, cluster: Cluster, steps: int, seed: int) -> Floats:
    """Draw the seconds of computing: a row per step, a column per worker."""
    draws = np.random.default_rng([seed, setting.workers])
    quantiles = np.asarray(worker.quantiles_s, dtype=np.float64)
    at = draws.random((steps, setting.workers)) * (len(quantiles) - 1)
    drawn = np.interp(at, np.arange(len(quantiles)), quantiles)
    own = draws.normal(0.0, worker.deviation, setting.workers)  # persistent, by worker
    speeds = [cluster.speed(w, setting.workers) for w in range(setting.workers)]
    return np.asarray(drawn * np.exp(own) / np.array(speeds))


def _run(
    lineup: Lineup, cluster: Cluster, times: Floats, repeats: int, seed: int
) -> tuple[float, float, float, float]:
    """Seconds per step; bytes, messages and seconds of coding of all ranks in a step."""
    steps = len(times)
    network = cluster.network(lineup.workers, lineup.servers)
    pushes = any(isinstance(e, PushPull) for e in lineup.strategy.pattern(0, lineup.setting))
    if lineup.workers <= EXACTLY_UP_TO or pushes:
        turns = lineup.workers <= EXACTLY_UP_TO and lineup.shares_ways(repeats - 1)
        piece = PIECE_BYTES if turns else None
        engine = Engine(network, True, piece, cluster.common_cores, seed)
        clocks = engine.run(lineup.programs(lambda w, step: float(times[step, w]), steps))
        sent = sum(engine.posted_bytes) / steps
        coding = (sum(engine.busy_s) - float(times.sum())) / steps
        return _per_step(clocks[: lineup.workers], steps), sent, engine.messages / steps, coding
    clock = Clocks(network, lineup.costs.s_per_byte_added)
    for step in range(steps):
        clock.now += times[step]
        for exchange in lineup.strategy.pattern(step, lineup.setting):
            if isinstance(exchange, Reduction):
                _reduce(clock, lineup, exchange)
            elif isinstance(exchange, Swap):
                _swap(clock, lineup, exchange)
    sent = float(clock.sent_bytes.sum()) / steps
    return _per_step(clock.now.tolist(), steps), sent, clock.messages / steps, 0.0


def _reduce(clock: Clocks, lineup: Lineup, exchange: Reduction) -> None:
    encoding, decoding = lineup.coding(exchange)
    clock.now += encoding
    for run in lineup.sums(exchange):
        clock.sum(run, lineup.workers)
    clock.now += decoding


def _swap(clock: Clocks, lineup: Lineup, exchange: Swap) -> None:
    source = np.array([w for w, p in enumerate(exchange.partners) if p is not None])
    if not len(source):
        return
    target = np.array([p for p in exchange.partners if p is not None])
    size = sum(lineup.message(lineup.codec.plain, lineup.layout))
    coding = 0.0 if lineup.codec.lossless else lineup.costs.encode.at(lineup.size_bytes)
    clock.now += coding
    left, arrived = clock.post(source, target, np.full(len(source), size))
    np.maximum.at(clock.now, target, arrived)
    np.maximum.at(clock.now, source, left)


def _per_step(clocks: Sequence[float], steps: int) -> float:
    """Seconds per step of all workers together: those that do not wait go on by themselves."""
    rate = statistics.fmean(steps / clock for clock in clocks)
    return 1 / rate


def pays_below(
    setting: Setting, codec: str, worker: Worker, cluster: Cluster, seed: int = 0
) -> float | None:
    """The bandwidth (bit/s) below which a codec makes the setting faster; None: it never does."""
    other = replace(setting, codec=codec)

    def faster(rate: float) -> bool:
        at = replace(cluster, between=replace(cluster.between, s_per_byte=8 / rate))
        ours = predict(other, worker, at, seed).step_s
        return ours < (1 - WORTH_SAYING) * predict(setting, worker, at, seed).step_s

    low, high = 1e5, 1e12
    if not faster(low):
        return None
    if faster(high):
        return math.inf
    for _ in range(12):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if faster(middle) else (low, middle)
    return math.sqrt(low * high)
