"""This process's place among those that a launcher (torchrun, mpirun, srun) has started: nothing
more is started then.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import BadRequest
from paceline.launch.secret import secret_of
from paceline.record.machine import cores
from paceline.registry import Spec, load_plugin, strategies
from paceline.request.config import Config

LOOPBACK = ("127.0.0.1", "localhost", "::1")


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
    # who starts this host's ranks, and starts them again when one has failed; empty: nobody would
    agent: str = ""
    restarts: int = 0  # as far as that one counts them
    # False: nothing said how many ranks are on this host, and all of them are assumed to be
    local_is_told: bool = True
    secret: bytes = (
        b""  # handed over by the launcher; under mpirun rank 0 makes one, and MPI carries it
    )

    @property
    def one_host(self) -> bool:
        return self.local_size == self.size

    @property
    def meets_on_loopback(self) -> bool:
        """Whether it is certain that all ranks are on this host: then nothing of ours listens
        beyond it.
        """
        return self.one_host and self.local_is_told

    def fit(
        self, options: Mapping[str, Any], saved: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """The options of a run in these seats: as many workers as there are, a transport that
        reaches all of them.

        `saved` are those of the run that goes on here; how many it had, and where, is past.
        """
        past = {"workers", "threads"} | (set() if self.one_host else {"transport"})
        fitted = {**{k: v for k, v in (saved or {}).items() if k not in past}, **options}
        servers = _servers(fitted)
        workers = self.size - servers
        given = fitted.get("workers")
        if given is not None and str(given) != str(workers):
            less = f" less {servers} server(s)" if servers else ""
            raise BadRequest(
                f"workers={given}, but {self.launcher} has started {self.size} processes{less}:"
                " leave it out"
            )
        if workers < 1:
            raise BadRequest(
                f"{self.launcher} has started {self.size} process(es), and {servers} of them serve:"
                " start more"
            )
        fitted["workers"] = workers
        asked = str(fitted.get("launcher") or "auto")
        if asked not in ("auto", self.launcher):
            raise BadRequest(
                f"launcher={asked}, but {self.launcher} has started this process: leave it out"
            )
        fitted["launcher"] = "auto" if self.launcher == "a launcher" else self.launcher
        if str(fitted.get("transport", "auto")) == "auto" and not self.one_host:
            fitted["transport"] = "gloo"  # several hosts
        if str(fitted.get("threads", "auto")) == "auto":
            fitted["threads"] = max(1, cores() // self.local_size)
        return fitted


def _servers(options: Mapping[str, Any]) -> int:
    """How many ranks are no workers: as many as were asked for, one by default where the strategy
    has servers.
    """
    config = Config.make(options)
    if config.servers is not None:
        return config.servers
    for plugin in config.plugin:
        load_plugin(plugin)
    strategy = (
        strategies.build(config.strategy) if isinstance(config.strategy, Spec) else config.strategy
    )
    return int(getattr(strategy, "serves", None) == "ranks")


def find(environment: Mapping[str, str] = os.environ) -> Seat | None:
    """The seat that the environment tells of; None when no launcher has started this process."""
    for look in (_torchrun, _mpirun, _srun):
        try:
            seat = look(environment)
        except (KeyError, ValueError) as error:
            name = look.__name__.removeprefix("_")
            raise BadRequest(
                f"this seems to run inside {name}, but its variables are incomplete: {error}"
            ) from None
        if seat is not None:
            return seat
    return None


def _torchrun(env: Mapping[str, str]) -> Seat | None:
    """Also anything else that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."""
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= env.keys():
        return None
    size = int(env["WORLD_SIZE"])
    return Seat(
        _whose_torchrun(env),
        int(env["RANK"]),
        size,
        int(env.get("LOCAL_RANK", env["RANK"])),
        int(env.get("LOCAL_WORLD_SIZE", size)),
        env["MASTER_ADDR"],
        int(env["MASTER_PORT"]),
        env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        _agent(env.get("TORCHELASTIC_ERROR_FILE", "")),
        int(env.get("TORCHELASTIC_RESTART_COUNT", 0)),
        "LOCAL_WORLD_SIZE" in env or env["MASTER_ADDR"] in LOOPBACK,
        secret_of(env),
    )


def _agent(error_file: str) -> str:
    """torchrun's own process on this host, by the folder that it has made for itself:
    FOLDER/attempt_0/0/error.json.

    Its name for the run will not do (`none`, unless one is given), nor its count of restarts: every
    host has its own, and a host that comes or goes is not counted.
    """
    above = Path(error_file).parents
    return str(above[2]) if len(above) > 3 else ""


def _whose_torchrun(env: Mapping[str, str]) -> str:
    if "PYSPARK_TORCH_DISTRIBUTOR_RDZV_ID" in env:
        return "spark"
    return "torchrun" if "TORCHELASTIC_RUN_ID" in env else "a launcher"


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
                local_is_told=prefix + local_size in env,
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
        local_is_told="SLURM_STEP_TASKS_PER_NODE" in env,
        secret=secret_of(env),
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
