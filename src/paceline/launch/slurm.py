"""Write a batch script for Slurm.

Its `srun` starts one process per task, which finds its seat in Slurm's variables (seat.py). A
training run leaves with a checkpoint before the time limit, and its job puts itself into the queue
again: Slurm signals the tasks of all steps (`--signal` without `B:`), and the ranks exit with 75.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from paceline.common.files import write_whole
from paceline.errors import LEFT, BadRequest
from paceline.launch.seat import Seat
from paceline.registry import Spec, strategies
from paceline.request.config import Config
from paceline.request.earlier import AUTO

# 90, 90:00, 1:30:00, 2-12, 2-12:00, 2-12:00:00
TIME = re.compile(r"\d+(:\d\d){0,2}|\d+-\d+(:\d\d){0,2}")
WORD = re.compile(r"[\w.,@+-]+")
LEAVE_S = 120  # before the time limit: for the step that is under way, a checkpoint and the record
SHARE = 5  # a short limit gives this part of itself
# Without --out: a requeued job has the same number, so that it finds its folder again.
OWN_OUT = '"runs/$SLURM_JOB_NAME-$SLURM_JOB_ID"'

AGAIN = (
    "",
    f"# {LEFT}: the run has left with a checkpoint before the time limit. The next start goes on.",
    f'if [ "$code" -eq {LEFT} ]; then',
    # A script that has ended before Slurm ends it may count as a failed one.
    '    scontrol requeue "$SLURM_JOB_ID" && sleep 60',
    "fi",
    'exit "$code"',
)


@dataclass(frozen=True)
class Allocation:
    """The resources that a job asks Slurm for."""

    nodes: int = 1
    tasks_per_node: int = 1
    cpus_per_task: int | None = None
    time: str | None = None
    partition: str | None = None
    job_name: str = "paceline"

    def __post_init__(self) -> None:
        for name in ("nodes", "tasks_per_node", "cpus_per_task"):
            if (given := getattr(self, name)) is not None and given < 1:
                raise BadRequest(f"--{name.replace('_', '-')} {given}: it must be 1 or more")
        if self.time is not None and not TIME.fullmatch(self.time):
            raise BadRequest(
                f"--time {self.time!r} is not a time limit of Slurm: write minutes (90), hours"
                " (1:30:00) or days (2-12:00:00)"
            )
        for name in ("partition", "job_name"):
            if (word := getattr(self, name)) is not None and not WORD.fullmatch(word):
                raise BadRequest(
                    f"--{name.replace('_', '-')} {word!r}: it must be one word of letters, digits"
                    " and . , @ + - _"
                )

    @property
    def tasks(self) -> int:
        return self.nodes * self.tasks_per_node

    def __str__(self) -> str:
        each = " each" if self.nodes > 1 else ""
        return f"{_count(self.nodes, 'node')} with {_count(self.tasks_per_node, 'task')}{each}"

    @property
    def limit_s(self) -> int | None:
        """The time limit in seconds; None: none was given, or it is unlimited (0)."""
        if self.time is None:
            return None
        days, dash, rest = self.time.rpartition("-")
        parts = [int(part) for part in rest.split(":")]
        if dash:  # hours, minutes, seconds
            hours, minutes, seconds = [*parts, 0, 0][:3]
        elif len(parts) == 3:
            hours, minutes, seconds = parts
        else:  # minutes, seconds
            hours, (minutes, seconds) = 0, [*parts, 0][:2]
        return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds or None

    @property
    def leave_s(self) -> int:
        """How long before the time limit a run is asked to leave."""
        return LEAVE_S if self.limit_s is None else min(LEAVE_S, max(1, self.limit_s // SHARE))

    def lines(self, leaves: bool = False) -> list[str]:
        """Return the #SBATCH lines of a batch script. `leaves`: its run goes on when requeued."""
        asked = {
            "job-name": self.job_name,
            "nodes": self.nodes,
            "ntasks-per-node": self.tasks_per_node,
            "cpus-per-task": self.cpus_per_task,
            "time": self.time,
            "partition": self.partition,
            "output": "%x-%j.out",
        }
        lines = [f"#SBATCH --{name}={value}" for name, value in asked.items() if value is not None]
        again = ["open-mode=append", "requeue", f"signal=USR1@{self.leave_s}"] if leaves else []
        return lines + [f"#SBATCH --{word}" for word in again]


def batch_script(
    command: Sequence[str],
    allocation: Allocation,
    setup: Sequence[str] = (),
    path: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> str:
    """Return the script that runs `command` on every task.

    `command`: `train ...`, or a Python script with its arguments. `setup`: lines to run before it.
    `path`: put in front of PATH, before `setup` runs. `options`: those of `train`, where it has a
    file or settings. Without threads of its own a process has as many as the cores of its task.
    """
    if not command:
        raise BadRequest(
            "no command was given: write a script, or train and its options, after the options"
        )
    trains = command[0] == "train"
    words = ["paceline" if trains else "python", *(shlex.quote(word) for word in command)]
    words += _added(options or {}) if trains else []
    start = f'srun --kill-on-bad-exit=1 --cpus-per-task="$OMP_NUM_THREADS" {" ".join(words)}'
    prepared = [line for text in setup for line in text.splitlines()]
    lines = [
        "#!/bin/bash",
        *allocation.lines(leaves=trains),
        "",
        "set -euo pipefail",
        *([f'export PATH={shlex.quote(path)}:"$PATH"'] if path else []),
        *(["set +u  # the lines of --setup", *prepared, "set -u"] if prepared else []),
        'export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"',
        "",
        "# One process per task; when one fails, the others are ended.",
        *([start] if not trains else ["code=0", f"{start} || code=$?", *AGAIN]),
    ]
    return "\n".join(lines) + "\n"


def _added(options: Mapping[str, Any]) -> list[str]:
    """Return the words that `train` gets beside those that were given."""
    added = []
    if not options.get("resume"):
        added += ([] if options.get("out") else ["--out", OWN_OUT]) + ["--resume", AUTO]
    # `train` alone would count the cores of all tasks on the node.
    return added + ([] if "threads" in options else ["--threads", '"$OMP_NUM_THREADS"'])


class Asked(Protocol):
    """The ranks that a job asks a cluster for."""

    @property
    def tasks(self) -> int: ...

    @property
    def tasks_per_node(self) -> int: ...


def check(options: Mapping[str, Any], allocation: Asked, launcher: str = "srun") -> None:
    """Refuse options of `train` that would fail on the allocation, before the job is queued."""
    given = options.get("workers")
    seat = Seat(launcher, 0, allocation.tasks, 0, allocation.tasks_per_node)
    fitted = seat.fit({k: v for k, v in options.items() if k != "workers"})
    workers = int(fitted["workers"])
    if given is not None and str(given) != str(workers):
        servers = allocation.tasks - workers
        less = f" ({_count(workers, 'worker')} and {_count(servers, 'server')})" if servers else ""
        raise BadRequest(
            f"--workers {given}, but {allocation} are"
            f" {_count(allocation.tasks, 'process', 'es')}{less}: leave --workers out"
        )
    # Without --strategy it is the one that so many workers have by default.
    chosen = Config.make({**options, "workers": workers}).strategy
    strategy = strategies.build(chosen) if isinstance(chosen, str | Spec) else chosen
    most = strategy.traits.most_workers
    if most is not None and workers > most and options.get("resume") in (None, AUTO):
        raise BadRequest(
            f"strategy {strategy.name} runs {_count(most, 'worker')}, and {allocation} are"
            f" {workers}: choose another, such as --strategy allreduce"
        )


def save(script: str, file: str, force: bool = False, mode: int | None = None) -> None:
    """Write the script to a file; replace an existing one only with `force`."""
    path = Path(file)
    if path.is_dir() or not path.absolute().parent.is_dir():
        reason = "it is a folder" if path.is_dir() else "there is no such folder"
        raise BadRequest(f"{file} cannot be written: {reason}")
    if path.exists() and not force:
        raise BadRequest(
            f"{file} exists already: write to another file, or replace it with --force"
        )
    try:
        write_whole(path, script, mode=mode)
    except OSError as error:
        raise BadRequest(f"{file} cannot be written: {error.strerror}") from None


def _count(number: int, what: str, plural: str = "s") -> str:
    return f"{number} {what}{plural if number != 1 else ''}"
