"""Time every collective on every transport, in turns, against gloo's own all-reduce."""

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
from paceline.transport.base import Rendezvous, Transport, Waits
from paceline.transport.mpi.transport import buffer_of
from paceline.transport.mpi.transport import load as load_mpi

MPI, OPEN_MPI = "mpi", "open-mpi"  # ours, and the library called directly
BASELINE = ("gloo", "native")
PEER = (OPEN_MPI, "MPI_Allreduce")
COPY = ("copy", "")
ANSWER_S = 600.0


def contenders() -> list[tuple[str, str]]:
    """List the pairs (transport, collective) that processes on this machine can use."""
    kinds: list[Any] = [t.make for t in transports]
    names = [kind.name for kind in kinds if kind.traits.runs_as == "processes" and kind.available()]
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
    """Measure the median seconds of one all-reduce, for each number of workers and each size."""
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
    """Return how many times as fast ours is: the median over the rounds."""
    return (
        None
        if theirs is None
        else statistics.median(t / o for o, t in zip(ours, theirs, strict=True))
    )


def _limit_s(
    workers: int, size: int, times: dict[tuple[str, ...] | tuple[str, str, int], list[float]]
) -> float:
    """Return the time in which a plain copy moves 2 (P-1)/P of the buffer, the least that every
    rank must send.
    """
    return statistics.median(times[(*COPY, size)]) * 2 * (workers - 1) / workers


def _measure(workers: int, sizes: list[int], rounds: int) -> dict[Any, list[float]]:
    """Return rank 0's times. The ranks run under mpirun where it is available, and stay up for the
    whole measurement.
    """
    start = (
        on_mpi_ranks
        if MPI in transports.names() and transports.entry(MPI).make.available()
        else on_forked_ranks
    )
    results, failures = start(
        partial(_rank, sizes, rounds, contenders()), workers, waits=Waits(ANSWER_S)
    )
    if failures:
        raise root_cause(failures, workers)
    return dict(results[0])


def _rank(
    sizes: list[int], rounds: int, pairs: list[tuple[str, str]], rendezvous: Rendezvous, say: Any
) -> Any:
    torch.set_num_threads(1)
    connected: dict[str, Transport] = {}
    bound: dict[tuple[str, str], Callable[[torch.Tensor], None]] = {}
    for name, collective in pairs:
        if name == OPEN_MPI:
            bound[(name, collective)] = _open_mpi()
            continue
        if name not in connected:
            connected[name] = transports.entry(name).make.connect(rendezvous)
        built = collectives.build(collective, transport=connected[name])
        bound[(name, collective)] = built.all_reduce
    times: dict[Any, list[float]] = {}
    for size in sizes:
        buffers = {
            name: transport.allocate(size // 4, torch.float32, torch.device("cpu"))
            for name, transport in connected.items()
        }
        buffers[OPEN_MPI] = torch.zeros(size // 4)
        target = torch.zeros(size // 4)
        for number in range(rounds + 1):  # the first round warms up
            each: dict[Any, list[float]] = {key: [] for key in (*bound, COPY)}
            for _ in range(repetitions(size) if number else 2):
                for key, reduce in bound.items():  # in turns, so that all share the caches alike
                    transport = connected[MPI if key[0] == OPEN_MPI else key[0]]
                    each[key].append(_timed(transport, reduce, buffers[key[0]]))
                began = time.perf_counter()
                target.copy_(buffers["gloo"])
                each[COPY].append(time.perf_counter() - began)
            for key, seconds in each.items():
                if number:
                    times.setdefault((*key, size), []).append(statistics.median(seconds))
            connected["gloo"].barrier()
    return times if rendezvous.rank == 0 else None


def _open_mpi() -> Callable[[torch.Tensor], None]:
    """Call MPI_Allreduce in place, with nothing around it: the peer."""
    mpi = load_mpi()

    def reduce(tensor: torch.Tensor) -> None:
        mpi.COMM_WORLD.Allreduce(mpi.IN_PLACE, [buffer_of(mpi, tensor), tensor.numel(), mpi.FLOAT])

    return reduce


def _timed(
    transport: Transport, reduce: Callable[[torch.Tensor], None], buffer: torch.Tensor
) -> float:
    transport.barrier()
    began = time.perf_counter()
    reduce(buffer)
    return time.perf_counter() - began
