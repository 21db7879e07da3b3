"""This process's place among those that a launcher (torchrun, mpirun, srun) has started: nothing more is started then."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.errors import BadRequest
from paceline.record.machine import cores


@dataclass(frozen=True)
class Seat:
    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int  # ranks on this host
    host: str = ""  # where the ranks meet; empty: rank 0 says so through MPI
    port: int = 0
    store_exists: bool = False  # the launcher hosts the meeting point; otherwise rank 0 does
    generation: int = 0  # counts the launcher's restarts

    def fit(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options of a run in these seats: as many workers as there are, a transport that reaches all of them."""
        fitted, servers = dict(options), int(options.get("servers") or 0)
        workers = self.size - servers
        given = fitted.get("workers")
        if given is not None and str(given) != str(workers):
            less = f" less {servers} server(s)" if servers else ""
            raise BadRequest(f"workers={given}, but {self.launcher} has started {self.size} processes{less}: leave it out")
        fitted["workers"] = workers
        if str(fitted.get("transport", "auto")) == "auto" and self.local_size < self.size:
            fitted["transport"] = "gloo"  # several hosts
        if str(fitted.get("threads", "auto")) == "auto":
            fitted["threads"] = max(1, cores() // self.local_size)
        return fitted


def find(environment: Mapping[str, str] = os.environ) -> Seat | None:
    """The seat that the environment tells of; None when no launcher has started this process."""
    for look in (_torchrun, _mpirun, _srun):
        try:
            seat = look(environment)
        except (KeyError, ValueError) as error:
            name = look.__name__.removeprefix("_")
            raise BadRequest(f"this seems to run inside {name}, but its variables are incomplete: {error}") from None
        if seat is not None:
            return seat
    return None


def _torchrun(env: Mapping[str, str]) -> Seat | None:
    """Also anything else that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."""
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= env.keys():
        return None
    size = int(env["WORLD_SIZE"])
    return Seat(
        "torchrun" if "TORCHELASTIC_RUN_ID" in env else "a launcher",
        int(env["RANK"]),
        size,
        int(env.get("LOCAL_RANK", env["RANK"])),
        int(env.get("LOCAL_WORLD_SIZE", size)),
        env["MASTER_ADDR"],
        int(env["MASTER_PORT"]),
        env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        int(env.get("TORCHELASTIC_RESTART_COUNT", 0)),
    )


def _mpirun(env: Mapping[str, str]) -> Seat | None:
    for prefix, rank, size, local_rank, local_size in (
        ("OMPI_COMM_WORLD_", "RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"),
        ("PMI_", "RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"),
    ):
        if prefix + rank in env:
            total = int(env[prefix + size])
            return Seat(
                "mpirun",
                int(env[prefix + rank]),
                total,
                int(env.get(prefix + local_rank, env[prefix + rank])),
                int(env.get(prefix + local_size, total)),
            )
    return None


def _srun(env: Mapping[str, str]) -> Seat | None:
    """A task of a job step; the batch script itself, or a shell in an allocation, is none."""
    if not {"SLURM_PROCID", "SLURM_STEP_ID"} <= env.keys():
        return None
    size = int(env.get("SLURM_STEP_NUM_TASKS") or env["SLURM_NTASKS"])
    nodes = env.get("SLURM_STEP_NODELIST") or env["SLURM_JOB_NODELIST"]
    per_node = env.get("SLURM_STEP_TASKS_PER_NODE", str(size))  # "4(x2),3"
    job = int(env["SLURM_JOB_ID"]) * 64 + int(env["SLURM_STEP_ID"])
    return Seat(
        "srun",
        int(env["SLURM_PROCID"]),
        size,
        int(env.get("SLURM_LOCALID", 0)),
        tasks_on_node(per_node, int(env.get("SLURM_NODEID", 0))),
        first_host(nodes),
        20000 + job % 20000,
    )


def first_host(nodes: str) -> str:
    """Slurm's shorthand: `node[07-09,12],other` begins with node07."""
    found = re.match(r"([^\[,]+)(?:\[([^\],-]+))?", nodes)
    if found is None:
        raise ValueError(f"no host in {nodes!r}")
    return found[1] + (found[2] or "")


def tasks_on_node(per_node: str, node: int) -> int:
    """`4(x2),3`: four tasks on each of the first two nodes, three on the next."""
    counts: list[int] = []
    for part in per_node.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if found is None:
            raise ValueError(f"tasks per node {per_node!r}")
        counts += [int(found[1])] * int(found[2] or 1)
    return counts[min(node, len(counts) - 1)]
