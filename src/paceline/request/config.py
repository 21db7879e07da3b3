"""The options of a run, with the same names on the command line, in TOML and in Python."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from paceline.common.waits import Waits
from paceline.errors import BadRequest, UnknownName
from paceline.record.keep import Keep
from paceline.registry import Spec
from paceline.request.arrangement import Arrangement, arranged
from paceline.request.checks import checked, in_range, positive

LARGEST_FACTOR = 1e30  # float32 cannot hold a much larger factor of a gradient or a weight
SERIAL_DOES_NOT_KNOW = (
    "strategy", "workers", "parallel", "grid", "cut", "servers", "transport", "network", "codec",
    "shard", "partition", "balance", "overlap", "faults", "init", "lr_scaling",
)  # fmt: skip


def option(default: Any, kind: Any, help: str, group: str) -> Any:
    return field(default=default, metadata={"kind": kind, "help": help, "group": group})


@dataclass
class Config:
    """All options of `paceline train`.

    `None` means that Paceline decides from the other options; the record holds the decision.
    """

    model: Any = option("cnn", str, "the model, or package.module:factory", "What")
    data: Any = option("mnist", str, "the data, or package.module:factory", "What")
    data_dir: str | None = option(
        None, str, "where data sets are looked for first (then ./data, then the cache)", "What"
    )
    data_share: float = option(
        1.0, float, "train on this part of the training set (0 to 1)", "What"
    )
    loss: Any = option("auto", str, "the loss, or package.module:factory", "What")
    step: Any = option(
        None,
        str,
        "module:function of (model, batch) that returns the loss",
        "What",
    )
    metric: Any = option(
        "auto", str, "the metric, or package.module:factory; several: accuracy,auc", "What"
    )
    validation: Any = option(
        None, str, "a share of the training set to decide on when to stop and what is best", "What"
    )

    strategy: Any = option(
        None,
        str,
        "how the workers keep together  [default: allreduce; serial with one worker]",
        "How",
    )
    workers: int = option(1, int, "how many workers", "How")
    parallel: Any = option(
        None,
        str,
        "split the model over workers, as pipeline:stages=2,micro=8; none: whole copies",
        "How",
    )
    grid: str | None = option(
        None, str, "copies of a model that is split: data=2,pipeline=2", "How"
    )
    cut: str | None = option(
        None,
        str,
        "the first layers of the stages, numbers or names: 3,6  [default: measured]",
        "How",
    )
    servers: int | None = option(None, int, "parameter servers beside the workers (ps: 1)", "How")
    transport: Any = option("auto", str, "what moves bytes between ranks", "How")
    launcher: str = option(
        "auto",
        Literal["auto", "local", "spark", "ray", "torchrun", "mpirun", "srun", "ssh"],
        "who starts the workers: auto (a launcher that this runs inside, else this machine), local,"
        " spark, ray",
        "How",
    )
    master: str | None = option(
        None,
        str,
        "the cluster of --launcher spark: spark://host:port (default: the one that is up); of"
        " --launcher ray: host:port or auto (default: a local one)",
        "How",
    )
    network: str | None = option(
        None,
        str,
        "a host of its own for every worker (needs root; not with --transport simulated): 100mbit,"
        " 100mbit,latency=1ms, unlimited, standing",
        "How",
    )
    codec: Any = option("none", str, "what encodes the messages", "How")
    shard: str | None = option(
        None,
        Literal["global", "static"],
        "global: each step's batch is cut up; static: fixed chunks per worker",
        "How",
    )
    partition: str = option("iid", Literal["iid", "by-label"], "how static shards are cut", "How")
    balance: str | None = option(
        None,
        str,
        "batch sizes by speed: measured, speeds (2,1,1), or seconds per batch (runtime:1.2,3.6)",
        "How",
    )
    overlap: str = option(
        "auto",
        Literal["auto", "on", "off"],
        "exchange gradients during the backward pass (auto: where a core is free)",
        "How",
    )
    privacy: str | None = option(
        None,
        str,
        "differential privacy: epsilon=3,delta=1e-5,clip=1.0, or noise=1.1,... (docs/privacy.md)",
        "How",
    )
    faults: tuple[str, ...] = option(
        (), str, "faults to inject, e.g. slow:rank=1,factor=3 (may be repeated)", "How"
    )
    init: str = option(
        "broadcast", Literal["broadcast", "seed"], "equal start by sending or by seeding", "How"
    )

    batch_size: Any = option(
        None, str, "per worker: a number (64), a list (32,16), or all", "Optimisation"
    )
    global_batch_size: Any = option(
        None, str, "over all workers, instead of --batch-size; a number or all", "Optimisation"
    )
    optimizer: Any = option(
        "momentum", str, "the optimizer, or package.module:factory", "Optimisation"
    )
    lr: float = option(0.01, float, "learning rate", "Optimisation")
    lr_schedule: Any = option("constant", str, "the LR schedule", "Optimisation")
    lr_scaling: str = option(
        "none",
        str,
        "lr against the number of workers: none, linear, sqrt; with warm-up (linear:warmup=100)",
        "Optimisation",
    )
    momentum: float | None = option(
        None, float, "0.9 for momentum, 0 for sgd and rmsprop", "Optimisation"
    )
    weight_decay: float = option(0.0, float, "L2 penalty (decoupled for adamw)", "Optimisation")
    groups: tuple[str, ...] = option(
        (),
        str,
        "parameters with options of their own: '*.bias:weight_decay=0' (may be repeated)",
        "Optimisation",
    )
    accumulate: int = option(
        1, int, "batches whose gradients are added up before each update", "Optimisation"
    )
    clip_norm: float | None = option(
        None, float, "clip the gradient of a step to this norm", "Optimisation"
    )
    ema: float | None = option(
        None, float, "keep a moving average of the weights with this decay (0.999)", "Optimisation"
    )
    precision: str = option(
        "fp32",
        Literal["fp32", "bf16", "fp16"],
        "of forward passes (autocast); fp16 scales the loss",
        "Optimisation",
    )

    epochs: int | None = option(
        None, int, "passes over the data (1, or 100 with an --until rule)", "When to stop"
    )
    steps: int | None = option(None, int, "at most this many steps", "When to stop")
    max_time: str | None = option(
        None, str, "leave with a checkpoint and exit code 75 after 55min, 2h", "When to stop"
    )
    until_accuracy: float | None = option(
        None, float, "stop at this accuracy (0 to 1)", "When to stop"
    )
    until_converged: float | None = option(
        None, float, "stop when an epoch changes the weights less (relative)", "When to stop"
    )
    patience: int | None = option(
        None, int, "stop after so many evaluations without a better one", "When to stop"
    )
    best_by: str = option(
        "auto",
        str,
        "what makes an evaluation better: loss, metric, or a metric's name",
        "When to stop",
    )
    target_accuracy: float | None = option(
        None, float, "note when this accuracy is first reached, and go on", "When to stop"
    )
    evaluate_every: str = option(
        "epoch", str, "steps between evaluations, or epoch", "When to stop"
    )
    evaluate_samples: int | None = option(
        None,
        int,
        "test samples in the evaluations before the last (the last has all)",
        "When to stop",
    )

    memory_format: str = option(
        "auto", Literal["auto", "contiguous", "channels_last"], "auto measures first", "Machine"
    )
    compile: str | None = option(
        None, str, "compile the model with torch.compile; a backend may follow", "Machine"
    )
    threads: Any = option("auto", str, "threads per worker; auto = cores // workers", "Machine")
    device: str = option(
        "cpu", str, "a device of PyTorch's; auto: a GPU where one works", "Machine"
    )
    deadline_s: float = option(
        30.0, float, "after so long a notice says which worker the others wait for", "Machine"
    )
    give_up_s: float | None = option(
        None,
        float,
        "end the run when a worker has been waited for so long  [default: never; 1800 where"
        " nothing tells that it lives]",
        "Machine",
    )
    lost_s: float = option(
        60.0, float, "a host that has not answered for so long is lost", "Machine"
    )
    insecure: bool = option(
        False, bool, "let ranks on several hosts meet without a secret", "Machine"
    )
    seed: int = option(0, int, "of the weights, the order of the samples, dropout", "Machine")

    out: str | None = option(None, str, "folder for the records (default: runs/...)", "Records")
    sample_every_s: float = option(
        0.5, float, "seconds between two looks at CPU, memory, network, disk; 0: none", "Records"
    )
    profile: bool = option(
        False, bool, "tables of operators and functions; disturbs the times", "Records"
    )
    callbacks: tuple[Any, ...] = option(
        (),
        str,
        "what is called with the run's events, or package.module:Class (may be repeated)",
        "Records",
    )
    checkpoint_every: str | None = option(
        None, str, "steps between checkpoints, epoch, or a time (10min)", "Records"
    )
    keep: str | None = option(
        None, str, "which checkpoints: best, last, all, a number, or several (best,3)", "Records"
    )
    resume: str | None = option(
        None,
        str,
        "go on from the last checkpoint of this run's folder; auto: with the run in --out, if there"
        " is one, else begin it",
        "Records",
    )
    plugin: tuple[str, ...] = option(
        (), str, "a Python file that registers things of its own", "Records"
    )

    @classmethod
    def options(cls) -> dict[str, dataclasses.Field[Any]]:
        return {f.name: f for f in dataclasses.fields(cls)}

    @classmethod
    def make(cls, values: Mapping[str, Any]) -> Config:
        """Make a config from flags, a file or keywords. Checks names, kinds and ranges."""
        known, made = cls.options(), {}
        for name, value in values.items():
            key = name.replace("-", "_")
            if key not in known:
                raise UnknownName("option", name, known)
            made[key] = checked(key, value, known[key].metadata["kind"], known[key].default)
        config = cls(**made)
        positive("workers", config.workers)
        arrangement = config.arrangement
        if arrangement.form is not None:
            config.parallel, config.grid, config.cut = arrangement.form, str(arrangement), None
            config.workers = arrangement.workers
        elif config.parallel is not None:  # none
            config.parallel = config.grid = config.cut = None
        if config.strategy is None:
            config.strategy = Spec.of(strategy_for(config.workers))
        config.validate()
        return config

    @property
    def arrangement(self) -> Arrangement:
        """Which workers hold a copy of the model together."""
        return arranged(self.parallel, self.grid, self.cut, self.workers)

    def validate(self) -> None:
        """Refuse values out of range, and options that contradict each other."""
        positive("accumulate", self.accumulate)
        Keep.read(self.keep)
        if self.ema is not None and not 0.0 <= self.ema < 1.0:
            raise BadRequest(f"ema={self.ema:g}: it must be 0 or more and less than 1")
        if self.clip_norm is not None and not 0.0 < self.clip_norm <= LARGEST_FACTOR:
            raise BadRequest(f"clip_norm={self.clip_norm:g}: it must be more than 0")
        if self.servers is not None and self.servers < 0:
            raise BadRequest(f"servers={self.servers}: 0 or more")
        if not 0.0 < self.data_share <= 1.0:
            raise BadRequest(f"data_share={self.data_share}: more than 0, at most 1")
        for name in ("epochs", "steps", "evaluate_samples", "patience"):
            if getattr(self, name) is not None:
                positive(name, getattr(self, name))
        if self.batch_size is not None and self.global_batch_size is not None:
            raise BadRequest(
                "give batch_size (per worker) or global_batch_size (over all workers), not both"
            )
        for name, low, high in (
            ("lr", 0.0, LARGEST_FACTOR),
            ("weight_decay", 0.0, LARGEST_FACTOR),
            ("until_accuracy", 0.0, 1.0),
            ("target_accuracy", 0.0, 1.0),
            ("sample_every_s", 0.0, 3600.0),
            ("until_converged", 0.0, None),
            ("deadline_s", 0.001, 1e9),
            ("give_up_s", 0.001, 1e9),
            ("lost_s", 1.0, 1e6),
        ):
            in_range(name, getattr(self, name), low, high)
        if self.momentum is not None and not 0.0 <= self.momentum < 1.0:
            raise BadRequest(
                f"momentum={self.momentum:g}: it must be 0 or more and less than 1 (with 1 the"
                " velocity never decays)"
            )
        if self.master is not None and self.launcher not in ("spark", "ray"):
            raise BadRequest(
                f"master={self.master} is a cluster of Spark or Ray: it needs launcher=spark or"
                " launcher=ray"
            )
        if self.partition == "by-label" and self.shard == "global":
            raise BadRequest(
                "partition=by-label needs shard=static: a global shard mixes all samples in every"
                " step"
            )
        if self.balance is not None and isinstance(self.batch_size, tuple):
            raise BadRequest(
                "give batch sizes by hand (batch_size=32,16) or by speed (balance=2,1), not both"
            )
        if self.threads != "auto":
            positive("threads", self.threads)
            if self.threads > 1024:
                raise BadRequest(f"threads={self.threads}: at most 1024")
        if not -(2**63) <= self.seed < 2**63:
            raise BadRequest(f"seed={self.seed} does not fit into 64 bits")

    @property
    def waits(self) -> Waits:
        """How long ranks wait for each other."""
        return Waits(self.deadline_s, self.give_up_s, self.lost_s)

    def merged(self, changes: Mapping[str, Any]) -> Config:
        return Config.make({**{k: getattr(self, k) for k in self.options()}, **changes})

    def described(self) -> dict[str, Any]:
        """Return the options as JSON can hold them, with names for objects given in Python."""
        return {name: _described(getattr(self, name)) for name in self.options()}


def strategy_for(workers: int) -> str:
    """Return the default strategy."""
    return "allreduce" if workers > 1 else "serial"


def _described(value: Any) -> Any:
    if isinstance(value, Spec):
        return str(value)
    if isinstance(value, tuple):
        if value and all(isinstance(v, Spec) for v in value):
            return ",".join(map(str, value))
        simple = all(isinstance(v, (int, str)) for v in value)
        return list(value) if simple else f"<{', '.join(type(v).__name__ for v in value)}>"
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    if isinstance(value, type) or (isinstance(value, Callable) and hasattr(value, "__qualname__")):  # type: ignore[arg-type]
        return f"{value.__module__}:{value.__qualname__}"
    return f"<{type(value).__name__}>"
