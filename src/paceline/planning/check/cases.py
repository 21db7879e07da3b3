"""The settings of a check: drawn by a seed, predicted, and run with synthetic compute.

A worker sleeps for a time that is drawn from the profile instead of computing (model `stand-in`,
fault `compute`). So many workers run on this machine as if each had a core of its own, as long as
moving the bytes leaves its cores mostly idle.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from paceline.common.cores import cores
from paceline.errors import BadRequest
from paceline.launch.run import run
from paceline.planning.answer import built
from paceline.planning.check.links import LinkFound, crowds_for
from paceline.planning.cluster import Cluster
from paceline.planning.engine import Engine, Program, Spend
from paceline.planning.predict import Prediction, Setting, period, predict
from paceline.planning.profile import Profile
from paceline.planning.workers import worker_of
from paceline.record.steady import WARM_UP_SHARE, WARM_UP_STEPS, speed_of
from paceline.request.config import Config
from paceline.request.prepare import prepare
from paceline.transport.virtual import Link, Network

RUN_S = 8.0  # what a run takes, about
MOST_STEPS = 2000
CROWD_STEPS, BISECTIONS = 40, 20  # in virtual time
MOVING_SHARE = 0.2  # of the machine's cores: above, moving bytes counts as computing
# How far earlier draws were off where moving bytes took all cores, as a relative deviation
# (docs/planning.md); the interval includes it in proportion to the share that is taken.
CROWDED = 0.3


@dataclass(frozen=True)
class Case:
    """One setting that is predicted, then measured."""

    strategy: str
    codec: str
    workers: int
    network: str  # 100mbit
    model: str
    batch_size: int  # of each worker

    @property
    def name(self) -> str:
        codec = "" if self.codec == "none" else f" + {self.codec}"
        return f"{self.strategy}{codec} x {self.workers}, {self.model}, {self.network}"

    @property
    def servers(self) -> int:
        return 1 if built(self.strategy).traits.serves == "ranks" else 0


@dataclass(frozen=True)
class Epoch:
    """What a pass over the data means to a case."""

    steps: int = 1 << 20
    full: float = 1.0  # the mean samples of a step over a full one's: the last step has the rest


@dataclass(frozen=True)
class Foretold:
    """The prediction of a case, with a 95% interval."""

    samples_per_s: float
    low: float
    high: float
    step_s: float
    moving_share: float  # of the machine's cores, for moving and coding bytes
    steps: int  # of the run that measures it

    @property
    def shares_cores(self) -> bool:
        """Whether the workers slow each other down by moving bytes on the same cores."""
        return self.moving_share > MOVING_SHARE


@dataclass(frozen=True)
class Seen:
    """What a run measured."""

    samples_per_s: float
    cpu_share: float  # of the machine's cores, of all ranks


def drawn(
    strategies: Sequence[str],
    codecs: Sequence[str],
    workers: Sequence[int],
    places: Sequence[tuple[str, str, int, int]],
    count: int,
    seed: int,
    more: dict[str, Any],
) -> list[Case]:
    """Draw different settings that Paceline accepts.

    A place is (network, model, batch size, the most workers). Refused combinations are drawn
    again. Where there are not so many, all are taken. `more` are options of `train` for the data.
    """
    all_ = [
        Case(strategy, codec, number, network, model, batch)
        for strategy in strategies
        for codec in codecs
        for network, model, batch, most in places
        for number in workers
        if number <= most
    ]
    random.Random(seed).shuffle(all_)
    found: list[Case] = []
    for case in all_:
        if len(found) == count:
            break
        if _accepted(case, more):
            found.append(case)
    if not found:
        raise BadRequest("none of these settings can be run: name other strategies or codecs")
    return found


def _accepted(case: Case, more: dict[str, Any]) -> bool:
    try:
        prepare(Config.make(_options(case, 1, more)), lambda _: Path("check"))
    except BadRequest:
        return False
    return True


def epoch_of(case: Case, more: dict[str, Any]) -> Epoch:
    """The steps of an epoch, and how full they are, with `more` options of `train` for the data."""
    job = prepare(Config.make(_options(case, 1, more)), lambda _: Path("check"))
    steps = job.shards().steps_per_epoch
    assert steps is not None
    return Epoch(steps, len(job.data.train) / steps / (case.workers * case.batch_size))


@dataclass(frozen=True)
class Beside:
    """What a worker of a run really does in a step: records, the data, updates.

    `crowds`: by the number of ranks that share this machine's cores and their caches, the seconds
    that a step needs of a core.
    """

    crowds: tuple[tuple[int, float], ...]

    def busy_s(self, ranks: int) -> float:
        """Between two crowds that were measured: on the line through them."""
        at, seen = zip(*self.crowds, strict=True)
        return float(np.interp(ranks, at, seen))

    def slower(self, ranks: int) -> float:
        """How many times as long the same work takes among so many ranks."""
        return max(1.0, self.busy_s(ranks) / max(1e-9, self.crowds[0][1]))


def beside(
    profile: Profile, model: str, batch_size: int, most_ranks: int, more: dict[str, Any]
) -> Beside:
    """Measure it on one worker, and on several that exchange nothing before their last step."""
    mean = statistics.fmean(profile.compute.at(batch_size)[0].quantiles_s)
    told = Foretold(0.0, 0.0, 0.0, mean, 0.0, steps_for(mean, 1))
    crowds = []
    for ranks in (1, *crowds_for(most_ranks)[1:]):
        case = Case("serial" if ranks == 1 else "psgd", "none", ranks, "", model, batch_size)
        seen = measure(case, told, profile, 0, more)
        step_s = epoch_of(case, more).full * ranks * batch_size / seen.samples_per_s
        crowds.append((ranks, busy_in(step_s, synthetic_times(profile, case), ranks, cores())))
    return Beside(tuple(crowds))


def busy_in(step_s: float, sleeps_s: Sequence[float], ranks: int, count: int) -> float:
    """The seconds of a core that a step needs whose ranks sleep and then wait for `count` cores."""
    luck = np.random.default_rng(ranks)
    draws = luck.choice(np.asarray(sleeps_s), (CROWD_STEPS, ranks))

    def steps(busy_s: float, rank: int) -> Program:
        for step in range(CROWD_STEPS):
            yield Spend(float(draws[step, rank]), shared=False)
            yield Spend(busy_s)

    def step_of(busy_s: float) -> float:
        engine = Engine(Network(tuple(range(ranks)), Link()), queues=True, cores=count)
        return statistics.fmean(engine.run([steps(busy_s, rank) for rank in range(ranks)]))

    low, high = 0.0, step_s
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if step_of(middle) < step_s * CROWD_STEPS:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def foretell(
    case: Case,
    profile: Profile,
    found: LinkFound,
    own: Beside | None = None,
    seed: int = 0,
    epoch: Epoch | None = None,
) -> Foretold:
    """Predict a case on links that were measured alone."""
    epoch = epoch or Epoch()
    worker, _ = worker_of(profile)(case.batch_size, case.codec)
    ranks = case.workers + case.servers
    moving = found.moving(ranks)
    costs = replace(
        worker.costs if own is None else worker.costs.slower(own.slower(ranks)),
        moved_s_per_message=moving.s_per_message,
        moved_s_per_byte=moving.s_per_byte,
        beside_s=0.0 if own is None else own.busy_s(ranks),
    )
    sleeping = worker.quantiles_s if own is None else synthetic_times(profile, case)
    worker = replace(worker, quantiles_s=sleeping, costs=costs)
    setting = Setting(built(case.strategy), case.codec, case.workers, case.servers, epoch.steps)
    said = predict(setting, worker, Cluster(found.link, common_cores=cores()), seed)
    moving_s = said.sent_bytes * moving.s_per_byte + said.messages * moving.s_per_message
    moving_s += said.coding_s  # with what workers do for themselves
    share = moving_s / cores() / said.step_s
    wide = _width(said, share)
    steps = steps_for(said.step_s, period(setting, worker))
    speed = said.samples_per_s * epoch.full
    return Foretold(speed, speed / wide, speed * wide, said.step_s, share, steps)


def _width(said: Prediction, share: float) -> float:
    """The factor up and down of a prediction's interval, wider where ranks share the cores."""
    own = math.log(said.high / said.low) / 2
    return math.exp(math.hypot(own, 1.96 * CROWDED * min(1.0, share)))


def steps_for(step_s: float, period: int) -> int:
    """So many steps that the measured ones, without the warm-up, are whole periods."""
    unit = round(period / WARM_UP_SHARE)
    if period == 1:
        unit = round(WARM_UP_STEPS / WARM_UP_SHARE)
    return max(1, min(math.ceil(RUN_S / step_s / unit), MOST_STEPS // unit)) * unit


def synthetic_times(profile: Profile, case: Case) -> list[float]:
    """The quantiles of what a worker sleeps: a step without what it really does."""
    steps, _ = profile.compute.at(case.batch_size)
    done_s = really_done_s(profile, case)
    return [max(0.0, each - done_s) for each in steps.quantiles_s]


def really_done_s(profile: Profile, case: Case) -> float:
    """What a worker of a run does really in a step, instead of sleeping."""
    steps, _ = profile.compute.at(case.batch_size)
    return (steps.load_s or 0.0) + (steps.update_s or 0.0)


def measure(
    case: Case, told: Foretold, profile: Profile, repeat: int, more: dict[str, Any]
) -> Seen:
    """Run a case once on a testbed, with `more` options of `train`."""
    with tempfile.TemporaryDirectory(prefix="paceline-check-") as temporary:
        times, out = Path(temporary) / "times.json", Path(temporary) / "run"
        times.write_text(json.dumps(synthetic_times(profile, case)))
        options = {
            **_options(case, told.steps, more),
            "faults": [f"compute:times={times},seed={repeat}"],
            "seed": repeat,
            "out": str(out),
        }
        job = prepare(Config.make(options), lambda _: out)
        record = run(job, lambda kind, content: None, clean=True)
    result = record["result"]
    used = sum(w["cpu_user_s"] + w["cpu_system_s"] for w in record["workers"])
    return Seen(speed_of(record), used / max(1e-9, result["wall_s"]) / cores())


def _options(case: Case, steps: int, more: dict[str, Any]) -> dict[str, Any]:
    place = {"network": case.network, "transport": "gloo"} if case.network else {}
    return {
        **more,
        **place,
        "model": f"stand-in:of={case.model}",
        "strategy": case.strategy,
        "codec": case.codec,
        "workers": case.workers,
        "batch_size": case.batch_size,
        "steps": steps,
        "epochs": 10_000,
        "evaluate_every": str(1 << 30),
        "evaluate_samples": 1,
        "threads": 1,
    }


def interleaved(cases: Sequence[Case], repeats: int, seed: int) -> list[tuple[int, Case]]:
    """Every case once per repeat, in a new random order each time."""
    luck = random.Random(seed)
    return [(repeat, case) for repeat in range(repeats) for case in luck.sample(cases, len(cases))]
