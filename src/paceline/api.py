"""What `import paceline` gives."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from torch import nn

from paceline import checkpoint
from paceline.board import Board
from paceline.config import Config
from paceline.data.adopt import adopt
from paceline.data.base import Samples, Stream
from paceline.errors import BadRequest
from paceline.job import Job, load_config, prepare
from paceline.launch.joined import Meeting
from paceline.launch.run import Listen, run
from paceline.launch.seat import find as find_seat
from paceline.progress import Watch
from paceline.record.reader import read_run
from paceline.registry import sources
from paceline.report.compare import compare
from paceline.report.lines import Study, read_study
from paceline.report.render import render
from paceline.studies.grid import BUILTIN
from paceline.studies.grid import Study as Plan
from paceline.studies.runner import run_study

__all__ = ["Run", "compare", "load_data", "render", "study", "train"]


class Run:
    """A finished run: its record, and its model with the trained weights."""

    def __init__(self, record: dict[str, Any], out: Path, make_model: Callable[[], nn.Module] | None = None) -> None:
        self.record, self.out, self._make_model = record, out, make_model

    @classmethod
    def open(cls, folder: str | Path) -> Run:
        """A run that is on disk."""
        return cls(read_run(folder), Path(folder))

    @property
    def model(self) -> nn.Module:
        """The trained model (the strategy's consensus weights), on the CPU, in evaluation mode."""
        if self._make_model is None:
            raise BadRequest("this run was read from disk: build its model yourself and load `run.weights`")
        model = self._make_model()
        inner = getattr(model, "_orig_mod", model)  # torch.compile's wrapper
        inner.load_state_dict(self.weights)
        return model.eval()

    @property
    def weights(self) -> dict[str, Any]:
        return checkpoint.load_weights(self.out / "model.safetensors")

    def __getattr__(self, name: str) -> Any:
        """`run.test_accuracy`, `run.samples_per_s`, ...: everything in the record's `result`."""
        if name.startswith("_") or name == "record":
            raise AttributeError(name)
        result = self.record["result"]
        if name in result:
            return result[name]
        raise AttributeError(f"a run has no {name!r}; its results are {', '.join(result)}")

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self.record["result"]]

    def __repr__(self) -> str:
        r, c = self.record["result"], self.record["config"]
        accuracy = "" if r["test_accuracy"] is None else f", accuracy {r['test_accuracy']:.4f}"
        rate = "" if r["samples_per_s"] is None else f", {r['samples_per_s']:,.0f} samples/s"
        return f"<Run {c['strategy']} x {c['workers']}: {r['steps']} steps{accuracy}{rate}, in {self.out}>"


def train(*, progress: bool | None = None, **options: Any) -> Run:
    """Train a model with a line of workers. Options have the names of `paceline train --help`.

    Besides names, `model` may be a Module, a class or a function that makes one; `data` a pair of tensors, a Dataset,
    a DataLoader, an IterableDataset, or a pair (train, test) of them; `loss` a function of (outputs, targets) that is
    a mean over rows; `optimizer` a function from parameters to an optimizer; `strategy` a Strategy.

        run = paceline.train(model=Net, data=(train_set, test_set), strategy="allreduce", workers=2)
        run.test_accuracy, run.samples_per_s, run.model

    `progress`: True for a live bar, False for silence, None for a bar where there is a terminal or a notebook.
    """
    meeting = meet()
    job = make_job(options, meeting)
    with Watch(job, quiet=progress is False or silent(meeting), live=progress, lines=False) as watch:
        return start(job, watch.listen, meeting=meeting)


def study(
    file: str | Path | dict[str, Any] | None = None,
    *,
    out: str | Path | None = None,
    variant: Literal["", "short", "full"] = "",
    seeds: int | None = None,
    progress: bool | None = None,
    **base: Any,
) -> Study:
    """Measure a grid of settings, write the report, and give back what was measured. Called again, it goes on where it stopped.

    `file` is a study file, a dict of the same shape, or nothing for the built-in study; further keywords are options of
    `train` for all runs.

        found = paceline.study("studies/stragglers.toml", variant="short")
        for line in found.lines:
            print(line.label, line.workers, line.train_s, line.accuracy)
        found.folder / "report.html"
    """
    plan = Plan.make(file, variant=variant) if isinstance(file, dict) else Plan.read(file or BUILTIN, variant)
    plan = plan.changed(seeds=seeds, **base)
    folder = Path(out) if out else Path("runs") / "-".join(x for x in (plan.name, variant) if x)
    with Board(quiet=progress is False, live=progress) as board:
        run_study(plan, folder, board)
    render(folder)
    return read_study(folder)


def load_data(name: str, data_dir: str | None = None) -> tuple[Samples | Stream, Samples | None]:
    """A registered data source's training and test set, for a loop of one's own: `.batch(indices)`, `len()`."""
    data = adopt(sources.build(name, data_dir=data_dir), name, True)
    return data.train, data.test


def meet() -> Meeting | None:
    """The other ranks, when a launcher (torchrun, mpirun, srun) has started this process as one of several."""
    seat = find_seat()
    return Meeting(seat) if seat is not None else None


def silent(meeting: Meeting | None) -> bool:
    """Among the ranks of a launcher, rank 0 speaks."""
    return meeting is not None and not meeting.leads


def make_job(options: dict[str, Any], meeting: Meeting | None = None) -> Job:
    if meeting is not None:
        with meeting.telling("prepare"):
            return _make_job(meeting.seat.fit(options))
    return _make_job(options)


def _make_job(options: dict[str, Any]) -> Job:
    if options.get("resume"):
        saved = load_config(options["resume"])
        for name, value in list(saved.items()):
            if "<" in str(value) and options.get(name) is None:
                raise BadRequest(f"that run's {name} was given in Python ({value}): hand it over again to resume it")
        if options.get("batch_size") or options.get("global_batch_size"):
            saved.pop("batch_size", None)
            saved.pop("global_batch_size", None)
        if options.get("epochs") is not None or options.get("steps") is not None:  # a new end replaces the old one
            saved.pop("epochs", None)
            saved.pop("steps", None)
        options = {**saved, **options}
    return prepare(Config.make(options), default_out)


def start(job: Job, listen: Listen, clean: bool = False, meeting: Meeting | None = None) -> Run:
    record = run(job, listen, clean, meeting)
    return Run(record, job.out, job.model)


def default_out(config: Config) -> Path:
    """runs/20261115-203012-cnn-mnist-allreduce-2"""
    described = config.described()
    parts = [described["model"], described["data"], described["strategy"]]
    parts = [str(p).removeprefix("__main__:") for p in parts]
    words = [re.sub(r"[^A-Za-z0-9._-]+", "-", str(p).split(":")[0].strip("<>()"))[:24] for p in parts]
    stem = "-".join([time.strftime("%Y%m%d-%H%M%S"), *words, str(config.workers)])
    return Path("runs") / stem
