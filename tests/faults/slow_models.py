"""A model and data that are slow on one rank, once; for slow_table.py.

From the environment: SLOW_S (seconds), SLOW_RANK, SLOW_WHERE (forward, evaluation, loader, state,
constructor), SLOW_MARK (a file that says which rank slept, and when).
"""

import json
import multiprocessing
import os
import time
from pathlib import Path

import torch
from torch import Tensor, nn

SECONDS, WHERE = float(os.environ.get("SLOW_S", "45")), os.environ.get("SLOW_WHERE", "forward")
RANK, MARK = int(os.environ.get("SLOW_RANK", "1")), os.environ.get("SLOW_MARK", "")


def own_rank() -> int:
    """The rank of this process; -1: it is the launcher."""
    under_mpi = os.environ.get("OMPI_COMM_WORLD_RANK")
    if under_mpi is not None:
        return int(under_mpi)
    name = multiprocessing.current_process().name
    return int(name.partition("-")[2]) if name.startswith("worker-") else -1


def sleep_once(where: str) -> None:
    """Sleep if this is the rank and the place, for the first time."""
    if where != WHERE or own_rank() != RANK or not MARK or Path(MARK).exists():
        return
    began = time.time()
    Path(MARK).write_text(json.dumps({"rank": RANK, "began": began, "ended": None}))
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        time.sleep(0.5)
    Path(MARK).write_text(json.dumps({"rank": RANK, "began": began, "ended": time.time()}))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
        self.trained = self.evaluated = 0
        sleep_once("constructor")

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.trained += 1
            if self.trained == 8:
                sleep_once("forward")
        else:
            self.evaluated += 1
            if self.evaluated == 3:
                sleep_once("evaluation")
        out: Tensor = self.inner(x)
        return out

    def state_dict(self, *args: object, **kwargs: object) -> dict[str, Tensor]:
        if self.trained > 3:
            sleep_once("state")
        return super().state_dict(*args, **kwargs)


class Samples(torch.utils.data.Dataset):
    def __init__(self, count: int) -> None:
        draw = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(count, 1, 8, 8, generator=draw)
        self.labels = torch.randint(0, 10, (count,), generator=draw)
        self.read = 0

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.read += 1
        if self.read == 200:
            sleep_once("loader")
        return self.inputs[index], int(self.labels[index])


def data() -> tuple[Samples, Samples]:
    return Samples(2000), Samples(300)
