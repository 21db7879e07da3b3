"""Measure a whole profile: computing, codecs, memory, links."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from paceline.common.allocator import keep_freed_memory
from paceline.common.cores import cores
from paceline.errors import BadRequest, PacelineError, UnknownName
from paceline.launch.failures import root_cause
from paceline.launch.forks import on_forked_ranks
from paceline.launch.mpi import on_mpi_ranks
from paceline.planning.fit import median
from paceline.planning.measure.codecs import measure_codecs
from paceline.planning.measure.compute import Loop, Measured, fitting, measure_steps, summarise
from paceline.planning.measure.links import able, link_cost, measure_links
from paceline.planning.profile import (
    CodecCost,
    LinkCost,
    Made,
    Memory,
    Model,
    Profile,
    TensorShape,
    now,
    portable,
)
from paceline.record.machine import environment
from paceline.record.resources import reset_rss_peak, rss_peak_bytes
from paceline.registry import transports
from paceline.replica.replica import Replica
from paceline.request.config import Config
from paceline.request.job import Job
from paceline.request.prepare import prepare
from paceline.request.session import Session
from paceline.run.rank import Rank
from paceline.transport.alone import Alone
from paceline.transport.base import Rendezvous, Transport, Waits
from paceline.transport.choose import best_transport

BATCH_SIZES = (16, 64, 256)
SHARES = {"compute": 0.6, "codecs": 0.15, "links": 0.25}  # of the time
FEW_STEPS = 30  # their quantiles are rough
QUIET = 0.95  # of a core, for a worker that computes alone
OFF = 0.5  # how far a link's line may miss a measured message
ANSWER_S = 600.0
# What a profile decides, or leaves to the plan.
NOT_HERE = (
    "accumulate", "balance", "batch_size", "callbacks", "codec", "ema", "faults",
    "global_batch_size", "launcher", "master", "network", "out", "overlap", "privacy", "profile",
    "resume", "servers", "strategy", "threads", "transport", "workers",
)  # fmt: skip

# Called with ("progress", {"part": "compute", "share": 0.4}) and ("notice", {"text": ...})
Hear = Callable[[str, dict[str, Any]], None]


@dataclass(frozen=True)
class Wishes:
    """What is to be measured, and for how long."""

    batch_sizes: Sequence[int] = BATCH_SIZES
    seconds: float = 60.0
    workers: int = 2
    transports: Sequence[str] | None = None  # None: all that this machine has

    def time_for(self, part: str) -> float:
        return self.seconds * SHARES[part]


@dataclass(frozen=True)
class Found:
    """What a worker found out."""

    model: Model
    measured: Measured
    peak_bytes: int
    codecs: tuple[CodecCost, ...]
    missing: tuple[str, ...]


def measure(options: dict[str, Any], wishes: Wishes, hear: Hear) -> Profile:
    """Measure a model on data, both given as the options of `train`."""
    job, names = _job(options, wishes), _transports(wishes)
    batch_sizes, missing = fitting(job, wishes.batch_sizes)
    for notice in job.notices:
        hear("notice", {"text": notice})
    workers = _on_workers(job, batch_sizes, wishes, hear)
    compute = summarise([worker.measured for worker in workers], threads=1)
    links: tuple[LinkCost, ...] = ()
    if wishes.workers == 1:
        missing.append("Links need two workers, and were not measured.")
        missing.append("Whether workers differ in speed was not measured: there was one.")
    else:
        links, without = _links(names, wishes, job.config.plugin, hear)
        missing += [*without, *(said for link in links if (said := _off_the_line(link)))]
    if len(batch_sizes) == 1:
        missing.append(
            f"One batch size was measured, {batch_sizes[0]}: steps of another batch size cannot be"
            " predicted."
        )
    few = [steps.batch_size for steps in compute.steps if steps.count < FEW_STEPS]
    if few:
        missing.append(
            f"Fewer than {FEW_STEPS} steps were measured of batch size"
            f" {', '.join(map(str, few))}: their noise is known roughly. Use more --seconds."
        )
    if compute.core_share is not None and compute.core_share < QUIET:
        missing.append(
            f"The machine was busy: a worker that computed alone had {compute.core_share:.0%} of a"
            " core. Profile again while nothing else runs."
        )
    if wishes.workers > cores():
        missing.append(
            f"{wishes.workers} workers shared {cores()} core: their times together hold for this"
            " machine only."
        )
    return Profile(
        source="measured",
        model=workers[0].model,
        data=portable(job.config.data),
        made=made_here(),
        compute=compute,
        codecs=workers[0].codecs,
        memory=Memory(round(median([w.peak_bytes for w in workers])), max(batch_sizes)),
        links=links,
        missing=(*workers[0].missing, *missing),
    )


def made_here() -> Made:
    """When, where and with which versions: nothing that names a file or a person."""
    here = environment()
    machine = {name: here[name] for name in ("cpu", "cores", "memory_bytes", "system")}
    return Made(now(), machine, {name: here[name] for name in ("paceline", "python", "torch")})


def _job(options: dict[str, Any], wishes: Wishes) -> Job:
    given = sorted(name for name in NOT_HERE if options.get(name) not in (None, (), []))
    if given:
        raise BadRequest(
            f"{given[0]} is no option of a profile, which measures plain steps, on one thread per"
            " worker, without an exchange: leave it out"
        )
    config = Config.make({**options, "workers": wishes.workers, "threads": 1, "launcher": "local"})
    if config.device not in ("cpu", "auto"):
        raise BadRequest(f"device={config.device}: profiles are measured on the CPU only")
    return prepare(config.merged({"device": "cpu"}), lambda config: Path("profile"))


def _transports(wishes: Wishes) -> list[str]:
    """Return the transports to measure; refuse those that are unknown or cannot be measured."""
    here = able()
    if wishes.transports is None:
        return here
    for name in wishes.transports:
        if name not in transports.names():
            raise UnknownName("transport", name, transports.names())
        if name not in here:
            lacks = transports.entry(name).make.missing()
            why = lacks or "it does not move the CPU's memory between processes"
            raise BadRequest(f"transport {name} cannot be measured here: {why}")
    return list(dict.fromkeys(wishes.transports))


# --- computing, codecs and memory: on workers that hold the model


def _on_workers(job: Job, batch_sizes: list[int], wishes: Wishes, hear: Hear) -> list[Found]:
    results, failures = on_forked_ranks(
        partial(_worker, job, batch_sizes, wishes), wishes.workers, hear, Waits(ANSWER_S)
    )
    if failures:
        raise root_cause(failures, wishes.workers)
    return [results[rank] for rank in range(wishes.workers)]


def _worker(
    job: Job, batch_sizes: list[int], wishes: Wishes, rendezvous: Rendezvous, say: Hear
) -> Found:
    torch.set_num_threads(1)
    keep_freed_memory()
    reset_rss_peak()
    leads = rendezvous.rank == 0

    def told(part: str, share: float) -> None:
        if leads:
            say("progress", {"part": part, "share": share})

    transport: Transport = (
        transports.entry(best_transport()).make.connect(rendezvous)
        if rendezvous.size > 1
        else Alone()
    )
    session = Session(job, job.out)
    replica = Rank.of(session, transport, Unrecorded(), lambda kind, content: None).replica()
    if job.config.compile is not None:
        replica.compile(job.config.compile)
    loop = Loop(job, replica, rendezvous.rank, batch_sizes)
    measured = measure_steps(
        loop, batch_sizes, transport, wishes.time_for("compute"), partial(told, "compute")
    )
    peak = rss_peak_bytes()
    model, missing = _model(job, replica)
    costs: tuple[CodecCost, ...] = ()
    if leads:
        # Gradients as the last step left them, before an exchange.
        region = max(replica.regions, key=lambda region: region.grads.numel())
        costs, refused = measure_codecs(
            region.grads, region.grad_layout, wishes.time_for("codecs"), partial(told, "codecs")
        )
        missing += refused
    transport.barrier()
    transport.close()
    return Found(model, measured, peak, costs, tuple(missing))


class Unrecorded:
    """A record that keeps nothing."""

    def write(self, kind: str, **fields: Any) -> None:
        return


def _model(job: Job, replica: Replica) -> tuple[Model, list[str]]:
    regions, missing = replica.regions, []
    kinds = {region.grads.element_size() for region in regions if region.grads.numel()}
    if len(kinds) > 1:
        missing.append(
            f"The model has numbers of {' and '.join(map(str, sorted(kinds)))} bytes: the bytes of"
            " messages are computed as if all had the larger size."
        )
    slots = [slot for region in regions for slot in region.grad_layout.slots]
    tensors = tuple(TensorShape(slot.name, slot.shape) for slot in slots)
    name = portable(job.config.model)
    return Model(name, replica.parameter_count, max(kinds, default=4), tensors), missing


# --- links


def _links(
    names: list[str], wishes: Wishes, plugins: tuple[str, ...], hear: Hear
) -> tuple[tuple[LinkCost, ...], list[str]]:
    """Measure all transports in turns, under mpirun where MPI is one of them."""
    body = partial(measure_links, names, wishes.time_for("links"))
    missing: list[str] = []
    if not names:
        return (), ["Links were not measured: no transport connects processes here."]
    under_mpi = [name for name in names if _needs_mpirun(name)]
    if under_mpi:
        try:
            return _costs(names, *on_mpi_ranks(body, 2, hear, Waits(ANSWER_S), plugins)), missing
        except PacelineError as error:
            missing.append(f"Transport {under_mpi[0]} was not measured: {error}.")
            names = [name for name in names if name not in under_mpi]
            if not names:
                return (), missing
            body = partial(measure_links, names, wishes.time_for("links"))
    return _costs(names, *on_forked_ranks(body, 2, hear, Waits(ANSWER_S))), missing


def _off_the_line(link: LinkCost) -> str | None:
    size, miss = link.worst
    if abs(miss) <= OFF:
        return None
    return (
        f"Messages of {link.transport} are not on a line: at {size:,} bytes it says"
        f" {link.line.at(size):.3g} s, off by {miss:+.0%}."
    )


def _needs_mpirun(name: str) -> bool:
    traits = transports.entry(name).make.traits
    return bool(traits.started_by == "mpirun")


def _costs(
    names: list[str], results: dict[int, Any], failures: dict[int, PacelineError]
) -> tuple[LinkCost, ...]:
    if failures:
        raise root_cause(failures, 2)
    return tuple(link_cost(name, [results[0][name], results[1][name]]) for name in names)
