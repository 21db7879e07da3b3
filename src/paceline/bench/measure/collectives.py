"""`paceline bench collectives`: every collective on every transport, interleaved, against gloo's
own all-reduce.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from paceline.launch.failures import root_cause
from paceline.launch.forks import on_forked_ranks
from paceline.launch.mpi import on_mpi_ranks
from paceline.registry import collectives, transports
from paceline.transport.base import Rendezvous, Transport
from paceline.transport.mpi.transport import buffer_of
from paceline.transport.mpi.transport import load as load_mpi

MPI, OPEN_MPI = "mpi", "open-mpi"  # ours, and the library called directly
BASELINE = ("gloo", "native")
PEER = (OPEN_MPI, "MPI_Allreduce")
COPY = ("copy", "")
ANSWER_S = 600.0


def contenders() -> list[tuple[str, str]]:
    """(transport, collective): everything that processes on this machine can do."""
    lines: list[Any] = [t.make for t in transports]
    names = [t.name for t in lines if t.runs_as == "processes" and t.available()]
    found = [(name, collective) for name in names for collective in collectives.names()]
    if MPI in names:
        found.append(PEER)
    return [BASELINE, *(pair for pair in found if pair != BASELINE)]


def repetitions(size_bytes: int) -> int:
    return max(2, min(40, int(1e8 / max(1, size_bytes))))


def bench_collectives(
    workers: list[int],
    sizes_bytes: list[int],
    rounds: int,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Median seconds of one all-reduce, per number of workers and size; each round runs every
    contender once.
    """
    rows = []
    for count in workers:
        say(f"{count} workers ...")
        times = _measure(count, sizes_bytes, rounds)
        for size in sizes_bytes:
            baseline = times[(*BASELINE, size)]
            for transport, collective in contenders():
                own = times[(transport, collective, size)]
                rows.append(
                    {
                        "workers": count,
                        "bytes": size,
                        "transport": transport,
                        "collective": collective,
                        "median_s": statistics.median(own),
                        "min_s": min(own),
                        "max_s": max(own),
                        "times_gloo": _ratio(baseline, own),
                        "times_open_mpi": _ratio(times.get((*PEER, size)), own),
                        "memory_limit_share": _limit_s(count, size, times) / statistics.median(own),
                    }
                )
    return {"rounds": rounds, "rows": rows}


def _ratio(theirs: list[float] | None, ours: list[float]) -> float | None:
    """How many times as fast, by rounds: the median."""
    return (
        None
        if theirs is None
        else statistics.median(t / o for o, t in zip(ours, theirs, strict=True))
    )


def _limit_s(
    workers: int, size: int, times: dict[tuple[str, ...] | tuple[str, str, int], list[float]]
) -> float:
    """The time in which a plain copy moves what every rank must at least send: 2 (P-1)/P of the
    buffer.
    """
    return statistics.median(times[(*COPY, size)]) * 2 * (workers - 1) / workers


def _measure(workers: int, sizes: list[int], rounds: int) -> dict[Any, list[float]]:
    """Rank 0's times, from processes that all stay up for the whole measurement: under mpirun where
    there is one.
    """
    start = (
        on_mpi_ranks
        if MPI in transports.names() and transports.entry(MPI).declared.available()
        else on_forked_ranks
    )
    results, failures = start(
        partial(_rank, sizes, rounds, contenders()), workers, deadline_s=ANSWER_S
    )
    if failures:
        raise root_cause(failures, workers)
    return dict(results[0])


def _rank(
    sizes: list[int], rounds: int, pairs: list[tuple[str, str]], rendezvous: Rendezvous, say: Any
) -> Any:
    torch.set_num_threads(1)
    lines: dict[str, Transport] = {}
    bound: dict[tuple[str, str], Callable[[torch.Tensor], None]] = {}
    for name, collective in pairs:
        if name == OPEN_MPI:
            bound[(name, collective)] = _open_mpi()
            continue
        if name not in lines:
            lines[name] = transports.entry(name).declared.connect(rendezvous)
        bound[(name, collective)] = collectives.build(collective, transport=lines[name]).all_reduce
    times: dict[Any, list[float]] = {}
    for size in sizes:
        buffers = {
            name: line.allocate(size // 4, torch.float32, torch.device("cpu"))
            for name, line in lines.items()
        }
        buffers[OPEN_MPI] = torch.zeros(size // 4)
        target = torch.zeros(size // 4)
        for number in range(rounds + 1):  # the first round warms up
            each: dict[Any, list[float]] = {key: [] for key in (*bound, COPY)}
            for _ in range(
                repetitions(size) if number else 2
            ):  # in turns, so that nobody has the caches for itself
                for key, reduce in bound.items():
                    line = lines[MPI if key[0] == OPEN_MPI else key[0]]
                    each[key].append(_timed(line, reduce, buffers[key[0]]))
                began = time.perf_counter()
                target.copy_(buffers["gloo"])
                each[COPY].append(time.perf_counter() - began)
            for key, seconds in each.items():
                if number:
                    times.setdefault((*key, size), []).append(statistics.median(seconds))
            lines["gloo"].barrier()
    return times if rendezvous.rank == 0 else None


def _open_mpi() -> Callable[[torch.Tensor], None]:
    """The peer: MPI_Allreduce in place, with nothing around it."""
    mpi = load_mpi()

    def reduce(tensor: torch.Tensor) -> None:
        mpi.COMM_WORLD.Allreduce(mpi.IN_PLACE, [buffer_of(mpi, tensor), tensor.numel(), mpi.FLOAT])

    return reduce


def _timed(line: Transport, reduce: Callable[[torch.Tensor], None], buffer: torch.Tensor) -> float:
    line.barrier()
    began = time.perf_counter()
    reduce(buffer)
    return time.perf_counter() - began
