"""Makes the golden run folders; run it with an old checkout's Paceline, never with this one's.

PYTHONPATH=OLD/src python tests/golden/make.py tests/golden/0.1.0
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import paceline

RUNS = {
    "allreduce": {"strategy": "allreduce"},
    "gossip-int8": {"strategy": "gossip", "codec": "int8"},
    "local-sgd-topk": {"strategy": "local-sgd:every=4", "codec": "topk:ratio=0.1"},
    "diloco": {"strategy": "diloco:every=4"},
    "ps": {"strategy": "ps", "servers": 2},
}
STOP, END = 6, 14


def pairs(samples: int, seed: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 3, (samples,), generator=random)
    return torch.randn(samples, 6, generator=random) + labels[:, None], labels


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 3))


def options(name: str) -> dict[str, object]:
    return {
        "model": net,
        "data": (pairs(60, 0), pairs(20, 1)),
        "batch_size": 8,
        "workers": 2,
        "lr": 0.05,
        "momentum": 0.9,
        "transport": "inproc",
        "memory_format": "contiguous",
        **RUNS[name],
    }


def main(folder: Path) -> None:
    for name in RUNS:
        out = folder / name
        shutil.rmtree(out, ignore_errors=True)
        paceline.train(**options(name), steps=STOP, checkpoint_every=STOP, out=str(out))
        aside = folder / "whole"
        paceline.train(**options(name), steps=END, out=str(aside))
        shutil.copy(aside / "model.safetensors", out / "whole.safetensors")
        shutil.rmtree(aside)
        for extra in ("trace.json", "model.safetensors"):
            (out / extra).unlink(missing_ok=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
