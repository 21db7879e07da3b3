"""What `paceline doctor --cluster` looked for where no launcher has started the process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

SAME = "paceline doctor --cluster"


@dataclass(frozen=True)
class Looked:
    """One launcher that was looked for: the variables that tell, and what to type."""

    launcher: str
    found: str
    start: str


VARIABLES = {
    "torchrun": ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    "mpirun": ("OMPI_COMM_WORLD_RANK", "PMI_RANK"),
    "srun": ("SLURM_PROCID", "SLURM_STEP_ID"),
}
START = {
    "torchrun": f"torchrun --nproc-per-node 2 --no-python {SAME}",
    "mpirun": f"mpirun -n 2 {SAME}",
    "srun": f"srun {SAME}",
}


def looked_for(env: Mapping[str, str] = os.environ) -> list[Looked]:
    """Return what was looked for, and where something else says how this process was started."""
    looked = []
    for launcher, names in VARIABLES.items():
        there = [name for name in names if name in env]
        missing = [name for name in names if name not in env]
        found = f"{', '.join(missing)} not set"
        if there:
            found = f"{', '.join(there)} set, {found}"
        if launcher == "torchrun" and "PET_NNODES" in env:
            found += "; PET_NNODES is set, which torchrun reads (Kubeflow)"
        elif launcher == "torchrun" and "JOB_COMPLETION_INDEX" in env:
            found += "; this is a pod of an indexed Job, whose command must be torchrun"
        if launcher == "srun" and "SLURM_JOB_ID" in env:
            found += f"; this is the script or a shell of job {env['SLURM_JOB_ID']}, not a task"
        looked.append(Looked(launcher, found, START[launcher]))
    return looked


def claimed_rank(env: Mapping[str, str] = os.environ) -> int | None:
    """Return the rank that a launcher's variables claim, however incomplete they are."""
    for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"):
        if env.get(name, "").isdecimal():
            return int(env[name])
    return None
