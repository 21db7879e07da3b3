"""What the Slurm cluster says before a job is queued, where its commands are on this machine."""

from __future__ import annotations

import subprocess
from contextlib import suppress
from shutil import which

from paceline.errors import BadRequest

ASK_S = 5.0  # a controller that does not answer by then is not waited for


def refuse_unknown_partition(partition: str | None) -> None:
    """Refuse a partition that the cluster does not have; unknown where Slurm does not answer."""
    if partition is None:
        return
    known = _partitions()
    asked = partition.split(",")  # Slurm takes a list, of which it uses the first that is free
    if known and (missing := [name for name in asked if name not in known]):
        raise BadRequest(
            f"--partition {missing[0]}: this cluster has no such partition; it has"
            f" {', '.join(known)}"
        )


def _partitions() -> list[str]:
    """Return the partitions of the cluster; empty where no cluster answers."""
    if which("sinfo") is None:
        return []
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(
            ["sinfo", "--noheader", "--format=%R"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=ASK_S,
            check=False,
        )
        if done.returncode == 0:
            return sorted(set(done.stdout.split()))
    return []


def next_command(file: str) -> str:
    """Say what to type next with a batch script."""
    if which("sbatch") is not None:
        return f"Next: sbatch {file}"
    return (
        f"Slurm is not on the PATH of this machine: on a machine of the cluster type sbatch {file}"
    )
