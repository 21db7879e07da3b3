"""What `import paceline` gives, with every option of `train` and `study`.

Written from `Config` by tests/test_signatures.py: do not edit it.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from paceline.api import Run as Run
from paceline.api import compare as compare
from paceline.api import load as load
from paceline.api import load_data as load_data
from paceline.api import render as render
from paceline.callbacks.base import Callback as Callback
from paceline.data.prepare.anything import prepare as prepare
from paceline.errors import BadRequest as BadRequest
from paceline.errors import PacelineError as PacelineError
from paceline.errors import RunFailed as RunFailed
from paceline.launch.join import join as join
from paceline.launch.split import SplitModel as SplitModel
from paceline.launch.split import split as split
from paceline.objectives.metrics import Metric
from paceline.optim.schedules import LRSchedule
from paceline.planning.ask import plan as plan
from paceline.planning.ask import profile as profile
from paceline.report.lines import Study
from paceline.run.own_loop import Pace as Pace
from paceline.strategies.base import Strategy

__version__: str
_Names: TypeAlias = str | Sequence[str]
_Folder: TypeAlias = str | Path
_Model: TypeAlias = str | nn.Module | Callable[..., nn.Module]
_Loss: TypeAlias = str | Callable[[Any, Any], Tensor]
_Metrics: TypeAlias = str | Metric | type[Metric] | Sequence[str | Metric]
_Optimizer: TypeAlias = str | Callable[..., torch.optim.Optimizer]
_Schedule: TypeAlias = str | LRSchedule

def train(
    *,
    model: _Model = "cnn",
    data: Any = "mnist",
    data_dir: _Folder | None = None,
    data_share: float = 1.0,
    loss: _Loss = "auto",
    step: str | Callable[..., Any] | None = None,
    metric: _Metrics = "auto",
    validation: Any = None,
    strategy: str | Strategy | None = None,
    workers: int = 1,
    parallel: Any = None,
    grid: str | None = None,
    cut: str | None = None,
    servers: int | None = None,
    transport: str = "auto",
    launcher: Literal[
        "auto", "local", "spark", "ray", "torchrun", "mpirun", "srun", "ssh"
    ] = "auto",
    master: str | None = None,
    network: str | None = None,
    codec: str = "none",
    shard: Literal["global", "static"] | None = None,
    partition: Literal["iid", "by-label"] = "iid",
    balance: str | None = None,
    overlap: Literal["auto", "on", "off"] = "auto",
    privacy: str | Mapping[str, Any] | None = None,
    faults: _Names = (),
    init: Literal["broadcast", "seed"] = "broadcast",
    batch_size: int | str | Sequence[int] | None = None,
    global_batch_size: int | str | None = None,
    optimizer: _Optimizer = "momentum",
    lr: float = 0.01,
    lr_schedule: _Schedule = "constant",
    lr_scaling: str = "none",
    momentum: float | None = None,
    weight_decay: float = 0.0,
    groups: _Names | Mapping[str, Mapping[str, float]] = (),
    accumulate: int = 1,
    clip_norm: float | None = None,
    ema: float | None = None,
    precision: Literal["fp32", "bf16", "fp16"] = "fp32",
    epochs: int | None = None,
    steps: int | None = None,
    max_time: str | None = None,
    until_accuracy: float | None = None,
    until_converged: float | None = None,
    patience: int | None = None,
    best_by: str = "auto",
    target_accuracy: float | None = None,
    evaluate_every: int | str = "epoch",
    evaluate_samples: int | None = None,
    memory_format: Literal["auto", "contiguous", "channels_last"] = "auto",
    compile: bool | str | None = None,
    threads: int | str = "auto",
    device: str = "cpu",
    deadline_s: float = 30.0,
    give_up_s: float | None = None,
    lost_s: float = 60.0,
    insecure: bool = False,
    seed: int = 0,
    out: _Folder | None = None,
    sample_every_s: float = 0.5,
    profile: bool = False,
    callbacks: Sequence[str | Callback] = (),
    checkpoint_every: int | str | None = None,
    keep: int | str | None = None,
    resume: _Folder | None = None,
    plugin: _Names = (),
    progress: bool | None = None,
    watch: bool = False,
) -> Run:
    """Train a model with several workers. Return the finished run.

    Besides names, `model` may be a Module, a class or a function that makes one; `data` a pair of
    tensors, a Dataset, a DataLoader, an IterableDataset, or a pair (train, test) of them; `loss` a
    function of (outputs, targets) that is a mean over rows; `optimizer` a function from parameters
    to an optimizer; `strategy` a Strategy.

        run = paceline.train(model=Net, data=(train_set, test_set), strategy="allreduce", workers=2)
        run.test_accuracy, run.samples_per_s, run.model

    `progress`: True for a live bar, False for silence, None for a bar where there is a terminal or
    a notebook. `watch=True` shows a live page in the browser during the run.

    What:
        model: the model, or package.module:factory
        data: the data, or package.module:factory
        data_dir: where data sets are looked for first (then ./data, then the cache)
        data_share: train on this part of the training set (0 to 1)
        loss: the loss, or package.module:factory
        step: module:function of (model, batch) that returns the loss
        metric: the metric, or package.module:factory; several: accuracy,auc
        validation: a share of the training set to decide on when to stop and what is best
    How:
        strategy: how the workers keep together [default: allreduce; serial with one worker]
        workers: how many workers
        parallel: split the model over workers, as pipeline:stages=2,micro=8; none: whole copies
        grid: copies of a model that is split: data=2,pipeline=2
        cut: the first layers of the stages, numbers or names: 3,6 [default: measured]
        servers: parameter servers beside the workers (ps: 1)
        transport: what moves bytes between ranks
        launcher: who starts the workers: auto (a launcher that this runs inside, else this
            machine), local, spark, ray
        master: the cluster of launcher="spark": spark://host:port (default: the one that is
            up); of launcher="ray": host:port or auto (default: a local one)
        network: a host of its own for every worker (needs root; not with
            transport="simulated"): 100mbit, 100mbit,latency=1ms, unlimited, standing
        codec: what encodes the messages
        shard: global: each step's batch is cut up; static: fixed chunks per worker
        partition: how static shards are cut
        balance: batch sizes by speed: measured, speeds (2,1,1), or seconds per batch
            (runtime:1.2,3.6)
        overlap: exchange gradients during the backward pass (auto: where a core is free)
        privacy: differential privacy: epsilon=3,delta=1e-5,clip=1.0, or noise=1.1,...
            (docs/privacy.md)
        faults: faults to inject, e.g. slow:rank=1,factor=3 (may be repeated)
        init: equal start by sending or by seeding
    Optimisation:
        batch_size: per worker: a number (64), a list (32,16), or all
        global_batch_size: over all workers, instead of `batch_size`; a number or all
        optimizer: the optimizer, or package.module:factory
        lr: learning rate
        lr_schedule: the LR schedule
        lr_scaling: lr against the number of workers: none, linear, sqrt; with warm-up
            (linear:warmup=100)
        momentum: 0.9 for momentum, 0 for sgd and rmsprop
        weight_decay: L2 penalty (decoupled for adamw)
        groups: parameters with options of their own: '*.bias:weight_decay=0' (may be repeated)
        accumulate: batches whose gradients are added up before each update
        clip_norm: clip the gradient of a step to this norm
        ema: keep a moving average of the weights with this decay (0.999)
        precision: of forward passes (autocast); fp16 scales the loss
    When to stop:
        epochs: passes over the data (1, or 100 with an `until` rule)
        steps: at most this many steps
        max_time: leave with a checkpoint and exit code 75 after 55min, 2h
        until_accuracy: stop at this accuracy (0 to 1)
        until_converged: stop when an epoch changes the weights less (relative)
        patience: stop after so many evaluations without a better one
        best_by: what makes an evaluation better: loss, metric, or a metric's name
        target_accuracy: note when this accuracy is first reached, and go on
        evaluate_every: steps between evaluations, or epoch
        evaluate_samples: test samples in the evaluations before the last (the last has all)
    Machine:
        memory_format: auto measures first
        compile: compile the model with torch.compile; a backend may follow
        threads: threads per worker; auto = cores // workers
        device: a device of PyTorch's; auto: a GPU where one works
        deadline_s: after so long a notice says which worker the others wait for
        give_up_s: end the run when a worker has been waited for so long [default: never; 1800
            where nothing tells that it lives]
        lost_s: a host that has not answered for so long is lost
        insecure: let ranks on several hosts meet without a secret
        seed: of the weights, the order of the samples, dropout
    Records:
        out: folder for the records (default: runs/...)
        sample_every_s: seconds between two looks at CPU, memory, network, disk; 0: none
        profile: tables of operators and functions; disturbs the times
        callbacks: what is called with the run's events, or package.module:Class (may be
            repeated)
        checkpoint_every: steps between checkpoints, epoch, or a time (10min)
        keep: which checkpoints: best, last, all, a number, or several (best,3)
        resume: go on from the last checkpoint of this run's folder; auto: with the run in
            `out`, if there is one, else begin it
        plugin: a Python file that registers things of its own
    """

def ray_train(
    *,
    model: _Model = "cnn",
    data: Any = "mnist",
    data_dir: _Folder | None = None,
    data_share: float = 1.0,
    loss: _Loss = "auto",
    step: str | Callable[..., Any] | None = None,
    metric: _Metrics = "auto",
    validation: Any = None,
    strategy: str | Strategy | None = None,
    workers: int = 1,
    parallel: Any = None,
    grid: str | None = None,
    cut: str | None = None,
    servers: int | None = None,
    transport: str = "auto",
    launcher: Literal[
        "auto", "local", "spark", "ray", "torchrun", "mpirun", "srun", "ssh"
    ] = "auto",
    master: str | None = None,
    network: str | None = None,
    codec: str = "none",
    shard: Literal["global", "static"] | None = None,
    partition: Literal["iid", "by-label"] = "iid",
    balance: str | None = None,
    overlap: Literal["auto", "on", "off"] = "auto",
    privacy: str | Mapping[str, Any] | None = None,
    faults: _Names = (),
    init: Literal["broadcast", "seed"] = "broadcast",
    batch_size: int | str | Sequence[int] | None = None,
    global_batch_size: int | str | None = None,
    optimizer: _Optimizer = "momentum",
    lr: float = 0.01,
    lr_schedule: _Schedule = "constant",
    lr_scaling: str = "none",
    momentum: float | None = None,
    weight_decay: float = 0.0,
    groups: _Names | Mapping[str, Mapping[str, float]] = (),
    accumulate: int = 1,
    clip_norm: float | None = None,
    ema: float | None = None,
    precision: Literal["fp32", "bf16", "fp16"] = "fp32",
    epochs: int | None = None,
    steps: int | None = None,
    max_time: str | None = None,
    until_accuracy: float | None = None,
    until_converged: float | None = None,
    patience: int | None = None,
    best_by: str = "auto",
    target_accuracy: float | None = None,
    evaluate_every: int | str = "epoch",
    evaluate_samples: int | None = None,
    memory_format: Literal["auto", "contiguous", "channels_last"] = "auto",
    compile: bool | str | None = None,
    threads: int | str = "auto",
    device: str = "cpu",
    deadline_s: float = 30.0,
    give_up_s: float | None = None,
    lost_s: float = 60.0,
    insecure: bool = False,
    seed: int = 0,
    out: _Folder | None = None,
    sample_every_s: float = 0.5,
    profile: bool = False,
    callbacks: Sequence[str | Callback] = (),
    checkpoint_every: int | str | None = None,
    keep: int | str | None = None,
    resume: _Folder | None = None,
    plugin: _Names = (),
    max_failures: int = 3,
    storage_path: str | Path | None = None,
    progress: bool | None = None,
) -> Run:
    """Train a model on Ray Train (TorchTrainer). Return the finished run.

    The options are those of `train`, and so are the record and the files in `out`, a folder that
    all nodes see. The run uses the Ray session of this program, the cluster that `master` names
    (host:port or auto), or a local one that starts and ends with the run.

        run = paceline.ray_train(data="fashion-mini", workers=2, master="auto", out="shared/run")
        run.test_accuracy, run.ray.metrics, run.ray.checkpoint

    Evaluations and checkpoints are reported by `ray.train.report`; `run.ray` is the
    `ray.train.Result`. `max_failures`: how often Ray starts the ranks again when an actor or a node
    is lost; they continue from the last checkpoint (`checkpoint_every`, by default every epoch).
    `storage_path`: where Ray keeps its copies of checkpoints (default: the folder ray in `out`).
    `progress=False`: print nothing.

    What:
        model: the model, or package.module:factory
        data: the data, or package.module:factory
        data_dir: where data sets are looked for first (then ./data, then the cache)
        data_share: train on this part of the training set (0 to 1)
        loss: the loss, or package.module:factory
        step: module:function of (model, batch) that returns the loss
        metric: the metric, or package.module:factory; several: accuracy,auc
        validation: a share of the training set to decide on when to stop and what is best
    How:
        strategy: how the workers keep together [default: allreduce; serial with one worker]
        workers: how many workers
        parallel: split the model over workers, as pipeline:stages=2,micro=8; none: whole copies
        grid: copies of a model that is split: data=2,pipeline=2
        cut: the first layers of the stages, numbers or names: 3,6 [default: measured]
        servers: parameter servers beside the workers (ps: 1)
        transport: what moves bytes between ranks
        launcher: who starts the workers: auto (a launcher that this runs inside, else this
            machine), local, spark, ray
        master: the cluster of launcher="spark": spark://host:port (default: the one that is
            up); of launcher="ray": host:port or auto (default: a local one)
        network: a host of its own for every worker (needs root; not with
            transport="simulated"): 100mbit, 100mbit,latency=1ms, unlimited, standing
        codec: what encodes the messages
        shard: global: each step's batch is cut up; static: fixed chunks per worker
        partition: how static shards are cut
        balance: batch sizes by speed: measured, speeds (2,1,1), or seconds per batch
            (runtime:1.2,3.6)
        overlap: exchange gradients during the backward pass (auto: where a core is free)
        privacy: differential privacy: epsilon=3,delta=1e-5,clip=1.0, or noise=1.1,...
            (docs/privacy.md)
        faults: faults to inject, e.g. slow:rank=1,factor=3 (may be repeated)
        init: equal start by sending or by seeding
    Optimisation:
        batch_size: per worker: a number (64), a list (32,16), or all
        global_batch_size: over all workers, instead of `batch_size`; a number or all
        optimizer: the optimizer, or package.module:factory
        lr: learning rate
        lr_schedule: the LR schedule
        lr_scaling: lr against the number of workers: none, linear, sqrt; with warm-up
            (linear:warmup=100)
        momentum: 0.9 for momentum, 0 for sgd and rmsprop
        weight_decay: L2 penalty (decoupled for adamw)
        groups: parameters with options of their own: '*.bias:weight_decay=0' (may be repeated)
        accumulate: batches whose gradients are added up before each update
        clip_norm: clip the gradient of a step to this norm
        ema: keep a moving average of the weights with this decay (0.999)
        precision: of forward passes (autocast); fp16 scales the loss
    When to stop:
        epochs: passes over the data (1, or 100 with an `until` rule)
        steps: at most this many steps
        max_time: leave with a checkpoint and exit code 75 after 55min, 2h
        until_accuracy: stop at this accuracy (0 to 1)
        until_converged: stop when an epoch changes the weights less (relative)
        patience: stop after so many evaluations without a better one
        best_by: what makes an evaluation better: loss, metric, or a metric's name
        target_accuracy: note when this accuracy is first reached, and go on
        evaluate_every: steps between evaluations, or epoch
        evaluate_samples: test samples in the evaluations before the last (the last has all)
    Machine:
        memory_format: auto measures first
        compile: compile the model with torch.compile; a backend may follow
        threads: threads per worker; auto = cores // workers
        device: a device of PyTorch's; auto: a GPU where one works
        deadline_s: after so long a notice says which worker the others wait for
        give_up_s: end the run when a worker has been waited for so long [default: never; 1800
            where nothing tells that it lives]
        lost_s: a host that has not answered for so long is lost
        insecure: let ranks on several hosts meet without a secret
        seed: of the weights, the order of the samples, dropout
    Records:
        out: folder for the records (default: runs/...)
        sample_every_s: seconds between two looks at CPU, memory, network, disk; 0: none
        profile: tables of operators and functions; disturbs the times
        callbacks: what is called with the run's events, or package.module:Class (may be
            repeated)
        checkpoint_every: steps between checkpoints, epoch, or a time (10min)
        keep: which checkpoints: best, last, all, a number, or several (best,3)
        resume: go on from the last checkpoint of this run's folder; auto: with the run in
            `out`, if there is one, else begin it
        plugin: a Python file that registers things of its own
    """

def study(
    file: str | Path | dict[str, Any] | None = None,
    *,
    model: _Model = "cnn",
    data: Any = "mnist",
    data_dir: _Folder | None = None,
    data_share: float = 1.0,
    loss: _Loss = "auto",
    step: str | Callable[..., Any] | None = None,
    metric: _Metrics = "auto",
    validation: Any = None,
    strategy: str | Strategy | None = None,
    workers: int = 1,
    parallel: Any = None,
    grid: str | None = None,
    cut: str | None = None,
    servers: int | None = None,
    transport: str = "auto",
    launcher: Literal[
        "auto", "local", "spark", "ray", "torchrun", "mpirun", "srun", "ssh"
    ] = "auto",
    master: str | None = None,
    network: str | None = None,
    codec: str = "none",
    shard: Literal["global", "static"] | None = None,
    partition: Literal["iid", "by-label"] = "iid",
    balance: str | None = None,
    overlap: Literal["auto", "on", "off"] = "auto",
    privacy: str | Mapping[str, Any] | None = None,
    faults: _Names = (),
    init: Literal["broadcast", "seed"] = "broadcast",
    batch_size: int | str | Sequence[int] | None = None,
    global_batch_size: int | str | None = None,
    optimizer: _Optimizer = "momentum",
    lr: float = 0.01,
    lr_schedule: _Schedule = "constant",
    lr_scaling: str = "none",
    momentum: float | None = None,
    weight_decay: float = 0.0,
    groups: _Names | Mapping[str, Mapping[str, float]] = (),
    accumulate: int = 1,
    clip_norm: float | None = None,
    ema: float | None = None,
    precision: Literal["fp32", "bf16", "fp16"] = "fp32",
    epochs: int | None = None,
    steps: int | None = None,
    max_time: str | None = None,
    until_accuracy: float | None = None,
    until_converged: float | None = None,
    patience: int | None = None,
    best_by: str = "auto",
    target_accuracy: float | None = None,
    evaluate_every: int | str = "epoch",
    evaluate_samples: int | None = None,
    memory_format: Literal["auto", "contiguous", "channels_last"] = "auto",
    compile: bool | str | None = None,
    threads: int | str = "auto",
    device: str = "cpu",
    deadline_s: float = 30.0,
    give_up_s: float | None = None,
    lost_s: float = 60.0,
    insecure: bool = False,
    seed: int = 0,
    sample_every_s: float = 0.5,
    profile: bool = False,
    callbacks: Sequence[str | Callback] = (),
    checkpoint_every: int | str | None = None,
    keep: int | str | None = None,
    resume: _Folder | None = None,
    plugin: _Names = (),
    out: _Folder | None = None,
    variant: Literal["", "short", "full"] = "",
    seeds: int | None = None,
    progress: bool | None = None,
    watch: bool = False,
) -> Study:
    """Measure a grid of settings, write the report, and return what was measured. The same call
    continues a study that was stopped.

    `file` is a study file, a dict of the same shape, or nothing for the built-in study; further
    keywords are options of `train` for all runs. `watch=True` shows a live page meanwhile.

        found = paceline.study("studies/stragglers.toml", variant="short")
        for line in found.lines:
            print(line.label, line.workers, line.train_s, line.accuracy)
        found.folder / "report.html"

    What:
        model: the model, or package.module:factory
        data: the data, or package.module:factory
        data_dir: where data sets are looked for first (then ./data, then the cache)
        data_share: train on this part of the training set (0 to 1)
        loss: the loss, or package.module:factory
        step: module:function of (model, batch) that returns the loss
        metric: the metric, or package.module:factory; several: accuracy,auc
        validation: a share of the training set to decide on when to stop and what is best
    How:
        strategy: how the workers keep together [default: allreduce; serial with one worker]
        workers: how many workers
        parallel: split the model over workers, as pipeline:stages=2,micro=8; none: whole copies
        grid: copies of a model that is split: data=2,pipeline=2
        cut: the first layers of the stages, numbers or names: 3,6 [default: measured]
        servers: parameter servers beside the workers (ps: 1)
        transport: what moves bytes between ranks
        launcher: who starts the workers: auto (a launcher that this runs inside, else this
            machine), local, spark, ray
        master: the cluster of launcher="spark": spark://host:port (default: the one that is
            up); of launcher="ray": host:port or auto (default: a local one)
        network: a host of its own for every worker (needs root; not with
            transport="simulated"): 100mbit, 100mbit,latency=1ms, unlimited, standing
        codec: what encodes the messages
        shard: global: each step's batch is cut up; static: fixed chunks per worker
        partition: how static shards are cut
        balance: batch sizes by speed: measured, speeds (2,1,1), or seconds per batch
            (runtime:1.2,3.6)
        overlap: exchange gradients during the backward pass (auto: where a core is free)
        privacy: differential privacy: epsilon=3,delta=1e-5,clip=1.0, or noise=1.1,...
            (docs/privacy.md)
        faults: faults to inject, e.g. slow:rank=1,factor=3 (may be repeated)
        init: equal start by sending or by seeding
    Optimisation:
        batch_size: per worker: a number (64), a list (32,16), or all
        global_batch_size: over all workers, instead of `batch_size`; a number or all
        optimizer: the optimizer, or package.module:factory
        lr: learning rate
        lr_schedule: the LR schedule
        lr_scaling: lr against the number of workers: none, linear, sqrt; with warm-up
            (linear:warmup=100)
        momentum: 0.9 for momentum, 0 for sgd and rmsprop
        weight_decay: L2 penalty (decoupled for adamw)
        groups: parameters with options of their own: '*.bias:weight_decay=0' (may be repeated)
        accumulate: batches whose gradients are added up before each update
        clip_norm: clip the gradient of a step to this norm
        ema: keep a moving average of the weights with this decay (0.999)
        precision: of forward passes (autocast); fp16 scales the loss
    When to stop:
        epochs: passes over the data (1, or 100 with an `until` rule)
        steps: at most this many steps
        max_time: leave with a checkpoint and exit code 75 after 55min, 2h
        until_accuracy: stop at this accuracy (0 to 1)
        until_converged: stop when an epoch changes the weights less (relative)
        patience: stop after so many evaluations without a better one
        best_by: what makes an evaluation better: loss, metric, or a metric's name
        target_accuracy: note when this accuracy is first reached, and go on
        evaluate_every: steps between evaluations, or epoch
        evaluate_samples: test samples in the evaluations before the last (the last has all)
    Machine:
        memory_format: auto measures first
        compile: compile the model with torch.compile; a backend may follow
        threads: threads per worker; auto = cores // workers
        device: a device of PyTorch's; auto: a GPU where one works
        deadline_s: after so long a notice says which worker the others wait for
        give_up_s: end the run when a worker has been waited for so long [default: never; 1800
            where nothing tells that it lives]
        lost_s: a host that has not answered for so long is lost
        insecure: let ranks on several hosts meet without a secret
        seed: of the weights, the order of the samples, dropout
    Records:
        sample_every_s: seconds between two looks at CPU, memory, network, disk; 0: none
        profile: tables of operators and functions; disturbs the times
        callbacks: what is called with the run's events, or package.module:Class (may be
            repeated)
        checkpoint_every: steps between checkpoints, epoch, or a time (10min)
        keep: which checkpoints: best, last, all, a number, or several (best,3)
        resume: go on from the last checkpoint of this run's folder; auto: with the run in
            `out`, if there is one, else begin it
        plugin: a Python file that registers things of its own
    """
