"""The seat (rank, size, host) of a process that a launcher (torchrun, mpirun, srun) has started.

A process with a seat starts no further ranks.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.common.parents import asked_to_end_with_parent
from paceline.errors import BadRequest
from paceline.launch.addresses import is_loopback
from paceline.launch.secret import BOARD, LAUNCHER, secret_of
from paceline.registry import Spec, load_plugin, strategies
from paceline.request.config import Config
from paceline.strategies.base import traits_of
from paceline.transport.choose import best_transport

RAY_WORKER = "RAY_RAYLET_PID"  # set in every worker process of Ray
RAY_RUN = "PACELINE_RAY"  # names the run of `--launcher ray` that a worker of Ray Train is part of


@dataclass(frozen=True)
class Seat:
    """What a launcher says about one of the ranks that it has started."""

    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int  # ranks on this host
    host: str = ""  # of the store where the ranks meet; empty: rank 0 broadcasts it by MPI
    port: int = 0
    store_exists: bool = False  # the launcher hosts the store; otherwise rank 0 does
    # The launcher's process on this host that starts failed ranks again; empty: there is none.
    agent: str = ""
    restarts: int = 0  # that the agent has counted
    # False: the launcher does not say how many ranks are on this host, and all are assumed to be.
    local_is_told: bool = True
    # Passed on by the launcher. Under mpirun it is empty here: rank 0 makes one and broadcasts it.
    secret: bytes = field(default=b"", repr=False)
    board: str = ""  # its address, where the launcher hosts it
    key: str = ""  # tells this launcher's ranks from those of others on the same hosts

    @property
    def one_host(self) -> bool:
        return self.local_size == self.size

    @property
    def meets_on_loopback(self) -> bool:
        """Whether all ranks are certainly on this host, so that they listen on loopback only."""
        return self.one_host and self.local_is_told

    def fit(
        self, options: Mapping[str, Any], saved: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the options with the launcher's number of workers and a transport for its hosts.

        `saved` are the options of a run that is resumed. Its numbers of workers and threads no
        longer count, nor its transport where the ranks are on several hosts.
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
                " leave workers out"
            )
        if workers < 1:
            raise BadRequest(
                f"{self.launcher} has started {self.size} process(es), of which {servers} would be"
                f" server(s) and none a worker: start {servers + 1} or more"
            )
        fitted["workers"] = workers
        asked = str(fitted.get("launcher") or "auto")
        if asked not in ("auto", self.launcher):
            raise BadRequest(
                f"launcher={asked}, but {self.launcher} has started this process: leave launcher"
                " out"
            )
        fitted["launcher"] = "auto" if self.launcher == "a launcher" else self.launcher
        if str(fitted.get("transport", "auto")) == "auto" and not self.one_host:
            device = str(fitted.get("device") or "cpu")
            fitted["transport"] = best_transport(device, several_hosts=True)
        return fitted


def _servers(options: Mapping[str, Any]) -> int:
    """Return how many ranks are servers: as asked for, else one if the strategy has servers."""
    config = Config.make(options)
    if config.servers is not None:
        return config.servers
    for plugin in config.plugin:
        load_plugin(plugin)
    strategy = config.strategy
    if isinstance(strategy, Spec):
        strategy = strategies.build(strategy)
    return int(traits_of(strategy).serves == "ranks")


def find(environment: Mapping[str, str] = os.environ) -> Seat | None:
    """Return this process's seat; None when no launcher has started it."""
    for look in (_torchrun, _mpirun, _srun):
        try:
            seat = look(environment)
        except BadRequest:  # of the secret: says itself what to do
            raise
        except (KeyError, ValueError) as error:
            name = look.__name__.removeprefix("_")
            raise BadRequest(
                f"this process seems to run inside {name}, but the variables that {name} sets are"
                f" incomplete or malformed: {error}"
            ) from None
        if seat is not None:
            return seat
    return None


def end_with_its_launcher(seat: Seat) -> None:
    """Ask this rank to leave (SIGTERM) when the launcher that started it is killed.

    torchrun and mpirun pass on the signals that they hear, but not their own SIGKILL. Slurm, and
    the launchers of Paceline, see to it themselves.
    """
    if seat.launcher in ("torchrun", "mpirun"):
        asked_to_end_with_parent()


def refuse_inside_a_launcher(seat: Seat | None) -> None:
    if seat is not None:
        raise BadRequest(f"this starts its own workers: run it once, not inside {seat.launcher}")


def _torchrun(env: Mapping[str, str]) -> Seat | None:
    """Read the seat from RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    `paceline launch` and other launchers set them as well.
    """
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= env.keys():
        return None
    size, launcher = int(env["WORLD_SIZE"]), _whose_torchrun(env)
    return Seat(
        launcher,
        int(env["RANK"]),
        size,
        int(env.get("LOCAL_RANK", env["RANK"])),
        int(env.get("LOCAL_WORLD_SIZE", size)),
        env["MASTER_ADDR"],
        int(env["MASTER_PORT"]),
        env.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or launcher == "ray",
        env.get(RAY_RUN) or _agent(env.get("TORCHELASTIC_ERROR_FILE", "")),
        int(env.get("TORCHELASTIC_RESTART_COUNT", 0)),
        "LOCAL_WORLD_SIZE" in env or is_loopback(env["MASTER_ADDR"]),
        secret_of(env),
        env.get(BOARD, ""),
        f"port-{env['MASTER_PORT']}",
    )


def _agent(error_file: str) -> str:
    """Identify torchrun's agent on this host by its folder, from FOLDER/attempt_0/0/error.json.

    torchrun's run id cannot serve, because it is `none` unless the user sets it. Its count of
    restarts cannot either, because each host counts its own, and a restart because a host joined
    or left is not counted.
    """
    above = Path(error_file).parents
    return str(above[2]) if len(above) > 3 else ""


def _whose_torchrun(env: Mapping[str, str]) -> str:
    if "PYSPARK_TORCH_DISTRIBUTOR_RDZV_ID" in env:
        return "spark"
    if "TORCHELASTIC_RUN_ID" in env:
        return "torchrun"
    if RAY_WORKER in env:
        return "ray"
    return "ssh" if env.get(LAUNCHER) == "ssh" else "a launcher"


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
    """Read the seat of a task in a job step. A batch script or a shell is not a task."""
    if not {"SLURM_PROCID", "SLURM_STEP_ID"} <= env.keys():
        return None
    size = int(env.get("SLURM_STEP_NUM_TASKS") or env["SLURM_NTASKS"])
    nodes = env.get("SLURM_STEP_NODELIST") or env["SLURM_JOB_NODELIST"]
    per_node = env.get("SLURM_STEP_TASKS_PER_NODE", str(size))  # "4(x2),3"
    job = f"{int(env['SLURM_JOB_ID'])}.{int(env['SLURM_STEP_ID'])}"
    return Seat(
        "srun",
        int(env["SLURM_PROCID"]),
        size,
        int(env.get("SLURM_LOCALID", 0)),
        tasks_on_node(per_node, int(env.get("SLURM_NODEID", 0))),
        first_host(nodes),
        local_is_told="SLURM_STEP_TASKS_PER_NODE" in env,
        secret=secret_of(env),
        key=f"slurm-{job}.{int(env.get('SLURM_RESTART_COUNT', 0))}",
    )


def first_host(nodes: str) -> str:
    """Return the first host of Slurm's list: node07 of `node[07-09,12],other`."""
    found = re.match(r"([^\[,]+)(?:\[([^\],-]+))?", nodes)
    if found is None:
        raise ValueError(f"no host in {nodes!r}")
    return found[1] + (found[2] or "")


def tasks_on_node(per_node: str, node: int) -> int:
    """Return a node's number of tasks. `4(x2),3`: 4 on each of the first two nodes, then 3."""
    counts: list[int] = []
    for part in per_node.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if found is None:
            raise ValueError(f"no tasks per node in {per_node!r}")
        counts += [int(found[1])] * int(found[2] or 1)
    return counts[min(node, len(counts) - 1)]
