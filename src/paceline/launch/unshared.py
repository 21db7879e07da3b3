"""A run's folder that the nodes of a Slurm job do not share, found out before ranks wait in vain.

Ranks on several nodes meet through a file in that folder. A rank that does not find the file asks
rank 0's node by a job step of its own, which needs no shared folder.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from paceline.errors import BadRequest
from paceline.launch.seat import Seat

FIRST_S = 4.0  # before the first question; most files appear sooner
STEP_S = 8.0  # for the job step that answers
LOOK_S = 0.5  # between two looks whether another rank has found out
NOT_SHARED = 3  # exit code of the step

# On rank 0's node: is its file there, and does this node see the mark of the rank that asks? A mark
# is a new name, which no cache of a network file system can hide.
LOOK = 'test -e "$1" || exit 2; test -e "$2" && exit 0; : > "$3"; exit 3'


class Unshared:
    """Looks again and again; raises when it is certain that a rank cannot see rank 0's file."""

    def __init__(self, seat: Seat, file: Path, env: Mapping[str, str] = os.environ) -> None:
        self._seat, self._file, self._env = seat, file.absolute(), env
        self._note = self._file.with_name(f"{file.name}.unseen")
        self._active = seat.launcher == "srun" and not seat.meets_on_loopback
        self._look_at = time.monotonic()
        # One rank per node asks; rank 0 wrote the file.
        asks = seat.rank > 0 and seat.local_rank == 0
        self._ask_at = time.monotonic() + FIRST_S if asks else float("inf")
        self._pause_s = FIRST_S

    def look(self) -> None:
        if not self._active or time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + LOOK_S
        if self._note.exists():  # another rank has found out, and says so
            if self._seat.rank == 0:
                self._note.unlink(missing_ok=True)
                self._file.unlink(missing_ok=True)
            refusal = self._refusal()
            refusal.told = True
            raise refusal
        if time.monotonic() < self._ask_at:
            return
        if self._asked() == NOT_SHARED:
            with suppress(OSError):
                self._note.touch()  # for the other ranks of this node
            raise self._refusal()
        self._pause_s *= 2
        self._ask_at = time.monotonic() + self._pause_s

    def _refusal(self) -> BadRequest:
        own, first = os.uname().nodename, self._seat.host
        nodes = f"{own} does not see what {first}" if own != first else f"not all see what {first}"
        return BadRequest(
            f"the nodes do not share {self._file.parent}: {nodes} has written there; choose a"
            " folder (--out) on a file system that all nodes mount"
        )

    def _asked(self) -> int | None:
        """Ask rank 0's node. None: there is no answer, or Slurm starts no such step."""
        mark = self._file.with_name(f"{self._file.name}.rank-{self._seat.rank}")
        # Variables of this step would be options of the new one.
        env = {k: v for k, v in self._env.items() if not k.startswith("SLURM_")}
        env |= {k: v for k, v in self._env.items() if k == "SLURM_CONF"}
        where = [f"--jobid={self._env.get('SLURM_JOB_ID', '')}", f"--nodelist={self._seat.host}"]
        few = ["--nodes=1", "--ntasks=1", "--overlap", "--mem=0", "--mpi=none", "--chdir=/"]
        look = ["sh", "-c", LOOK, "sh", str(self._file), str(mark), str(self._note)]
        try:
            mark.touch()
            done = subprocess.run(
                ["srun", *where, *few, *look],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=STEP_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        finally:
            with suppress(OSError):
                mark.unlink(missing_ok=True)
        return done.returncode
