"""From options to a Job: look up every name, load the data, work out every size.

Everything that can be refused is refused here, before a process starts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.common.cores import cores
from paceline.common.sharing import Sharing
from paceline.data.base import Data, Stream
from paceline.data.sharded import ShardedSamples
from paceline.errors import BadRequest
from paceline.optim.schedules import Plateau, Scaling
from paceline.privacy import plan as privacy
from paceline.privacy.checks import refuse_mixing
from paceline.privacy.ledger import LedgerEntry
from paceline.privacy.settings import Settings
from paceline.record import checkpoint
from paceline.record.keep import Keep
from paceline.registry import Spec, load_plugin, models, strategies, transports
from paceline.replica.flat import layout_of
from paceline.replica.refusals import refuse_lazy
from paceline.replica.replica import has_batch_norm
from paceline.request import sizes
from paceline.request.callbacks import make_callbacks
from paceline.request.choices import (
    check_compile,
    check_options,
    check_strategy,
    device_of,
    overlap_of,
    servers_of,
    transport_of,
    without_effect,
)
from paceline.request.config import Config
from paceline.request.data import data_of, is_built_in
from paceline.request.earlier import run_folder
from paceline.request.forms import check_form
from paceline.request.job import Job
from paceline.request.names import resolve_names
from paceline.request.step import check_step
from paceline.strategies.base import Strategy, codec_for

OPEN_ENDED_EPOCHS = 100  # the most that an --until rule may take when no other end is given
METRIC_OF = {"mse": "mse", "cross-entropy": "accuracy", "nll": "accuracy", "bce": "accuracy"}


def prepare(
    config: Config,
    out_name: Callable[[Config], Path],
    spent: tuple[LedgerEntry, ...] = (),
    sharing: Sharing | None = None,
) -> Job:
    """Make the job that the options describe.

    `out_name` names the folder of a run that was given none. `spent`: the privacy that earlier
    attempts have used, for a private run that begins again. `sharing`: how ranks that a launcher
    has started share the cores of their machines; None: the workers are started here.
    """
    started = time.perf_counter()
    for plugin in config.plugin:
        load_plugin(plugin)
    resume_from, damaged = checkpoint.latest(Path(config.resume)) if config.resume else (None, None)
    folder = run_folder(config.resume) if config.resume else None
    resumed = privacy.Resumed.of(resume_from, folder, config.privacy is not None, spent)
    chosen = Chosen.of(config)
    config, strategy = chosen.config, chosen.strategy
    callbacks, called, not_called = make_callbacks(config.callbacks)

    data = data_of(config)
    batch_sizes = sizes.batch_sizes(config, data)
    threads, shared = _threads(config, chosen.servers, sharing)
    epochs = _epochs(config)
    loss, metric = _objective(config, data)
    protection = None
    if chosen.private is not None:
        protection = privacy.protect(
            chosen.private, strategy, data, batch_sizes, epochs, config.steps, resumed
        )
    out = Path(config.out) if config.out else folder if folder else out_name(config)
    memory_format = _memory_format(config, resume_from)
    resolved = config.merged(
        {
            "memory_format": memory_format,
            "shard": _shard(chosen, data),
            "epochs": epochs,
            "threads": threads,
            "servers": chosen.servers,
            "overlap": "off" if protection else overlap_of(config, chosen.transport, shared),
            "privacy": str(protection.settings) if protection else None,
            "transport": Spec(chosen.transport),
            "loss": loss,
            "metric": metric,
            "momentum": _momentum(config),
            "callbacks": called,
            "batch_size": None
            if config.global_batch_size is not None or sizes.unknown(config, data)
            else sizes.as_given(config, batch_sizes),
            "out": str(out),
        }
    )
    job = Job(
        config=resolved,
        data=data,
        out=out,
        transport=chosen.transport,
        threads=threads,
        batch_sizes=batch_sizes,
        epochs=epochs,
        steps=config.steps,
        resume_from=resume_from,
        memory_format=memory_format,
        started=started,
        out_is_given=bool(config.out or config.resume),
        batch_grows=config.global_batch_size is None and config.batch_size != "all",
        protection=protection,
        callbacks=callbacks,
        sharing=shared if sharing is not None else None,
    )
    job = replace(job, batch_norm=_try_out(job, strategy))
    notices = [*([damaged] if damaged else []), *not_called, *_notices(job, strategy)]
    return replace(job, notices=tuple(notices))


@dataclass(frozen=True)
class Chosen:
    """What the names mean here: the strategy, its servers, the transport, the privacy settings."""

    config: Config  # with all names looked up
    strategy: Strategy
    private: Settings | None
    transport: str
    servers: int

    @classmethod
    def of(cls, config: Config) -> Chosen:
        """Refuses unknown names, and choices that do not go together."""
        config = config.merged({"device": device_of(config.device)})
        check_compile(config.compile)
        check_step(config)
        if config.data_dir is not None and not Path(config.data_dir).is_dir():
            raise BadRequest(f"data_dir={config.data_dir} is not a folder")
        config = resolve_names(config)
        given = config.strategy
        strategy = strategies.build(given) if isinstance(given, Spec) else given
        check_strategy(config, strategy)
        sizes.check_balance(config, strategy)
        private = privacy.check(config, strategy, codec_for(strategy, config.codec))
        transport = transport_of(config, strategy)
        if config.profile and transports.entry(transport).make.traits.runs_as == "threads":
            raise BadRequest(
                f"profile needs processes: workers of transport {transport} are threads of one"
            )
        servers = servers_of(config, strategy)
        check_options(config, strategy, servers)
        return cls(config, strategy, private, transport, servers)


def _threads(config: Config, servers: int, sharing: Sharing | None) -> tuple[int, Sharing]:
    """Return the threads of this worker, and how all ranks share the cores.

    Workers that are started here divide its cores. Ranks that a launcher has started, servers among
    them, divide those of their machine, also where each is in a container of its own.
    """
    given = None if config.threads == "auto" else int(config.threads)
    if sharing is None:
        threads = given or max(1, cores() // config.workers)
        return threads, Sharing.here(config.workers + servers, each=threads)
    if given is None:
        return sharing.threads(sharing.rank), sharing
    return given, sharing.with_threads(given)


def _epochs(config: Config) -> int | None:
    """The number of epochs: 1 unless an option sets another end."""
    if config.epochs is not None or config.steps is not None:
        return config.epochs
    open_ended = config.until_accuracy is not None or config.until_converged is not None
    return OPEN_ENDED_EPOCHS if open_ended else 1


def _shard(chosen: Chosen, data: Data) -> str | None:
    """How the samples are dealt out: as asked, as the strategy prefers, or in fixed parts.

    The parts are fixed where labels decide, where a sample must stay with one worker (privacy), and
    where every worker reads its own part of the shards on disk.
    """
    config = chosen.config
    if isinstance(data.train, Stream) or sizes.follows_loader(config, data):
        return None
    measured = str(config.balance or "").startswith("measured")
    on_disk = isinstance(data.train, ShardedSamples) and not measured
    fixed = config.partition == "by-label" or chosen.private is not None or on_disk
    return config.shard or ("static" if fixed else chosen.strategy.traits.shard)


def _objective(config: Config, data: Data) -> tuple[Any, Any]:
    """The loss and the metric, where `auto` follows from the targets."""
    loss, metric = config.loss, config.metric
    if config.step is not None:
        return Spec("none"), Spec("none")
    if isinstance(loss, Spec) and loss.name == "auto":
        classes = data.labelled or isinstance(data.train, Stream)
        loss = Spec("cross-entropy" if classes else "mse")
    if isinstance(metric, Spec) and metric.name == "auto":
        name = METRIC_OF.get(loss.name if isinstance(loss, Spec) else "", "none")
        metric = Spec("accuracy" if data.labelled else name)
    goal = "until_accuracy" if config.until_accuracy is not None else "target_accuracy"
    if getattr(config, goal) is not None:
        if data.test is None and data.validation is None:
            raise BadRequest(f"{goal} needs a test set; this data has none")
        if not data.labelled and not _names_accuracy(metric):
            raise BadRequest(f"{goal} needs targets that are classes; these are not")
    return loss, metric


def _names_accuracy(metric: Any) -> bool:
    each = metric if isinstance(metric, tuple) else (metric,)
    return any(isinstance(one, Spec) and one.name == "accuracy" for one in each)


def _momentum(config: Config) -> float | None:
    if config.momentum is None and isinstance(config.optimizer, Spec):
        return 0.9 if config.optimizer.name == "momentum" else 0.0
    return config.momentum


def _memory_format(config: Config, resume_from: Path | None) -> str:
    """A resumed run keeps the memory format that it had. A split model is contiguous.

    A run that goes on as a split model may have had another format.
    """
    if config.parallel is not None and (config.memory_format == "auto" or resume_from is not None):
        return "contiguous"
    if resume_from is None:
        return config.memory_format
    kept: str = checkpoint.about(resume_from).get("memory_format", config.memory_format)
    return kept


def _try_out(job: Job, strategy: Strategy) -> bool:
    """Build what the workers will build. Returns whether the model has batch norm."""
    model = _on_meta(job)
    _refuse_a_model_on_a_gpu(job, model)
    refuse_lazy(model)
    checkpoint.refuse_unsaveable(model)
    if job.protection is not None:
        refuse_mixing(model)
    job.optimizer(model)
    if job.arrangement.form is not None:
        check_form(job, strategy, model)
    if job.copies > 1:
        codec_for(strategy, job.config.codec).fits(layout_of(model))
    job.scaled(job.schedule())
    _check_evaluations(job)
    for fault in job.faults():
        rank = getattr(fault, "rank", 0)
        if rank is not None and rank not in range(job.ranks):
            servers = f" and {job.servers} servers" if job.servers else ""
            among = f"{job.workers} workers{servers}"
            raise BadRequest(f"fault {fault.name}: there is no rank {rank} among {among}")
    batch_norm = has_batch_norm(model)
    if not isinstance(job.data.train, Stream):
        replace(job, batch_norm=batch_norm).shards()
    return batch_norm


def _check_evaluations(job: Job) -> None:
    """Refuse what needs evaluations where there is nothing to evaluate on."""
    config, names = job.config, [m.name for m in job.metrics()]
    if job.data.labelled:
        names.append("accuracy")
    if config.best_by not in ("auto", "loss", "metric", *names):
        raise BadRequest(
            f"best_by={config.best_by}: this run evaluates loss"
            f"{''.join(f', {name}' for name in dict.fromkeys(names))}"
        )
    asks = {
        "patience": config.patience is not None,
        "keep=best": Keep.read(config.keep).best,
        "lr_schedule=plateau": isinstance(job.schedule(), Plateau),
    }
    if job.data.test is None and job.data.validation is None:
        for name, asked in asks.items():
            if asked:
                raise BadRequest(
                    f"{name} looks at evaluations, and this data has neither a test set nor a"
                    " validation set: give validation=0.1, say"
                )


def _refuse_a_model_on_a_gpu(job: Job, model: nn.Module) -> None:
    """A process that holds CUDA tensors, or gets them in a pickle, cannot fork workers."""
    if transports.entry(job.transport).make.traits.runs_as == "threads":
        return
    for parameter in model.parameters():
        if parameter.device.type not in ("cpu", "meta"):
            raise BadRequest(
                f"the model is on {parameter.device}: give it on the CPU (model.cpu()); each"
                f" worker moves its copy to device={job.config.device}"
            )


def _notices(job: Job, strategy: Strategy) -> list[str]:
    """What the person should know before the run starts."""
    config, data = job.config, job.data
    notices = [data.notice] if data.notice else []
    notices += [*without_effect(config, strategy), *sizes.notices(config, data)]
    notices += sizes.loader_notices(config, data)
    traits = transports.entry(job.transport).make.traits
    if traits.virtual_time:
        given = any(Spec.of(fault).name == "compute" for fault in config.faults)
        free = "" if given else "; computing takes no time without --faults compute:seconds=0.01"
        if traits.real_compute:
            free = ", from the processor time of its computing"
        notices.append(f"transport {job.transport}: all times of this run are simulated{free}")
    if job.protection is not None:
        assert not isinstance(data.train, Stream)
        notices += job.protection.notices(len(data.train))
        if data.drop_last:
            notices.append(
                "your DataLoader's drop_last is not used: a private run draws its batches at random"
            )
        if data.origin:
            notices.append(_unprotected_counts(data.origin))
        if data.classes_counted and is_built_in(config.model):
            notices.append(
                f"the model has {data.classes} outputs because the largest training label is"
                f" {(data.classes or 0) - 1}, which epsilon does not cover: if that is no public"
                " fact, give a Dataset with the attribute `classes`, or your own model"
            )
    factor = Scaling.read(config.lr_scaling).factor(job.single_batches)
    if factor != 1.0:
        notices.append(
            f"lr {config.lr:g} x {factor:g}: {config.lr_scaling} in the {job.workers} workers,"
            " after a warm-up"
        )
    elif config.lr_scaling != "none" and job.workers > 1:
        notices.append(
            "lr_scaling changes nothing: the global batch does not grow with the workers"
        )
    if job.oversubscribed:
        servers = f" and {job.servers} server(s)" if job.servers else ""
        shared = job.shared
        where = f" of {shared.machines} machines" if shared.machines > 1 else ""
        notices.append(
            f"oversubscribed: {job.workers} workers x {job.threads} thread(s){servers} on"
            f" {shared.cores} cores{where}; its times hold for this machine only"
        )
    return notices


def _unprotected_counts(origin: dict[str, Any]) -> str:
    exact = (
        "manifest.json and report.md beside the shards hold exact counts, which no noise protects:"
        " keep them to yourself"
    )
    if origin["counted_from_rows"]:
        return (
            "the shards' means and vocabulary were counted from the training rows, which epsilon"
            f" does not cover; {exact}"
        )
    return exact


def _on_meta(job: Job) -> nn.Module:
    """The model built once without memory: a wrong name, shape or option is refused before any
    worker starts.
    """
    if isinstance(job.config.model, Spec) and job.config.model.name in models:
        if job.data.classes is None:
            raise BadRequest(
                f"model {job.config.model.name} needs to know how many classes there are, and your"
                " data does not say (Paceline does not read a large data set only to count them):"
                " give your Dataset an attribute `classes` (a list or a number) or `targets`, or"
                " give a model of your own"
            )
        with torch.device("meta"):
            return job.model()
    with torch.random.fork_rng(devices=[]):
        return job.model()
