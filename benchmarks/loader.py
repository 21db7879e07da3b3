"""Compare training from a DataLoader with processes: Paceline's loops and the stock loop.

    .venv/bin/python benchmarks/loader.py --rounds 9

Reading a sample sleeps 2 ms, so the loader's two processes limit the speed. Three loops train the
same small network with one worker: a stock PyTorch loop, your own loop with `paceline.join`, and
`paceline.train`. Every round runs all three in a random order, so that they see the same noise of
the machine. A ratio is the median over the rounds of samples per second against the stock loop.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import paceline
from paceline.record.machine import cores, cpu_name

BAR = 0.95


class Slow(Dataset[tuple[Tensor, int]]):
    """Samples that take a while to read, as decoded images do."""

    def __init__(self, samples: int, delay_s: float) -> None:
        self.samples, self.delay_s = samples, delay_s

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        time.sleep(self.delay_s)
        return torch.full((32,), float(i % 7)), i % 10


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))


def loader(asked: argparse.Namespace) -> DataLoader[Any]:
    data = Slow(asked.samples, asked.delay_ms / 1000)
    return DataLoader(data, asked.batch_size, shuffle=True, num_workers=asked.num_workers)


def stock(asked: argparse.Namespace) -> float:
    """Return the samples per second of a plain PyTorch loop."""
    model, batches = net(), loader(asked)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    began = time.perf_counter()
    for _ in range(asked.epochs):
        for x, y in batches:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return float(asked.epochs * asked.samples / (time.perf_counter() - began))


def own_loop(asked: argparse.Namespace) -> float:
    """Return the samples per second of the same loop with `paceline.join`."""
    pace, model = paceline.join("allreduce"), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer, batches = pace.prepare(model, optimizer, loader(asked))
    began = time.perf_counter()
    for _ in range(asked.epochs):
        for x, y in batches:
            pace.step(nn.functional.cross_entropy(model(x), y))
    seconds = time.perf_counter() - began
    pace.finish()
    return float(asked.epochs * asked.samples / seconds)


def train(asked: argparse.Namespace) -> float:
    """Return the samples per second of `paceline.train`, without its start and its end."""
    with tempfile.TemporaryDirectory() as folder:
        run = paceline.train(
            data=(loader(asked), None),
            model=net,
            strategy="allreduce",
            workers=1,
            optimizer="sgd",
            epochs=asked.epochs,
            threads=1,
            out=str(Path(folder) / "run"),
            progress=False,
        )
        return float(run.samples_per_s)


LOOPS = {"stock": stock, "join": own_loop, "train": train}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--samples", type=int, default=1024)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--delay-ms", type=float, default=2.0)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    speeds: dict[str, list[float]] = {name: [] for name in LOOPS}
    for number in range(asked.rounds):
        for name in random.Random(number).sample(sorted(LOOPS), len(LOOPS)):
            speeds[name].append(LOOPS[name](asked))
    ratios = {
        name: [ours / plain for ours, plain in zip(speeds[name], speeds["stock"], strict=True)]
        for name in ("join", "train")
    }
    if asked.json:
        print(json.dumps({"samples_per_s": speeds, "against_stock": ratios}))
        return
    print(f"{cpu_name()}, {cores()} cores; Python {platform.python_version()}", end="; ")
    print(f"PyTorch {torch.__version__}; {sys.platform}; {asked.rounds} rounds")
    print(
        f"{asked.samples} samples of {asked.delay_ms:g} ms, {asked.epochs} epochs,"
        f" batches of {asked.batch_size}, num_workers={asked.num_workers}, one worker"
    )
    for name, found in speeds.items():
        print(f"{name:6} {statistics.median(found):8.1f} samples/s", end="")
        if name in ratios:
            ratio = statistics.median(ratios[name])
            spread = f"({min(ratios[name]):.3f} to {max(ratios[name]):.3f})"
            verdict = "reached" if ratio >= BAR else "missed"
            print(f"  {ratio:.3f} of stock {spread}; the bar of {BAR} is {verdict}", end="")
        print()


if __name__ == "__main__":
    main()
