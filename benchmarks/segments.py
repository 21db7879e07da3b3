"""How long should the segments be in which a chunk is received and added? Ring all-reduce, every
transport, interleaved.

    .venv/bin/python benchmarks/segments.py [ranks]

What it showed is the executor's SEGMENT_BYTES: below 1 MB the messages cost more than the overlap
gains; at 4 MB the overlap of adding and receiving pays on gloo and shm for buffers of 100 MB, and
nothing is lost for smaller ones.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import torch

from paceline.cli.show import machine_line
from paceline.collectives.algorithms.ring import ring
from paceline.collectives.execute import Executor
from paceline.launch.forks import on_forked_ranks
from paceline.launch.mpi import on_mpi_ranks
from paceline.record.machine import environment
from paceline.registry import transports
from paceline.transport.base import Rendezvous
from paceline.transport.mpi.transport import MpiTransport

SEGMENTS_KB = (0, 128, 512, 1024, 4096, 16384)
SIZES_MB = {1: 100, 10: 30, 100: 6}  # and how often


def rank(
    names: tuple[str, ...], rendezvous: Rendezvous, say: Any
) -> list[tuple[str, int, dict[int, float]]]:
    torch.set_num_threads(1)
    found = []
    for name in names:
        line = transports.entry(name).declared.connect(rendezvous)
        for size_mb, repeat in SIZES_MB.items():
            buffer = line.allocate(size_mb << 18, torch.float32, torch.device("cpu"))
            executors = {kb: Executor(ring(rendezvous.size), line, kb << 10) for kb in SEGMENTS_KB}
            times: dict[int, list[float]] = {kb: [] for kb in SEGMENTS_KB}
            for number in range(repeat + 1):
                for kb, executor in executors.items():
                    line.barrier()
                    began = time.perf_counter()
                    executor.run(buffer)
                    if number:
                        times[kb].append(time.perf_counter() - began)
            found.append(
                (name, size_mb, {kb: 1e3 * statistics.median(t) for kb, t in times.items()})
            )
    return found


def main() -> None:
    from functools import partial

    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    names = ("gloo", "shm", "mpi") if MpiTransport.available() else ("gloo", "shm")
    start = on_mpi_ranks if "mpi" in names else on_forked_ranks
    results, failures = start(partial(rank, names), ranks)
    if failures:
        sys.exit(str(failures))
    print(f"ring all-reduce, {ranks} ranks: median ms by segment in KB (0: uncut)")
    for name, size_mb, times in results[0]:
        print(
            f"{name:5} {size_mb:4} MB  " + "  ".join(f"{kb}: {ms:.2f}" for kb, ms in times.items())
        )
    print(machine_line(environment()))


if __name__ == "__main__":
    main()
