"""The functions behind `import paceline`: train, study, render, compare, load_data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from paceline.common.warned import warnings_once
from paceline.data.adopt import adopt
from paceline.data.base import Samples, Stream
from paceline.errors import BadRequest
from paceline.launch import again
from paceline.launch.again import Again
from paceline.launch.joined import Meeting
from paceline.launch.place import Wanted
from paceline.launch.run import Listen, run_in_folder
from paceline.launch.seat import end_with_its_launcher
from paceline.launch.seat import find as find_seat
from paceline.record.lock import HELD, refuse_held
from paceline.record.reader import read_run
from paceline.registry import sources
from paceline.report.compare import compare
from paceline.report.lines import Study
from paceline.report.reading import read_study
from paceline.report.render import render
from paceline.request.callbacks import refuse_objects
from paceline.request.config import Config
from paceline.request.earlier import load_config, run_folder
from paceline.request.job import Job
from paceline.request.naming import default_out
from paceline.request.prepare import prepare
from paceline.request.signature import with_options
from paceline.results.run import Run
from paceline.studies.grid import BUILTIN, StudySpec
from paceline.studies.runner import run_study
from paceline.terminal.run import Watch
from paceline.terminal.study import StudyTable
from paceline.watch.beside import page_beside

__all__ = ["Run", "compare", "load", "load_data", "ray_train", "render", "study", "train"]


@with_options
def train(*, progress: bool | None = None, watch: bool = False, **options: Any) -> Run:
    """Train a model with several workers. Return the finished run.

    Besides names, `model` may be a Module, a class or a function that makes one; `data` a pair of
    tensors, a Dataset, a DataLoader, an IterableDataset, or a pair (train, test) of them; `loss` a
    function of (outputs, targets) that is a mean over rows; `optimizer` a function from parameters
    to an optimizer; `strategy` a Strategy.

        run = paceline.train(model=Net, data=(train_set, test_set), strategy="allreduce", workers=2)
        run.test_accuracy, run.samples_per_s, run.model

    `progress`: True for a live bar, False for silence, None for a bar where there is a terminal or
    a notebook. `watch=True` shows a live page in the browser during the run.
    """
    meeting = meet(options)
    with warnings_once():
        job = make_job(options, meeting)
        quiet = progress is False or silent(meeting)
        with (
            page_beside(job.out, watch and not silent(meeting)),
            Watch(job, quiet=quiet, live=progress, lines=False) as shown,
        ):
            return start(job, shown.listen, meeting=meeting)


@with_options
def ray_train(
    *,
    max_failures: int = 3,
    storage_path: str | Path | None = None,
    progress: bool | None = None,
    **options: Any,
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
    """
    from paceline.launch.ray import Wishes

    if options.get("launcher") not in (None, "auto", "ray"):
        raise BadRequest(f"launcher={options['launcher']}: ray_train has Ray for a launcher")
    if max_failures < 0:
        raise BadRequest(f"max_failures={max_failures}: 0 or more")
    wishes = Wishes(max_failures, str(storage_path) if storage_path else None, reports=True)
    with warnings_once():
        job = make_job({**options, "launcher": "ray"})
        with Watch(job, quiet=progress is False, live=False) as shown:
            return start(job, shown.listen, wishes=wishes)


@with_options
def study(
    file: str | Path | dict[str, Any] | None = None,
    *,
    out: str | Path | None = None,
    variant: Literal["", "short", "full"] = "",
    seeds: int | None = None,
    progress: bool | None = None,
    watch: bool = False,
    **base: Any,
) -> Study:
    """Measure a grid of settings, write the report, and return what was measured. The same call
    continues a study that was stopped.

    `file` is a study file, a dict of the same shape, or nothing for the built-in study; further
    keywords are options of `train` for all runs. `watch=True` shows a live page meanwhile.

        found = paceline.study("studies/stragglers.toml", variant="short")
        for line in found.lines:
            print(line.label, line.workers, line.train_s, line.accuracy)
        found.folder / "report.html"
    """
    spec = (
        StudySpec.make(file, variant=variant)
        if isinstance(file, dict)
        else StudySpec.read(file or BUILTIN, variant)
    )
    spec = spec.changed(seeds=seeds, **base)
    folder = Path(out) if out else Path("runs") / "-".join(x for x in (spec.name, variant) if x)
    with (
        page_beside(folder, watch),
        warnings_once(),
        StudyTable(quiet=progress is False, live=progress) as table,
    ):
        run_study(spec, folder, table, elsewhere=on_a_cluster)
    render(folder)
    return read_study(folder)


def load(folder: str | Path, model: Any = None) -> Run:
    """Read a finished run: its record, its history, and its model with the trained weights.

        run = paceline.load("runs/a")
        run.model(inputs), run.test_accuracy, run.history

    `model` is needed where the record cannot name it (a class in a notebook): a class, a function,
    a Module or a name. Nothing in the folder is run: the weights are safetensors.
    """
    return Run.open(folder, model)


def load_data(name: str, data_dir: str | None = None) -> tuple[Samples | Stream, Samples | None]:
    """Return the training and test set of a registered data source, for your own loop. Each has
    `.batch(indices)` and `len()`.
    """
    data = adopt(sources.build(name, data_dir=data_dir), name, True)
    return data.train, data.test


def meet(options: Mapping[str, Any]) -> Meeting | None:
    """Find the other ranks, if a launcher (torchrun, mpirun, srun) has started this process as one
    of several.
    """
    seat = find_seat()
    if seat is None:
        return None
    end_with_its_launcher(seat)
    return Meeting(seat, Wanted.read(options))


def silent(meeting: Meeting | None) -> bool:
    """Return whether this rank prints nothing: of a launcher's ranks only rank 0 prints."""
    return meeting is not None and not meeting.leads


def make_job(options: dict[str, Any], meeting: Meeting | None = None) -> Job:
    if meeting is None:
        return _own_job(options)
    with meeting.telling("prepare"):
        found = meeting.going_on(options)
        options = found.applied(options)
        config = Config.make(meeting.seat.fit(options, _saved(options)))
        job = prepare(config, default_out, sharing=meeting.sharing)
        return replace(job, notices=(*job.notices, *meeting.notices), found=found.found)


def _own_job(options: dict[str, Any]) -> Job:
    """Make the job of a process that starts the workers itself, here or on a Spark cluster."""
    if again.asks(options) and _ranks_look(options):
        again.folder_of(options)
        asked = _started_here(options)  # rank 0 looks into the folder, which it may see alone
        return replace(prepare(Config.make(Again().applied(asked)), default_out), asked=asked)
    found = Again()
    if again.asks(options):
        found = again.look(options)
        options = found.applied(options)
    elif options.get("resume"):
        # Before its checkpoints are read, which the other process may be replacing.
        refuse_held(run_folder(options["resume"]), HELD)
    asked = _started_here({**_saved(options), **options})
    job = prepare(Config.make(asked), default_out)
    notices = (*job.notices, *([found.notice] if found.notice else []))
    return replace(job, asked=asked, notices=notices, found=found.found)


def _ranks_look(options: dict[str, Any]) -> bool:
    """Whether the ranks look into the folder of `--resume auto`, after every start.

    The folder of a run on Spark may be seen by rank 0 alone; that of Ray is seen here as well.
    """
    if options.get("launcher") == "ray":
        return again.look(options).found != "complete"
    return options.get("launcher") == "spark"


def _saved(options: dict[str, Any]) -> dict[str, Any]:
    """Return the saved options of the run to resume, without those that are given anew."""
    if not options.get("resume"):
        return {}
    saved = load_config(options["resume"])
    before, now = (str(o.get("strategy")).partition(":")[0] for o in (saved, options))
    if options.get("strategy") is not None and now != before:
        saved.pop("servers", None)  # another strategy decides anew
    if any(options.get(name) is not None for name in ("parallel", "grid", "cut", "workers")):
        for name in ("parallel", "grid", "cut", "workers"):  # another arrangement decides anew
            saved.pop(name, None)
    plugins = saved.pop("plugin", None)
    if plugins and not options.get("plugin"):
        # A run's folder may come from another person, so it must not decide which code is run.
        given = " ".join(
            f"--plugin {path}" for path in (plugins if isinstance(plugins, list) else [plugins])
        )
        raise BadRequest(
            f"{options['resume']} was made with a plugin, which is run only when you name it again:"
            f" {given}"
        )
    for name, value in list(saved.items()):
        # A callback changes nothing in the training: a notice says that it is not called.
        if name != "callbacks" and "<" in str(value) and options.get(name) is None:
            raise BadRequest(
                f"that run's {name} was given in Python ({value}): pass it again to resume the run"
            )
    if options.get("batch_size") or options.get("global_batch_size"):
        saved.pop("batch_size", None)
        saved.pop("global_batch_size", None)
    if options.get("epochs") is not None or options.get("steps") is not None:
        saved.pop("epochs", None)
        saved.pop("steps", None)
    return saved


def _started_here(options: dict[str, Any]) -> dict[str, Any]:
    """Complete the options where this process starts the workers, here or on a cluster."""
    asked = str(options.get("launcher") or "auto")
    if asked in ("torchrun", "mpirun", "srun", "ssh"):
        how = {
            "torchrun": "torchrun --nproc-per-node 3 ... paceline train",
            "mpirun": "mpirun -n 3 paceline train",
            "srun": "srun -n 3 paceline train",
            "ssh": "paceline launch --hosts a,b -- train",
        }[asked]
        raise BadRequest(f"launcher={asked}: start the ranks with it ({how} ...; docs/clusters.md)")
    if asked not in ("spark", "ray"):
        return {**options, "launcher": "local"}
    filled = {k: v for k, v in options.items() if v is not None}
    refuse_objects(filled.get("callbacks", ()), asked)
    filled.setdefault("checkpoint_every", "epoch")  # a loss costs at most one epoch
    if str(filled.get("threads", "auto")) == "auto":
        filled["threads"] = 1  # a task of Spark or Ray has one core
    if str(filled.get("transport", "auto")) == "auto" and str(filled.get("workers", 1)) != "1":
        from paceline.transport.choose import best_transport

        filled["transport"] = best_transport(several_hosts=True)
    if filled.get("resume") and not filled.get("out"):
        filled["out"] = str(run_folder(filled["resume"]))
    if asked == "ray":
        return filled
    from paceline.spark.master import usual_master

    return {**filled, "master": usual_master(str(filled.get("master", "")))}


def start(
    job: Job,
    listen: Listen,
    clean: bool = False,
    meeting: Meeting | None = None,
    wishes: Any = None,
) -> Run:
    if job.found == "complete":
        record, out = read_run(job.out), job.out
        for notice in job.notices:
            listen("notice", {"text": notice})
        if meeting is not None:
            meeting.recorded()
    elif meeting is None and job.config.launcher == "spark":
        record, out = _start_on_spark(job, listen), job.out
    elif meeting is None and job.config.launcher == "ray":
        return _start_on_ray(job, listen, wishes)
    else:
        record, out = run_in_folder(job, listen, clean, meeting, leaves=True)
    return Run(record, out, job.model)


def on_a_cluster(options: dict[str, Any], listen: Listen) -> dict[str, Any]:
    """Run options that name a Spark cluster, for a study. Returns the record."""
    return start(make_job(options), listen).record


def _start_on_spark(job: Job, listen: Listen) -> dict[str, Any]:
    """Run the workers on the cluster, and print here what they say."""
    from paceline.launch.spark import run_on_spark

    for notice in job.notices:
        listen("notice", {"text": notice})
    return run_on_spark(seated, job, listen)


def _start_on_ray(job: Job, listen: Listen, wishes: Any) -> Run:
    """Run the workers on Ray, and print here what they say."""
    from paceline.launch.ray import run_on_ray

    for notice in job.notices:
        listen("notice", {"text": notice})
    record, result = run_on_ray(seated, job, listen, wishes)
    run = Run(record, job.out, job.model)
    run.ray = result
    return run


def seated(options: dict[str, Any]) -> dict[str, Any] | None:
    """Run one rank of a run whose options another process sent. Rank 0 returns the record."""
    torch.set_num_threads(1)
    meeting = meet(options)
    if meeting is None:
        raise BadRequest("no launcher has started this process as one of several ranks")
    job = make_job(options, meeting)
    job = replace(job, notices=tuple(meeting.notices))  # the driver has printed the others
    with Watch(job, quiet=silent(meeting), live=False, headed=False) as watch:
        record = start(job, watch.listen, clean=True, meeting=meeting).record
    return record if meeting.leads else None
