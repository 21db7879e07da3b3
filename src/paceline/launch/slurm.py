"""A batch script for Slurm: `srun` starts one process per task, and each finds its seat in Slurm's
variables (seat.py).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.common.files import write_whole
from paceline.errors import BadRequest
from paceline.launch.seat import Seat
from paceline.registry import Spec, strategies
from paceline.request.config import Config

# 90, 90:00, 1:30:00, 2-12, 2-12:00, 2-12:00:00
TIME = re.compile(r"\d+(:\d\d){0,2}|\d+-\d+(:\d\d){0,2}")
WORD = re.compile(r"[\w.,@+-]+")


@dataclass(frozen=True)
class Allocation:
    """What Slurm is asked for."""

    nodes: int = 1
    tasks_per_node: int = 1
    cpus_per_task: int | None = None
    time: str | None = None
    partition: str | None = None
    job_name: str = "paceline"

    def __post_init__(self) -> None:
        for name in ("nodes", "tasks_per_node", "cpus_per_task"):
            if (given := getattr(self, name)) is not None and given < 1:
                raise BadRequest(f"--{name.replace('_', '-')} {given}: it takes at least 1")
        if self.time is not None and not TIME.fullmatch(self.time):
            raise BadRequest(
                f"--time {self.time!r} is none that Slurm reads: minutes (90), hours (1:30:00),"
                " days (2-12:00:00)"
            )
        for name in ("partition", "job_name"):
            if (word := getattr(self, name)) is not None and not WORD.fullmatch(word):
                raise BadRequest(
                    f"--{name.replace('_', '-')} {word!r}: one word of letters, digits and . , @"
                    " + - _"
                )

    @property
    def tasks(self) -> int:
        return self.nodes * self.tasks_per_node

    def __str__(self) -> str:
        each = " each" if self.nodes > 1 else ""
        return f"{_count(self.nodes, 'node')} with {_count(self.tasks_per_node, 'task')}{each}"

    def lines(self) -> list[str]:
        asked = {
            "job-name": self.job_name,
            "nodes": self.nodes,
            "ntasks-per-node": self.tasks_per_node,
            "cpus-per-task": self.cpus_per_task,
            "time": self.time,
            "partition": self.partition,
            "output": "%x-%j.out",
        }
        return [f"#SBATCH --{name}={value}" for name, value in asked.items() if value is not None]


def batch_script(
    command: Sequence[str],
    allocation: Allocation,
    setup: Sequence[str] = (),
    path: str | None = None,
    own_threads: bool = False,
) -> str:
    """`command` is `train ...`, or a Python script with its arguments; `path` is put in front of
    PATH, before `setup`.

    `own_threads`: the options of `train` say how many, here or in a file. Otherwise a process has
    as many as it has cores.
    """
    if not command:
        raise BadRequest(
            "nothing to run: after the options write a script, or train and its options"
        )
    if command[0] == "train":
        # its own count would be of the cores of all
        threads = [] if own_threads else ["--threads", '"$OMP_NUM_THREADS"']
        words = ["paceline", *(shlex.quote(word) for word in command), *threads]
    else:
        words = ["python", *(shlex.quote(word) for word in command)]
    prepared = [line for text in setup for line in text.splitlines()]
    lines = [
        "#!/bin/bash",
        *allocation.lines(),
        "",
        "set -euo pipefail",
        *([f'export PATH={shlex.quote(path)}:"$PATH"'] if path else []),
        *(["set +u  # the lines of --setup", *prepared, "set -u"] if prepared else []),
        'export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"',
        "",
        "# One process per task; when one fails, the others are ended.",
        f'srun --kill-on-bad-exit=1 --cpus-per-task="$OMP_NUM_THREADS" {" ".join(words)}',
    ]
    return "\n".join(lines) + "\n"


def check(options: Mapping[str, Any], allocation: Allocation) -> None:
    """Whether a run with these options can be on that many tasks: what would fail there is refused
    here.
    """
    given = options.get("workers")
    seat = Seat("srun", 0, allocation.tasks, 0, allocation.tasks_per_node)
    fitted = seat.fit({k: v for k, v in options.items() if k != "workers"})
    workers = int(fitted["workers"])
    if given is not None and str(given) != str(workers):
        servers = allocation.tasks - workers
        less = f" ({_count(workers, 'worker')} and {_count(servers, 'server')})" if servers else ""
        raise BadRequest(
            f"--workers {given}, but {allocation} are"
            f" {_count(allocation.tasks, 'process', 'es')}{less}: leave --workers out"
        )
    chosen = Config.make(options).strategy
    strategy = strategies.build(chosen) if isinstance(chosen, str | Spec) else chosen
    most = getattr(strategy, "most_workers", None)
    if most is not None and workers > most and not options.get("resume"):
        raise BadRequest(
            f"strategy {strategy.name} runs {_count(most, 'worker')}, and {allocation} are"
            f" {workers}: --strategy allreduce?"
        )


def save(script: str, file: str, force: bool = False) -> None:
    path = Path(file)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise BadRequest(
            f"{file} cannot be written: "
            + ("it is a folder" if path.is_dir() else "there is no such folder")
        )
    if path.exists() and not force:
        raise BadRequest(
            f"{file} exists already: write to another file, or replace it with --force"
        )
    try:
        write_whole(path, script)
    except OSError as error:
        raise BadRequest(f"{file} cannot be written: {error.strerror}") from None


def _count(number: int, what: str, plural: str = "s") -> str:
    return f"{number} {what}{plural if number != 1 else ''}"
