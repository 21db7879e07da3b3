"""The engine that this process belongs to (a Slurm job, hosts), as the record names it."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping
from typing import Any

from paceline.launch.secret import HOSTS

MOST_NODES = 4096  # that a record names one by one


def engine(env: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return what the record's `environment` says about the engine; empty without one."""
    job = slurm_job(env)
    found: dict[str, Any] = {} if job is None else {"slurm": job}
    return {**found, "ssh": {"hosts": env[HOSTS].split(",")}} if HOSTS in env else found


def slurm_job(env: Mapping[str, str] = os.environ) -> dict[str, Any] | None:
    """Return job, nodes and partition as Slurm names them; None outside a job."""
    number = env.get("SLURM_JOB_ID", "")
    if not number.isdigit():
        return None
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", "")
    restarts = env.get("SLURM_RESTART_COUNT", "0")
    return {
        "job": int(number),
        "nodes": hosts_of(nodes),
        "partition": env.get("SLURM_JOB_PARTITION"),
        "requeued": int(restarts) if restarts.isdigit() else 0,
    }


def hosts_of(nodes: str) -> list[str]:
    """Return all hosts of Slurm's list: n07, n08, x of `n[07-08],x`."""
    found: list[str] = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodes):
        pieces = [_span(piece) for piece in re.findall(r"\[[^\]]*\]|[^\[]+", part)]
        names = ("".join(name) for name in itertools.product(*pieces))
        found += itertools.islice(names, MOST_NODES - len(found))
    return found


def _span(piece: str) -> list[str]:
    """Return what a piece stands for: 07, 08, 12 for `[07-08,12]`, itself without brackets."""
    if not piece.startswith("["):
        return [piece]
    found: list[str] = []
    for part in piece.strip("[]").split(","):
        first, _, last = part.partition("-")
        if first.isdigit() and last.isdigit():
            stop = min(int(last), int(first) + MOST_NODES)
            found += [f"{number:0{len(first)}d}" for number in range(int(first), stop + 1)]
        else:
            found.append(part)
    return found
