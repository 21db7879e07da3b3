"""Peer: PyTorch as it is usually written. Uses nothing of Paceline; run as a script, prints samples
per second as JSON.

`--processes 1` is the usual loop: a DataLoader over a TensorDataset, eager mode, default memory
format. `--processes 2` is the same under DistributedDataParallel over gloo. `--data-path index
--memory-format channels_last` take away two differences, for a comparison of the rest.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import os
import pathlib
import socket
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def read(folder: str, name: str, header: int) -> Any:
    path = pathlib.Path(folder) / name
    raw = (
        path.read_bytes()
        if path.exists()
        else gzip.decompress(path.with_name(name + ".gz").read_bytes())
    )
    return np.frombuffer(raw, dtype=np.uint8, offset=header)


def load(folder: str) -> tuple[Tensor, Tensor]:
    images = read(folder, "train-images-idx3-ubyte", 16).reshape(-1, 1, 28, 28)
    labels = read(folder, "train-labels-idx1-ubyte", 8)
    x = torch.from_numpy(images.astype(np.float32) / 255)
    return (x - 0.1307) / 0.3081, torch.from_numpy(labels.astype(np.int64))


def make_model(hidden: str) -> nn.Module:
    if hidden:
        sizes = [784, *map(int, hidden.split("x"))]
        layers = [
            part for a, b in itertools.pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())
        ]
        return nn.Sequential(nn.Flatten(), *layers, nn.Linear(sizes[-1], 10))
    return nn.Sequential(
        nn.Conv2d(1, 16, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(16, 32, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Dropout(0.25),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def batches(
    x: Tensor, y: Tensor, size: int, how: str, sampler: Any
) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless."""
    epoch = 0
    while True:
        if sampler is not None:
            sampler.set_epoch(epoch)
        if how == "loader":
            yield from DataLoader(
                TensorDataset(x, y), batch_size=size, shuffle=sampler is None, sampler=sampler
            )
        else:
            order = torch.randperm(len(x)) if sampler is None else torch.tensor(list(sampler))
            for start in range(0, len(order), size):
                part = order[start : start + size]
                yield x.index_select(0, part), y.index_select(0, part)
        epoch += 1


def samples_per_s(rank: int, args: argparse.Namespace) -> float:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x, y = load(args.folder)
    channels_last = args.memory_format == "channels_last"
    model = make_model(args.hidden)
    if channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    sampler: Any = None
    if args.processes > 1:
        model = DistributedDataParallel(model)
        sampler = DistributedSampler(TensorDataset(x, y), args.processes, rank)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    start, samples = 0.0, 0
    for number, (inputs, targets) in enumerate(
        batches(x, y, args.batch_size, args.data_path, sampler)
    ):
        if number == args.warm_up:
            start, samples = time.perf_counter(), 0
        formatted = (
            inputs.contiguous(memory_format=torch.channels_last) if channels_last else inputs
        )
        optimizer.zero_grad()
        loss = criterion(model(formatted), targets)
        loss.backward()
        optimizer.step()
        loss.item()
        samples += len(inputs)
        if number + 1 == args.warm_up + args.steps:
            break
    return samples / (time.perf_counter() - start)


def worker(rank: int, port: int, args: argparse.Namespace, results: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", rank=rank, world_size=args.processes)
    results.put(samples_per_s(rank, args))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", required=True)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--warm-up", type=int, default=20)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--data-path", choices=["loader", "index"], default="loader")
    parser.add_argument(
        "--memory-format", choices=["contiguous", "channels_last"], default="contiguous"
    )
    parser.add_argument("--hidden", default="", help="a fully connected network instead: 512x256")
    args = parser.parse_args()
    if args.processes == 1:
        rate = samples_per_s(0, args)
    else:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        context = mp.get_context("spawn")
        results = context.Queue()
        processes = [
            context.Process(target=worker, args=(r, port, args, results))
            for r in range(args.processes)
        ]
        for process in processes:
            process.start()
        rate = sum(results.get(timeout=240) for _ in processes)
        for process in processes:
            process.join()
    print(json.dumps({"samples_per_s": rate}))


if __name__ == "__main__":
    main()
