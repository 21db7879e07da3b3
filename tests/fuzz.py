"""Requests and run folders that are wrong at random: whatever is asked or read, only errors of ours
come out.

A case is a function of its kind and its seed. tests/faults/fuzz.py runs 10,000 of them.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import shutil
import tempfile
import traceback
import typing
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import click

import paceline.api
from paceline.cli.main import COMMANDS, cli
from paceline.errors import PacelineError, WorkerFailed
from paceline.launch.run import run
from paceline.registry import ALL
from paceline.request.checks import CHOICES
from paceline.request.config import Config
from paceline.studies.folder import StudyFolder
from paceline.studies.grid import StudySpec
from paceline.watch.state import Watched

SMALL = {
    "data": "synthetic:samples=40,shape=1x4x4",
    "model": "mlp:hidden=4",
    "steps": "2",
    "transport": "inproc",
}
WORDS = (
    "",
    " ",
    "x",
    "auto",
    "none",
    "all",
    "epoch",
    "2epochs",
    "true",
    ",",
    ":",
    "=",
    "a=b",
    "a:b",
    "name:key=value",
    "ü☃",
    "-",
)
PATHS = (".", "..", "/", "/dev/null", "missing", "a" * 3000, "~")
NUMBERS = (
    "0",
    "1",
    "2",
    "3",
    "7",
    "-1",
    "0.5",
    "1e-9",
    "1e-300",
    "1e300",
    "nan",
    "inf",
    "-inf",
    "1" + 30 * "0",
    "1_000",
    "٣",
    "0x10",
)
PLURALS = {
    "model": "models", "data": "data", "strategy": "strategies", "codec": "codecs", "optimizer":
    "optimizers", "loss": "losses", "lr_schedule": "schedules", "metric": "metrics", "transport":
    "transports", "faults": "faults", "callbacks": "callbacks",
}  # fmt: skip
# memory, processes
LARGE = (
    "workers",
    "threads",
    "samples",
    "shape",
    "hidden",
    "servers",
    "classes",
    "size",
    "depth",
    "width",
)
COMMON = {
    "batch_size": ("8", "all", "1", "8,4", "0,3"), "global_batch_size": ("8", "all", "40", "1000"),
    "balance": ("measured", "measured:every=1", "2,1", "runtime:1,2", "1e300,1"),
    "evaluate_every": ("1", "epoch", "2epochs"),
    "checkpoint_every": ("1", "epoch"), "lr_scaling": ("linear", "sqrt", "linear:warmup=1"),
    "device": ("cpu", "cuda", "hpu", "meta"), "collective": ("ring", "star", "nosuch"),
}  # fmt: skip
# those that start or write things
ELSEWHERE = ("resume", "out", "launcher", "master", "network", "plugin")


def text(r: random.Random) -> str:
    return r.choice(r.choice((WORDS, PATHS, NUMBERS)))


def value_of(r: random.Random, name: str, kind: Any = str) -> str:
    """Mostly of the right kind, so that what comes after the first check is reached too."""
    if name in LARGE:
        return r.choice(("0", "-1", "1", "2", "2", "3", "x", "", "nan", "inf", "2x2", "1.5"))
    if name in COMMON and r.random() < 0.5:
        return r.choice(COMMON[name])
    if typing.get_origin(kind) is typing.Literal and r.random() < 0.8:
        return str(r.choice(typing.get_args(kind)))
    if kind in (int, float) and r.random() < 0.9:
        return r.choice(NUMBERS)
    return text(r)


def choice(r: random.Random, name: str) -> str:
    """A registered thing with some options, or something like it."""
    if r.random() < 0.1:
        return text(r)
    entry = r.choice(list(ALL[PLURALS[name]]))
    if entry.name in ("mnist", "fashion-mnist", "cifar10", "adult", "imagefolder", "shards", "mpi"):
        return entry.name if entry.name != "shards" else f"shards:{r.choice(PATHS)}"
    options = r.sample(sorted(entry.options), min(len(entry.options), r.randrange(3)))
    pairs = []
    for name in options:
        kind = entry.options[name].kind
        pairs.append(
            f"{name}={r.choice(('true', 'false')) if kind is bool else value_of(r, name, kind)}"
        )
    if "synthetic" in entry.name:
        pairs = [p for p in pairs if not p.startswith(("samples", "shape"))] + [
            "samples=40",
            "shape=1x4x4",
        ]
    return entry.name + (":" + ",".join(pairs) if pairs else "")


def option(r: random.Random) -> tuple[str, str]:
    name = r.choice([n for n in Config.options() if n not in ELSEWHERE])
    if name in PLURALS:
        return name, choice(r, name)
    if name == "privacy":
        keys = r.sample(
            ("epsilon", "delta", "noise", "clip", "sampling", "trust", "clipping", "accountant"),
            r.randrange(1, 4),
        )
        return name, ",".join(
            f"{k}={r.choice(('1.0', '1e-5', r.choice(NUMBERS), text(r)))}" for k in keys
        )
    return name, value_of(r, name, Config.options()[name].metadata["kind"])


def command_line(r: random.Random) -> None:
    """`paceline train` with up to four wrong options, as far as a job that is small enough to be
    run at once.
    """
    given = {**SMALL, **dict(option(r) for _ in range(r.choice((1, 1, 2, 3))))}
    if r.random() < 0.5:
        given.setdefault("strategy", "allreduce")
        given.setdefault("workers", "2")
    arguments = ["train", "--quiet", "--out", "out"]
    for name, value in given.items():
        arguments += (
            [f"--{name.replace('_', '-')}", value]
            if Config.options()[name].metadata["kind"] is not bool
            else []
        )
    if r.random() < 0.2:
        arguments += [
            "--set",
            r.choice((*CHOICES, "lr", text(r)))
            + r.choice(("", ".", ".every"))
            + r.choice(("=", ""))
            + text(r),
        ]
    with mock.patch("paceline.api.start", start):
        cli.main(arguments, prog_name="paceline", standalone_mode=False)


def start(job: Any, listen: Any, **_: Any) -> None:
    """Two steps of it, where that takes a moment; no more is wanted of the command."""
    if job.transport == "inproc" and job.ranks <= 4 and sum(job.batch_sizes) <= 4096:
        steps = min(job.steps or 2, 2) if job.resume_from is None else job.steps
        run(replace(job, steps=steps), listen)
    raise click.exceptions.Exit(0)


def toml_value(r: random.Random, depth: int = 0) -> str:
    if depth < 2 and r.random() < 0.25:
        inside = [toml_value(r, depth + 1) for _ in range(r.randrange(3))]
        return (
            f"[{', '.join(inside)}]"
            if r.random() < 0.6
            else "{" + ", ".join(f"k{i} = {v}" for i, v in enumerate(inside)) + "}"
        )
    plain = (
        "true",
        "false",
        "1979-05-27",
        "07:32:00",
        "inf",
        "nan",
        "-1",
        "0",
        "1",
        "2",
        "1e300",
        "1" + 17 * "0",
        "'nosuch'",
        "''",
    )
    return r.choice((*plain, json.dumps(text(r), ensure_ascii=False)))


def run_toml(r: random.Random) -> None:
    names = [n for n in Config.options() if n not in (*ELSEWHERE, *LARGE)]
    wrong = {r.choice((*names, *PLURALS)): toml_value(r) for _ in range(r.choice((1, 1, 2)))}
    given = {**{k: json.dumps(v) for k, v in SMALL.items()}, **wrong}
    Path("run.toml").write_text("".join(f"{k} = {v}\n" for k, v in given.items()), encoding="utf-8")
    with mock.patch("paceline.api.start", start):
        cli.main(
            ["train", "run.toml", "--quiet", "--out", "out"],
            prog_name="paceline",
            standalone_mode=False,
        )


STUDY = {
    "title": '"t"', "question": '"q"', "seeds": "1", "scaling": '"strong"', "target_accuracy":
    "0.5", "budget": '"60s"', "confirm": "0", "width": "0.2", "block": '"5s"',
    "all_cores": "false", "cut": '"c"',
}  # fmt: skip


def study_toml(r: random.Random) -> None:
    top = {
        k: toml_value(r) if r.random() < 0.2 else v for k, v in STUDY.items() if r.random() < 0.6
    }
    tables = []
    for table in ("[base]", "[axes]", "[[also]]", "[short.base]", "[full]"):
        if r.random() < 0.5:
            names = [
                r.choice([*Config.options(), *(f"{c}.{r.choice(('every', 'x'))}" for c in CHOICES)])
                for _ in range(2)
            ]
            as_list = "[{}]" if "axes" in table else "{}"
            pairs = {
                f'"{n}"': (
                    as_list.format(value_in_study(r, n)) if r.random() < 0.8 else toml_value(r)
                )
                for n in names
            }
            tables.append("\n".join([table, *(f"{k} = {v}" for k, v in pairs.items())]))
    Path("study.toml").write_text(
        "\n".join([*(f"{k} = {v}" for k, v in top.items()), *tables]), encoding="utf-8"
    )
    study = StudySpec.read("study.toml", r.choice(("", "", "short", "full")))
    study = study.changed(
        [f"{r.choice(('lr', 'workers', 'strategy.every', 'x'))}={text(r)}"]
        if r.random() < 0.2
        else []
    )
    json.dumps(study.described(), allow_nan=False)
    [(s.slug, s.label) for s in study.settings()]


def value_in_study(r: random.Random, name: str) -> str:
    return json.dumps(
        (
            choice(r, name)
            if name in PLURALS
            else value_of(r, name, Config.options()[name.partition(".")[0]].metadata["kind"])
        ),
        ensure_ascii=False,
    )


# --- damaged folders

WRONG: tuple[Any, ...] = (
    None, True, -1, 0, 1, 10**6, 10**30, 10**400, 0.5, 1e300, float("nan"), float("inf"), "", "x",
    "<b>", "../..", [], [1], ["x"], {}, {"a": 1}, [[]], [None],
)  # fmt: skip


def damaged(r: random.Random, value: Any) -> Any:
    """The same with one wrong thing somewhere in it."""
    if isinstance(value, dict) and value and r.random() < 0.9:
        key, copied = r.choice(list(value)), dict(value)
        if r.random() < 0.25:
            del copied[key]
        else:
            copied[key] = damaged(r, value[key])
        return copied
    if isinstance(value, list) and value and r.random() < 0.8:
        place, copied_list = r.randrange(len(value)), list(value)
        copied_list[place] = damaged(r, value[place])
        return copied_list
    return r.choice(WRONG)


def damage_file(r: random.Random, path: Path) -> None:
    content = path.read_bytes()
    how = r.random() if content else 0.0
    if how < 0.1:
        path.write_bytes(content[: r.randrange(len(content) + 1)])
    elif how < 0.2:
        place = r.randrange(len(content))
        path.write_bytes(
            content[:place]
            + bytes(r.randrange(256) for _ in range(r.randrange(1, 5)))
            + content[place + 1 :]
        )
    elif how < 0.25:
        path.unlink()
        (
            path.mkdir()
            if r.random() < 0.5
            else path.write_text(r.choice(("", "[]", "null", "[" * 100_000, "7", '{"schema": 1}')))
        )
    elif path.suffix == ".jsonl":
        lines = content.decode(errors="replace").splitlines()
        for _ in range(r.randrange(1, 4)):
            place = r.randrange(len(lines))
            with contextlib.suppress(ValueError, RecursionError):
                lines[place] = json.dumps(damaged(r, json.loads(lines[place])))
        path.write_text("\n".join(lines))
    else:
        with contextlib.suppress(ValueError, RecursionError):  # damaged before
            path.write_text(json.dumps(damaged(r, json.loads(content))))


def damage_folder(r: random.Random, folder: Path, *patterns: str) -> None:
    for _ in range(r.randrange(1, 3)):
        files = [p for pattern in patterns for p in sorted(folder.rglob(pattern)) if p.is_file()]
        if files:
            damage_file(r, r.choice(files))
    if r.random() < 0.2:
        stray = r.choice(
            (
                "events/worker-x.jsonl",
                "events/worker-.jsonl",
                "checkpoints/step-abc",
                "checkpoints/step-00000009",
            )
        )
        for place in folder.rglob("run.json"):
            (place.parent / stray).parent.mkdir(parents=True, exist_ok=True)
            (
                (place.parent / stray).write_text("{}")
                if r.random() < 0.5
                else (place.parent / stray).mkdir(exist_ok=True)
            )


def options_here(**more: Any) -> dict[str, Any]:
    return {
        **{k: v for k, v in SMALL.items() if k != "steps"},
        "batch_size": 8,
        "threads": 1,
        **more,
    }


def make_runs(folder: Path) -> None:
    """What the damaged folders are made from: three runs, and a study of them."""
    plain = {
        "strategy": "allreduce",
        "workers": 2,
        "steps": 8,
        "checkpoint_every": 4,
        "codec": "fp16",
        "out": str(folder / "run"),
    }
    paceline.train(**options_here(**plain), progress=False)
    private = {
        "privacy": "noise=1.0,delta=1e-5",
        "steps": 3,
        "checkpoint_every": 2,
        "out": str(folder / "private"),
    }
    paceline.train(**options_here(**private), progress=False)
    base = {**options_here(steps=3), "data_share": 0.9}
    plan = StudySpec.make(
        {
            "base": base,
            "axes": {"strategy": ["serial", "local-sgd"], "workers": [1, 2]},
            "all_cores": False,
        }
    )
    paceline.api.run_study(plan, folder / "study")


def report_of_damage(r: random.Random, runs: Path) -> None:
    which = r.choice(("run", "private", "study"))
    shutil.copytree(runs / which, "copy")
    damage_folder(r, Path("copy"), "run.json", "run.json", "study.json", "*.jsonl", "*.jsonl")
    with mock.patch("paceline.report.render.library", return_value=""):
        cli.main(["report", "copy", "--no-figures"], prog_name="paceline", standalone_mode=False)


def resume_of_damage(r: random.Random, runs: Path) -> None:
    shutil.copytree(runs / "run", "copy")
    damage_folder(r, Path("copy"), "config.json", "checkpoint.json", "*.jsonl", "run.json")
    where = r.choice(("copy", "copy", "copy/checkpoints/step-00000004"))
    arguments = ["train", "--quiet", "--resume", where, "--steps", "9"]
    with mock.patch("paceline.api.start", start):
        cli.main(arguments, prog_name="paceline", standalone_mode=False)


def study_of_damage(r: random.Random, runs: Path) -> None:
    shutil.copytree(runs / "study", "copy")
    damage_folder(r, Path("copy"), "study.json", "run.json")
    base = {**options_here(steps=3), "data_share": 0.9}
    plan = StudySpec.make(
        {
            "base": base,
            "axes": {"strategy": ["serial", "local-sgd"], "workers": [1, 2]},
            "all_cores": False,
        }
    )
    session = StudyFolder.open(plan, Path("copy"))
    from paceline.studies.plan import rounds_of

    [session.finished(p, False) for planned in rounds_of(plan) for p in planned]


DAMAGED = (
    ("run", ("run.json", "config.json", "*.jsonl", "checkpoint.json", "*.safetensors", "*.pt")),
    ("private", ("run.json", "config.json", "*.jsonl", "worker-*.json", "status/*")),
    ("study", ("study.json", "run.json", "config.json", "*.jsonl")),
)


def copy_of_damage(r: random.Random, runs: Path, *which: str) -> None:
    name, patterns = r.choice([each for each in DAMAGED if each[0] in which])
    shutil.copytree(runs / name, "copy")
    damage_folder(r, Path("copy"), *patterns)


def show_of_damage(r: random.Random, runs: Path) -> None:
    copy_of_damage(r, runs, "run", "private")
    more = ["--json"] if r.random() < 0.3 else []
    cli.main(["show", "copy", *more], prog_name="paceline", standalone_mode=False)


def runs_of_damage(r: random.Random, runs: Path) -> None:
    copy_of_damage(r, runs, "run", "private", "study")
    more = ["--json"] if r.random() < 0.3 else []
    where = r.choice((".", "copy"))
    cli.main(["runs", where, *more], prog_name="paceline", standalone_mode=False)


def evaluate_of_damage(r: random.Random, runs: Path) -> None:
    copy_of_damage(r, runs, "run", "private")
    more = r.choice(([], ["--json"], ["--which", "best"], ["--which", "ema"]))
    cli.main(["evaluate", "copy", *more], prog_name="paceline", standalone_mode=False)


def watch_of_damage(r: random.Random, runs: Path) -> None:
    """The picture that the page shows, as JSON, twice: the second one reads what is new."""
    copy_of_damage(r, runs, "run", "private", "study")
    watched = Watched("copy")
    chosen = r.choice((None, "x", "serial-1w"))
    for _ in range(2):
        json.dumps(watched.picture(chosen), allow_nan=False)


def status_of_damage(r: random.Random, runs: Path) -> None:
    if "status" in COMMANDS:
        copy_of_damage(r, runs, "run", "private")
        cli.main(["status", "copy"], prog_name="paceline", standalone_mode=False)


def ledger_of_damage(r: random.Random, runs: Path) -> None:
    """Continue a private run: what it has spent must be known."""
    shutil.copytree(runs / "private", "copy")
    damage_folder(r, Path("copy"), "worker-*.json", "config.json", "checkpoint.json")
    arguments = ["train", "--quiet", "--resume", "copy", "--steps", "4"]
    with mock.patch("paceline.api.start", start):
        cli.main(arguments, prog_name="paceline", standalone_mode=False)


# Commands that only read or print: any words may be given to them.
READING = ("report", "runs", "show", "evaluate", "explain", "list", "privacy", "completion")
FLAGS = ("--json", "--workers", "--ranks", "--which", "--data", "--model", "--metric", "--debug")
FLAGS += ("--out", "--no-figures", "--collective", "--size", "--dry-run", "--seeds", "--slurm")


def other_command(r: random.Random) -> None:
    command = r.choice(READING)
    words = [r.choice((text(r), text(r), r.choice(FLAGS), "-")) for _ in range(r.randrange(4))]
    with mock.patch("paceline.report.render.library", return_value=""):
        cli.main([command, *words], prog_name="paceline", standalone_mode=False)


def dry_study(r: random.Random) -> None:
    """`paceline study FILE --dry-run`, and `paceline launch --slurm -` of a wrong request."""
    if r.random() < 0.5:
        words = ["study", r.choice(PATHS), "--dry-run"]
        for _ in range(r.randrange(3)):
            words += r.choice((["--set", text(r)], ["--seeds", text(r)], ["--budget", text(r)]))
    else:
        words = ["launch", "--slurm", "-"]
        for _ in range(r.randrange(3)):
            name = r.choice(("nodes", "tasks-per-node", "cpus-per-task", "time", "partition"))
            words += [f"--{name}", text(r)]
        words += ["--", "train", *r.choice(([], ["--workers", text(r)], ["--data", text(r)]))]
    cli.main(words, prog_name="paceline", standalone_mode=False)


REQUESTS: dict[str, Callable[[random.Random], None]] = {
    "command line": command_line,
    "run.toml": run_toml,
    "study.toml": study_toml,
    "other command": other_command,
    "dry study": dry_study,
}
FOLDERS: dict[str, Callable[[random.Random, Path], None]] = {
    "report": report_of_damage, "resume": resume_of_damage, "study": study_of_damage,
    "show": show_of_damage, "runs": runs_of_damage, "evaluate": evaluate_of_damage,
    "watch": watch_of_damage, "status": status_of_damage, "ledger": ledger_of_damage,
}  # fmt: skip


@contextlib.contextmanager
def _own_folder() -> Iterator[None]:
    before, entries = Path.cwd(), {name: dict(registry._entries) for name, registry in ALL.items()}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)
            for name, registry in ALL.items():
                registry._entries = entries[name]


def failure(kind: str, seed: int, runs: Path) -> str | None:
    """The traceback of what came out of a case, where that was neither a result nor an error of
    ours.
    """
    r = random.Random(f"{kind} {seed}")
    with (
        _own_folder(),
        contextlib.redirect_stderr(io.StringIO()),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        try:
            REQUESTS[kind](r) if kind in REQUESTS else FOLDERS[kind](r, runs)
        except WorkerFailed as error:
            return f"{error}\n{error.worker_traceback}"
        except (PacelineError, click.ClickException, click.exceptions.Exit) as error:
            return f"not a sentence: {error}" if len(str(error)) > 8000 else None
        except BaseException:
            return traceback.format_exc()
    return None
