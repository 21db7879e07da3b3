"""A request made definite: every name looked up, every size worked out, the data loaded.

`prepare` (request/prepare.py) makes a Job; a launcher adds a folder to it (request/session.py) and
hands both to the workers, each of which builds its own model, optimizer and strategy.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from paceline.callbacks.base import Callback
from paceline.common.sharing import Sharing
from paceline.data.base import Data, Stream
from paceline.data.content import Split, split, whole
from paceline.data.order import LoaderOrder
from paceline.data.sharded import ShardedSamples
from paceline.data.shards import Cuts, GlobalShards, Shards, StaticShards
from paceline.data.windows import WindowShards, arrangement
from paceline.errors import BadRequest
from paceline.faults.base import Fault
from paceline.objectives.losses import Loss, needs_tensors
from paceline.objectives.metrics import Metric
from paceline.optim.schedules import LRSchedule, Scaling
from paceline.privacy.plan import Protection
from paceline.registry import (
    Spec,
    faults,
    losses,
    metrics,
    models,
    optimizers,
    schedules,
    strategies,
    transports,
)
from paceline.replica.refusals import refuse_optimizer
from paceline.request.arrangement import Arrangement
from paceline.request.config import Config
from paceline.request.groups import check_groups, grouped
from paceline.request.step import Step, step_function
from paceline.strategies.base import Strategy

# What `--resume auto` found in the run's folder: a run to go on with or to begin again, or one that
# is complete.
Found = Literal["nothing", "begun", "complete"]


@dataclass(frozen=True)
class Job:
    """What is to be trained, with what, and until when. Nothing changes it once it is made."""

    config: Config  # resolved: it is saved with the run
    data: Data
    out: Path  # the folder that was asked for; a launcher may choose another (Session.out)
    transport: str
    threads: int
    batch_sizes: tuple[int, ...]
    epochs: int | None
    steps: int | None
    resume_from: Path | None = None  # a checkpoint
    notices: tuple[str, ...] = ()
    memory_format: str = "auto"
    started: float = 0.0  # when it was asked for, by time.perf_counter
    out_is_given: bool = True
    batch_grows: bool = True  # every worker adds a batch of its own to the global batch
    protection: Protection | None = None  # of a private run
    asked: dict[str, Any] = field(default_factory=dict)  # the options as given, for Spark's ranks
    callbacks: tuple[Callback, ...] = ()  # called in the process that starts the workers
    batch_norm: bool = False  # the model has batch norm, which cannot train on a single row
    sharing: Sharing | None = None  # of the cores by the ranks; None: all ranks are on this machine
    found: Found = "nothing"

    @property
    def workers(self) -> int:
        return self.config.workers

    @cached_property
    def arrangement(self) -> Arrangement:
        """Which workers hold a copy of the model together."""
        return self.config.arrangement

    @property
    def copies(self) -> int:
        """The copies of the model; as many as workers unless it is split."""
        return self.arrangement.copies

    @property
    def servers(self) -> int:
        return self.config.servers or 0

    @property
    def ranks(self) -> int:
        """The number of workers and servers. Workers have the lower ranks."""
        return self.workers + self.servers

    @property
    def oversubscribed(self) -> bool:
        """Whether the ranks have more threads than there are cores, which tells on their times."""
        simulated = transports.entry(self.transport).make.traits.virtual_time
        return not simulated and not self.shared.fits(self.workers)

    @property
    def shared(self) -> Sharing:
        """How the ranks share the cores of their machines."""
        return self.sharing or Sharing.here(self.ranks, each=self.threads)

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

    def optimizer(self, model: nn.Module, whole: bool = True) -> torch.optim.Optimizer:
        """Make the optimizer of a model, or of a part of it."""
        config = self.config
        if not any(p.requires_grad for p in model.parameters()):
            raise BadRequest("the model has no parameter that can be trained")
        trainable = grouped(model, config.groups, whole)
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
        refuse_optimizer(built)
        check_groups(built, config.groups)
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
        return needs_tensors(losses.build(given), given.name if given.name in losses else None)

    def step_function(self) -> Step | None:
        """The training step of the user's own, in place of a loss."""
        return step_function(self.config.step)

    @property
    def split(self) -> Split:
        """What makes (inputs, targets) of a batch; a step of the user's own takes it whole."""
        return split if self.config.step is None else whole

    def metrics(self) -> list[Metric]:
        """The metrics that were asked for; the first is the run's `result.metric`."""
        given = self.config.metric
        each = [self._metric(one) for one in (given if isinstance(given, tuple) else (given,))]
        return [metric for metric in each if metric is not None]

    def _metric(self, given: Any) -> Metric | None:
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
        runs_as = transports.entry(self.transport).make.traits.runs_as
        return [faults.build(f, runs_as=runs_as) for f in self.config.faults]

    def schedule(self) -> LRSchedule:
        given = self.config.lr_schedule
        built: LRSchedule = schedules.build(given) if isinstance(given, Spec) else given
        return built

    def scaled(self, schedule: LRSchedule) -> LRSchedule:
        """The schedule times what `lr_scaling` asks for."""
        return Scaling.read(self.config.lr_scaling).applied(schedule, self.single_batches)

    @property
    def single_batches(self) -> float:
        """The global batch in batches of one worker: more than 1 only where each worker
        adds one.
        """
        return float(self.copies) if self.batch_grows else 1.0

    def shards(self, hosts: tuple[str, ...] = ()) -> Shards:
        """Which samples each worker sees. `hosts`: of the workers in their order; empty: one host.

        Workers of one host read neighbouring parts of a prepared data set.
        """
        train, sizes, seed = self.data.train, self.batch_sizes, self.config.seed
        if isinstance(train, Stream):
            raise BadRequest("a stream has no shards")
        if self.config.shard is None and self.data.loader is not None:
            size = self.config.batch_size
            return LoaderOrder(
                self.data.loader,
                self.copies,
                seed=seed,
                batch_size=size if isinstance(size, int) else None,
                no_lone_row=self.batch_norm,
            )
        cuts = Cuts(self.data.drop_last, self.batch_norm) if self.protection is None else Cuts()
        if self.config.shard != "static":
            return GlobalShards(len(train), sizes, seed, cuts)
        labels: Tensor | None = None
        if self.config.partition == "by-label":
            labels = train.labels()
            if labels is None:
                raise BadRequest("partition=by-label needs targets that are class numbers")
        if labels is not None or not isinstance(train, ShardedSamples):
            return StaticShards(len(train), sizes, seed, labels, cuts=cuts)
        if self.protection is None:
            return WindowShards(train.spans, sizes, seed, train.window_rows, hosts, cuts)
        order = arrangement(train.spans, sizes, hosts)
        return StaticShards(len(train), sizes, seed, None, order)
