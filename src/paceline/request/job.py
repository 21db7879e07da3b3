"""A request made definite: every name looked up, every size worked out, the data loaded. What a
launcher hands to workers.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.data.adopt import adopt
from paceline.data.base import Data, Stream, some_of
from paceline.data.sharded import ShardedSamples
from paceline.data.shards import Cuts, GlobalShards, Shards, StaticShards
from paceline.data.windows import WindowShards, arrangement
from paceline.errors import BadRequest, UnknownName
from paceline.faults.base import Fault
from paceline.objectives.losses import Loss
from paceline.objectives.metrics import Metric
from paceline.optim.schedules import Scaling, Schedule
from paceline.privacy import plan as protection
from paceline.privacy.clip import refuse_mixing
from paceline.privacy.ledger import Line
from paceline.privacy.plan import Protection
from paceline.record import checkpoint
from paceline.record.machine import cores
from paceline.registry import (
    Spec,
    codecs,
    collectives,
    faults,
    load_plugin,
    losses,
    metrics,
    models,
    optimizers,
    schedules,
    sources,
    strategies,
    transports,
)
from paceline.replica.flat import layout_of
from paceline.replica.replica import has_batch_norm, refuse_closures
from paceline.request import sizes
from paceline.request.choices import (
    check_device,
    check_strategy,
    overlap_of,
    servers_of,
    transport_of,
    without_effect,
)
from paceline.request.config import Config
from paceline.strategies.base import Strategy, codec_for

OPEN_ENDED_EPOCHS = 100  # the most that an --until rule may take when no other end is given


@dataclass
class Job:
    config: Config  # resolved: saved with the run
    data: Data
    out: Path
    transport: str
    threads: int
    batch_sizes: tuple[int, ...]
    epochs: int | None
    steps: int | None
    resume_from: Path | None = None
    session: int = 0
    notices: list[str] = field(default_factory=list)
    memory_format: str = "auto"
    started: float = 0.0  # when it was asked for, by time.perf_counter
    out_is_given: bool = True
    batch_grows: bool = True  # with the workers, each of whom brings a batch of its own
    protection: Protection | None = None  # of a private run
    asked: dict[str, Any] = field(
        default_factory=dict
    )  # the options as they were given, for a launcher that hands them on
    hosts: tuple[str, ...] = ()  # of the workers, in their order; empty: all on this one
    batch_norm: bool = False  # the model has some: it cannot train on a single row

    @property
    def workers(self) -> int:
        return self.config.workers

    @property
    def ranks(self) -> int:
        """Workers, then servers."""
        return self.config.workers + (self.config.servers or 0)

    @property
    def oversubscribed(self) -> bool:
        return self.workers * self.threads + (self.config.servers or 0) > cores()

    def model(self) -> nn.Module:
        given = self.config.model
        if isinstance(given, nn.Module):
            return copy.deepcopy(given)
        if isinstance(given, Spec):
            built = models.build(
                given, input_shape=self.data.input_shape, classes=self.data.classes
            )
        elif not callable(given):
            raise BadRequest(
                f"model cannot be a {type(given).__name__}: give a name, a Module, a class or a"
                " function"
            )
        else:
            try:
                built = given()
            except TypeError as error:
                raise BadRequest(
                    f"model {self.config.described()['model']} cannot be made without arguments:"
                    f" {error}"
                ) from error
        if not isinstance(built, nn.Module):
            raise BadRequest(
                f"model {self.config.described()['model']} gave a {type(built).__name__}, not a"
                " torch.nn.Module"
            )
        return built

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        config = self.config
        trainable = [p for p in model.parameters() if p.requires_grad]
        if not trainable:
            raise BadRequest("the model has no parameter that can be trained")
        if isinstance(config.optimizer, Spec):
            built = optimizers.build(
                config.optimizer,
                params=trainable,
                lr=config.lr,
                momentum=config.momentum,
                weight_decay=config.weight_decay,
            )
        elif isinstance(config.optimizer, torch.optim.Optimizer):
            raise BadRequest(
                "optimizer: give the class, or a function from parameters to an optimizer; every"
                " worker makes its own"
            )
        elif isinstance(config.optimizer, type):
            built = config.optimizer(trainable, lr=config.lr)
        elif callable(config.optimizer):
            if (
                config.lr != Config.options()["lr"].default
                or config.momentum
                or config.weight_decay
            ):
                raise BadRequest(
                    "lr, momentum and weight_decay go into your own optimizer function, not"
                    " beside it"
                )
            built = config.optimizer(trainable)
        else:
            raise BadRequest(f"optimizer cannot be a {type(config.optimizer).__name__}")
        if not isinstance(built, torch.optim.Optimizer):
            raise BadRequest(
                f"optimizer gave a {type(built).__name__}, not a torch.optim.Optimizer"
            )
        refuse_closures(built)
        return built

    def strategy(self) -> Strategy:
        given = self.config.strategy
        built: Strategy = (
            copy.deepcopy(given) if isinstance(given, Strategy) else strategies.build(given)
        )
        return built

    def loss(self) -> Loss:
        given = self.config.loss
        if not isinstance(given, Spec):
            return given  # type: ignore[no-any-return]
        return losses.build(given)  # type: ignore[no-any-return]

    def metric(self) -> Metric | None:
        given = self.config.metric
        if isinstance(given, type) and issubclass(given, Metric):
            return given()
        if isinstance(given, Metric) or given is None:
            return given
        if not isinstance(given, Spec):
            raise BadRequest(
                f"metric cannot be a {type(given).__name__}: give a name or a"
                " paceline.objectives.metrics.Metric"
            )
        return None if given.name == "none" else metrics.build(given)

    def faults(self) -> list[Fault]:
        return [faults.build(f) for f in self.config.faults]

    def schedule(self) -> Schedule:
        given = self.config.lr_schedule
        built: Schedule = schedules.build(given) if isinstance(given, Spec) else given
        return Scaling.read(self.config.lr_scaling).applied(built, self.single_batches)

    @property
    def single_batches(self) -> float:
        """How many batches of one worker the global batch is: it grows with the workers only where
        each brings its own.
        """
        return float(self.workers) if self.batch_grows else 1.0

    def shards(self) -> Shards:
        if isinstance(self.data.train, Stream):
            raise BadRequest("a stream has no shards")
        cuts = Cuts(self.data.drop_last, self.batch_norm) if self.protection is None else Cuts()
        if self.config.shard == "static":
            labels: Tensor | None = None
            if self.config.partition == "by-label":
                labels = self.data.train.labels()
                if labels is None:
                    raise BadRequest("partition=by-label needs targets that are class numbers")
            if isinstance(self.data.train, ShardedSamples) and labels is None:
                blocks, rows = self.data.train.blocks, self.data.train.window_rows
                if self.protection is None:
                    return WindowShards(
                        blocks, self.batch_sizes, self.config.seed, rows, self.hosts, cuts
                    )
                return StaticShards(
                    len(self.data.train),
                    self.batch_sizes,
                    self.config.seed,
                    None,
                    arrangement(blocks, self.batch_sizes, self.hosts),
                )
            return StaticShards(
                len(self.data.train), self.batch_sizes, self.config.seed, labels, cuts=cuts
            )
        return GlobalShards(len(self.data.train), self.batch_sizes, self.config.seed, cuts)


def prepare(
    config: Config, out_name: Callable[[Config], Path], spent: tuple[Line, ...] = ()
) -> Job:
    """Look up every name, load the data, work out every size. Everything that can be refused is
    refused here.

    `spent`: what earlier attempts at a private run that begins again have spent.
    """
    started = time.perf_counter()
    for plugin in config.plugin:
        load_plugin(plugin)
    resume_from = checkpoint.latest(Path(config.resume)) if config.resume else None
    folder = run_folder(config.resume) if config.resume else None
    resumed = protection.Resumed.of(resume_from, folder, config.privacy is not None, spent)
    check_device(config.device)
    if config.data_dir is not None and not Path(config.data_dir).is_dir():
        raise BadRequest(f"data_dir={config.data_dir} is not a folder")
    config = resolve_names(config)
    strategy = (
        strategies.build(config.strategy) if isinstance(config.strategy, Spec) else config.strategy
    )
    check_strategy(config, strategy)
    sizes.check_balance(config, strategy)
    private = protection.check(config, strategy, codec_for(strategy, config.codec))
    transport = transport_of(config, strategy)
    if config.profile and transports.entry(transport).declared.runs_as == "threads":
        raise BadRequest(
            f"profile needs processes: workers of transport {transport} are threads of one"
        )
    servers = servers_of(config, strategy)
    data = _share(_load(config), config.data_share)
    notices = [data.notice] if data.notice else []
    notices += [*without_effect(config, strategy), *sizes.notices(config, data)]
    workers = config.workers

    batch_sizes = sizes.batch_sizes(config, data)
    threads = max(1, cores() // workers) if config.threads == "auto" else int(config.threads)
    on_disk = isinstance(data.train, ShardedSamples) and not _measured(
        config
    )  # a worker keeps to its own part of the shards
    fixed = config.partition == "by-label" or private is not None or on_disk
    shard = config.shard or ("static" if fixed else strategy.shard)
    epochs, steps = config.epochs, config.steps
    if epochs is None and steps is None:
        open_ended = config.until_accuracy is not None or config.until_converged is not None
        epochs = OPEN_ENDED_EPOCHS if open_ended else 1
    goal = "until_accuracy" if config.until_accuracy is not None else "target_accuracy"
    if getattr(config, goal) is not None and data.test is None:
        raise BadRequest(f"{goal} needs a test set; this data has none")
    loss = config.loss
    if isinstance(loss, Spec) and loss.name == "auto":
        loss = Spec("cross-entropy" if data.labelled or isinstance(data.train, Stream) else "mse")
    metric = config.metric
    if isinstance(metric, Spec) and metric.name == "auto":
        by_loss = {"mse": "mse", "cross-entropy": "accuracy", "nll": "accuracy", "bce": "accuracy"}
        name = by_loss.get(loss.name if isinstance(loss, Spec) else "", "none")
        metric = Spec("accuracy" if data.labelled else name)
    if (
        getattr(config, goal) is not None
        and not data.labelled
        and not (isinstance(metric, Spec) and metric.name == "accuracy")
    ):
        raise BadRequest(f"{goal} needs targets that are classes; these are not")
    momentum = config.momentum
    if momentum is None and isinstance(config.optimizer, Spec):
        momentum = 0.9 if config.optimizer.name == "momentum" else 0.0

    protected = None
    if private is not None:
        protected = protection.protect(private, strategy, data, batch_sizes, epochs, steps, resumed)
        assert not isinstance(data.train, Stream)
        notices += protected.notices(len(data.train))
        if data.drop_last:
            notices.append(
                "your DataLoader's drop_last is not used: a private run draws its batches at random"
            )
        if data.origin:
            notices.append(_of_prepared(data.origin))
    out_is_given = bool(config.out or config.resume)
    batch_grows = config.global_batch_size is None and config.batch_size != "all"
    out = (
        Path(config.out)
        if config.out
        else run_folder(config.resume)
        if config.resume
        else out_name(config)
    )
    config = config.merged(
        {
            "shard": None if isinstance(data.train, Stream) else shard,
            "epochs": epochs,
            "threads": threads,
            "servers": servers,
            "overlap": (
                "off" if private is not None else overlap_of(config, transport, threads, servers)
            ),
            "privacy": str(protected.settings) if protected is not None else None,
            "transport": Spec(transport),
            "loss": loss,
            "metric": metric,
            "momentum": momentum,
            "batch_size": (
                None
                if config.global_batch_size is not None
                else sizes.as_given(config, batch_sizes)
            ),
            "out": str(out),
        }
    )
    job = Job(
        config,
        data,
        out,
        transport,
        threads,
        batch_sizes,
        epochs,
        steps,
        resume_from,
        0,
        notices,
        config.memory_format,
    )
    job.started, job.out_is_given, job.batch_grows, job.protection = (
        started,
        out_is_given,
        batch_grows,
        protected,
    )
    if resume_from is not None:
        job.memory_format = checkpoint.about(resume_from).get("memory_format", job.memory_format)
    on_meta = _on_meta(job)
    job.batch_norm = has_batch_norm(on_meta)
    checkpoint.refuse_unsaveable(on_meta)
    if private is not None:
        refuse_mixing(on_meta)
    job.optimizer(on_meta)  # refuses what cannot be built, before any process starts
    codec = codec_for(strategy, config.codec)
    if workers > 1:
        codec.fits(layout_of(on_meta))
    job.schedule(), job.metric()
    for fault in job.faults():
        if getattr(fault, "rank", 0) not in range(job.ranks):
            among = f"{workers} workers" + (f" and {servers} servers" if servers else "")
            raise BadRequest(f"fault {fault.name}: there is no rank {fault.rank} among {among}")  # type: ignore[attr-defined]
    if not isinstance(data.train, Stream):
        job.shards()
    job.schedule()
    if (factor := Scaling.read(config.lr_scaling).factor(job.single_batches)) != 1.0:
        notices.append(
            f"lr {config.lr:g} x {factor:g}: {config.lr_scaling} in the {workers} workers, after a"
            " warm-up"
        )
    elif config.lr_scaling != "none" and workers > 1:
        notices.append(
            "lr_scaling changes nothing: the global batch does not grow with the workers"
        )
    if job.oversubscribed:
        notices.append(
            f"oversubscribed: {workers} workers x {threads}"
            f" thread(s){f' and {servers} server(s)' if servers else ''} on {cores()} cores; its"
            " times hold for this machine only"
        )
    return job


def _of_prepared(origin: dict[str, Any]) -> str:
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


def _measured(config: Config) -> bool:
    return str(config.balance or "").startswith("measured")


def run_folder(resume: str | Path) -> Path:
    """The run that a person means: its folder, or one of its checkpoints."""
    folder = Path(resume)
    return folder.parent.parent if (folder / "checkpoint.json").is_file() else folder


def load_config(folder: str | Path) -> dict[str, Any]:
    """The options of an earlier run, to resume it."""
    path = run_folder(folder) / "config.json"
    try:
        saved = json.loads(path.read_text())
    except FileNotFoundError:
        raise BadRequest(
            f"{folder} is not a run that can be resumed: it has no config.json"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise BadRequest(f"{path} cannot be read: {error}") from None
    if not isinstance(saved, dict):
        raise BadRequest(f"{path} is not a run's configuration")
    return {
        k: v
        for k, v in saved.items()
        if v is not None and k not in ("resume", "out", "launcher", "master")
    }


def resolve_names(config: Config) -> Config:
    """Every name looked up, with all its options; unknown ones are refused."""
    changes: dict[str, Any] = {}
    for name, registry in (
        ("strategy", strategies),
        ("codec", codecs),
        ("model", models),
        ("optimizer", optimizers),
        ("lr_schedule", schedules),
        ("loss", losses),
        ("metric", metrics),
        ("data", sources),
    ):
        value = getattr(config, name)
        if isinstance(value, Spec) and not (
            name in ("loss", "metric") and value.name in ("auto", "none")
        ):
            changes[name] = registry.resolve(value)
    transport = Spec.of(config.transport).name
    if transport not in ("auto", *transports.names()):
        raise UnknownName("transport", transport, ["auto", *transports.names()])
    strategy = changes.get("strategy")
    collective = (
        Spec.of(str(strategy.options.get("collective", "auto"))).name if strategy else "auto"
    )
    if collective not in ("auto", *collectives.names()):
        raise UnknownName("collective", collective, ["auto", *collectives.names()])
    for fault in config.faults:
        faults.build(fault)
    return config.merged(changes)


def _load(config: Config) -> Data:
    count = (
        isinstance(config.model, Spec) and config.model.name in models
    )  # a person's own model knows its classes
    if isinstance(config.data, Spec):
        return adopt(sources.build(config.data, data_dir=config.data_dir), str(config.data), count)
    if (
        callable(config.data)
        and not hasattr(config.data, "__getitem__")
        and not hasattr(config.data, "__iter__")
    ):
        return adopt(config.data(), count_classes=count)
    return adopt(config.data, count_classes=count)


def _share(data: Data, share: float) -> Data:
    if share == 1.0:
        return data
    if isinstance(data.train, Stream):
        raise BadRequest("data_share needs samples that can be counted: a stream cannot be cut")
    part = round(share * len(data.train))
    if part < 1:
        raise BadRequest(
            f"data_share={share:g} of {len(data.train)} training samples is none:"
            f" {1 / len(data.train):g} is one"
        )
    return replace(data, train=some_of(data.train, part))


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
