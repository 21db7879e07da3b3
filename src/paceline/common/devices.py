"""Which device a rank computes on, found out without initialising CUDA before a fork.

A process that has initialised CUDA (or only asked CUDA's runtime for the number of devices) cannot
fork ranks that use it. So the process that starts the ranks looks at devices through a child
process, and each rank takes its own device when it begins.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from functools import cache

import torch

from paceline.errors import BadRequest

LOOK_S = 120.0  # a machine with many GPUs may take long to initialise them for the first time
LOOK = """
import json, sys, torch
error = None
try:
    torch.zeros(1, device=sys.argv[1]).tolist()
except Exception as raised:
    error = (str(raised).splitlines() or [type(raised).__name__])[0]
names = [] if error else [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
print(json.dumps({"error": error, "names": names}))
"""


@dataclass(frozen=True)
class Look:
    """What a child process found out about a device."""

    error: str | None  # why the device cannot be used; None: it can
    names: tuple[str, ...] = ()  # of all CUDA devices


def look_at(device: torch.device) -> Look:
    """Find out whether a device works, without initialising CUDA in this process."""
    if device.type == "cuda" and not torch.backends.cuda.is_built():
        return Look("this PyTorch is built without CUDA")
    if device.type == "mps" and not torch.backends.mps.is_built():
        return Look("this PyTorch is built without MPS")
    if device.type == "mps" or (device.type == "cuda" and not torch.cuda.is_initialized()):
        return _look_in_child(str(device))
    try:
        torch.zeros(1, device=device).tolist()
    except Exception as error:  # each kind of device has errors of its own
        return Look((str(error).splitlines() or [type(error).__name__])[0])
    count = torch.cuda.device_count() if device.type == "cuda" else 0
    return Look(None, tuple(torch.cuda.get_device_name(index) for index in range(count)))


@cache
def _look_in_child(name: str) -> Look:
    try:
        answer = subprocess.run(
            [sys.executable, "-c", LOOK, name],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=LOOK_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Look(f"a process that tries it out does not answer: {error}")
    try:
        found = json.loads(answer.stdout.splitlines()[-1])
        return Look(found["error"], tuple(found["names"]))
    except (ValueError, LookupError):
        last = (answer.stderr.strip().splitlines() or [f"exit code {answer.returncode}"])[-1]
        return Look(f"a process that tried it out failed: {last}")


def cuda_names() -> tuple[str, ...]:
    """Return the names of the CUDA devices; none where CUDA does not work."""
    return look_at(torch.device("cuda")).names


def take_device(name: str, local_rank: int) -> torch.device:
    """Return the device of this rank, and make it this process's (or thread's) current one.

    `cuda` is the device with the number `local_rank` (among the ranks of this host), modulo the
    number of devices; `cuda:1` is `cuda:1` on every rank. A rank calls it before it connects,
    because NCCL uses the current device.
    """
    device = torch.device(name)
    if device.type != "cuda":
        return device
    if ":" not in name:
        count = torch.cuda.device_count()
        if not count:
            raise BadRequest(
                f"device={name}: the rank with number {local_rank} on its host sees no CUDA device;"
                " use --device cpu, or let the launcher assign one"
            )
        device = torch.device("cuda", local_rank % count)
    torch.cuda.set_device(device)
    return device
