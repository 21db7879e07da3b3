"""`paceline.profile` and `paceline.plan`: measure what a worker costs, and predict many of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from paceline.errors import BadRequest
from paceline.planning.answer import Plan, Request
from paceline.planning.answer import plan as predict_all
from paceline.planning.cluster import (
    MEMORY,
    PRESETS,
    Cluster,
    read_hosts,
    read_link,
    read_speeds,
    read_workers,
)
from paceline.planning.forms import predict_form
from paceline.planning.measure.accuracy import Question, measure_accuracy
from paceline.planning.measure.whole import BATCH_SIZES, Wishes, measure
from paceline.planning.predict import Prediction
from paceline.planning.profile import Profile
from paceline.planning.stored import read_profile, refuse_place, write_profile
from paceline.planning.workers import worker_of

STRATEGIES, CODECS = ("allreduce", "ps", "local-sgd", "gossip"), ("none", "fp16")
WORKERS = "1,2,4,8,16"

Names = str | Sequence[str]


def profile(
    *,
    model: Any = "cnn",
    data: Any = "mnist",
    batch_sizes: Sequence[int] = BATCH_SIZES,
    seconds: float = 60.0,
    workers: int = 2,
    transports: Sequence[str] | None = None,
    accuracy: float | None = None,
    follow: Sequence[str] = (),
    follow_workers: Sequence[int] = (2, 4, 8),
    out: str | Path | None = None,
    **options: Any,
) -> Profile:
    """Measure what one or two workers cost, for `plan`; `options` are those of `train`.

        known = paceline.profile(model="cnn", data="mnist", seconds=30)
        paceline.plan(known, network="1gbit", workers="1-16").fastest

    With `accuracy`, the steps to that test accuracy are counted, too; of the strategies in
    `follow` in virtual time. With `out` the profile is written to a file.
    """
    if out is not None:
        refuse_place(out)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # no pool of threads here: workers are forked from this process
    try:
        asked = {"model": model, "data": data, **options}
        wishes = Wishes(sorted(set(batch_sizes)), seconds, workers, transports)
        found = measure(asked, wishes, lambda kind, content: None)
        if accuracy is not None:
            counts = follow_workers if follow else ()
            question = Question(accuracy, min(batch_sizes), follow, counts)
            found = replace(found, accuracy=measure_accuracy(asked, question, lambda text: None))
    finally:
        torch.set_num_threads(threads)
    if out is not None:
        write_profile(found, out)
    return found


def plan(
    profile: str | Path | Profile,
    *,
    strategy: Names = STRATEGIES,
    codec: Names = CODECS,
    workers: str | Sequence[int] = WORKERS,
    network: str = "lan",
    inside: str | None = None,
    hosts: str | None = None,
    cores: int | None = None,
    servers: int = 1,
    speeds: str | None = None,
    price: float | None = None,
    batch_size: int | None = None,
    global_batch_size: int | None = None,
    samples: int | None = None,
    seed: int = 0,
    parallel: Names = (),
    overlap: bool = False,
    data_dir: str | None = None,
) -> Plan:
    """Predict how fast strategies would train on a cluster that is only described.

    found = paceline.plan("profile.json", network="10gbit,latency=50us", workers="1-16")
    found.fastest.name, found.fastest.prediction.samples_per_s, found.knee
    found.described()      # everything, as `paceline plan --json` prints it
    """
    known = profile if isinstance(profile, Profile) else read_profile(profile)
    cluster = cluster_of(network, inside, hosts, cores, speeds, price)
    request = request_of(
        known, cluster, strategy, codec, workers, batch_size, global_batch_size, servers, samples,
        seed, parallel,
    )  # fmt: skip
    return answer(known, request, network, data_dir, overlap)


def cluster_of(
    network: str,
    inside: str | None,
    hosts: str | None,
    cores: int | None,
    speeds: str | None,
    price: float | None,
) -> Cluster:
    """The cluster as a person describes it."""
    if price is not None and not 0 <= price < float("inf"):
        raise BadRequest(f"price={price}: it must be a number, 0 or more")
    if cores is not None and cores < 1:
        raise BadRequest(f"cores={cores}: it must be 1 or more")
    count, per_host = read_hosts(hosts) if hosts is not None else (None, 1)
    return Cluster(
        read_link(network),
        MEMORY if inside is None else read_link(inside),
        count,
        per_host,
        cores,
        read_speeds(speeds) if speeds is not None else (1.0,),
        price,
    )


def request_of(
    known: Profile,
    cluster: Cluster,
    strategy: Names,
    codec: Names,
    workers: str | Sequence[int],
    batch_size: int | None,
    global_batch_size: int | None,
    servers: int,
    samples: int | None,
    seed: int,
    parallel: Names = (),
) -> Request:
    """What to predict. Without a batch size, workers have the largest that was measured."""
    if batch_size is not None and global_batch_size is not None:
        raise BadRequest("give --batch-size or --global-batch-size, not both")
    numbers = workers if isinstance(workers, str) else ",".join(map(str, workers))
    return Request(
        _listed(strategy),
        _listed(codec),
        read_workers(numbers),
        cluster,
        batch_size or (None if global_batch_size else known.compute.batch_sizes[-1]),
        global_batch_size,
        servers,
        samples,
        seed,
        known.accuracy,
        _listed(parallel),
    )


def _listed(names: Names) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


def answer(
    known: Profile,
    request: Request,
    network: str,
    data_dir: str | None = None,
    overlap: bool = False,
    say: Callable[[int, int], None] = lambda done, of: None,
) -> Plan:
    """Predict all settings; the plan's notices hold what the profile cannot say.

    Models are split on hosts with links of `network`; `data_dir` is where their data are.
    """
    if request.forms and request.cluster.per_host > 1:
        raise BadRequest("split models are predicted with one worker on each host: leave hosts out")
    more = {"data_dir": data_dir} if data_dir else {}

    def form_at(form: str, workers: int, batch: int) -> Prediction:
        return predict_form(form, workers, batch, known, PRESETS.get(network, network), more)

    found = predict_all(request, worker_of(known, overlap), say, form_at)
    doubt = known.accuracy.doubt if known.accuracy else None
    said = (*known.missing, *((doubt,) if doubt else ()))
    return replace(found, notices=(*found.notices, *said))
