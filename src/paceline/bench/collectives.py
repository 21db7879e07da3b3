"""`paceline bench collectives`: every collective on every transport, interleaved, against gloo's own all-reduce."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from paceline.collectives.base import Collective
from paceline.errors import PacelineError, RunFailed
from paceline.launch.local import HOST, die_with_parent
from paceline.registry import collectives, transports
from paceline.transport.base import Rendezvous, Transport

BASELINE = ("gloo", "native")
ANSWER_S = 600


def contenders() -> list[tuple[str, str]]:
    """(transport, collective): everything that processes on this machine can do."""
    lines: list[Any] = [t.make for t in transports]
    names = [t.name for t in lines if t.runs_as == "processes" and t.available()]
    found = [(name, collective) for name in names for collective in collectives.names()]
    return [BASELINE, *(pair for pair in found if pair != BASELINE)]


def repetitions(size_bytes: int) -> int:
    return max(2, min(40, int(1e8 / max(1, size_bytes))))


def bench_collectives(
    workers: list[int], sizes_bytes: list[int], rounds: int, say: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Median seconds of one all-reduce, per number of workers and size; each round runs every contender once."""
    rows = []
    for count in workers:
        say(f"{count} workers ...")
        times = _measure(count, sizes_bytes, rounds)
        for size in sizes_bytes:
            baseline = times[(*BASELINE, size)]
            for transport, collective in contenders():
                own = times[(transport, collective, size)]
                ratios = [theirs / ours for ours, theirs in zip(own, baseline, strict=True)]
                rows.append(
                    {
                        "workers": count,
                        "bytes": size,
                        "transport": transport,
                        "collective": collective,
                        "median_s": statistics.median(own),
                        "min_s": min(own),
                        "max_s": max(own),
                        "times_gloo": statistics.median(ratios),
                        "memory_limit_share": _limit_s(count, size, times) / statistics.median(own),
                    }
                )
    return {"rounds": rounds, "rows": rows}


def _limit_s(workers: int, size: int, times: dict[tuple[str, ...] | tuple[str, str, int], list[float]]) -> float:
    """The time in which a plain copy moves what every rank must at least send: 2 (P-1)/P of the buffer."""
    return statistics.median(times[("copy", "", size)]) * 2 * (workers - 1) / workers


def _measure(workers: int, sizes: list[int], rounds: int) -> dict[Any, list[float]]:
    """Rank 0's times, from processes that all stay up for the whole measurement."""
    context = get_context("fork")
    pipes: list[Connection] = []
    processes = []
    store = None
    try:
        for rank in range(workers):
            ours, theirs = context.Pipe()
            process = context.Process(target=_rank, args=(rank, workers, sizes, rounds, theirs, os.getpid()), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        store = dist.TCPStore(HOST, 0, None, True, timedelta(seconds=60), wait_for_workers=False)
        for pipe in pipes:
            pipe.send(store.port)
        if not pipes[0].poll(ANSWER_S):
            raise RunFailed(f"the benchmark gave no result within {ANSWER_S} s")
        try:
            answer = pipes[0].recv()
        except EOFError:
            raise RunFailed("a benchmark process died") from None
        if isinstance(answer, str):
            raise RunFailed(f"the benchmark failed: {answer}")
        return dict(answer)
    finally:
        for process in processes:
            process.terminate()
            process.join(5)
        for pipe in pipes:
            pipe.close()
        del store


def _rank(rank: int, workers: int, sizes: list[int], rounds: int, pipe: Connection, parent: int) -> None:
    die_with_parent(parent)
    torch.set_num_threads(1)
    try:
        port = pipe.recv()
        lines: dict[str, Transport] = {}
        bound: dict[tuple[str, str], Collective] = {}
        for name, collective in contenders():
            if name not in lines:
                lines[name] = transports.entry(name).make.connect(Rendezvous(rank, workers, HOST, port, 60.0))  # type: ignore[attr-defined]
            bound[(name, collective)] = collectives.build(collective, transport=lines[name])
        times: dict[Any, list[float]] = {}
        for size in sizes:
            buffers = {name: line.allocate(size // 4, torch.float32, torch.device("cpu")) for name, line in lines.items()}
            target = torch.zeros(size // 4)
            for number in range(rounds + 1):  # the first round warms up
                for key, one in bound.items():
                    seconds = _timed(lines[key[0]], one, buffers[key[0]], repetitions(size))
                    if number:
                        times.setdefault((*key, size), []).append(seconds)
                began = time.perf_counter()
                target.copy_(buffers["gloo"])
                if number:
                    times.setdefault(("copy", "", size), []).append(time.perf_counter() - began)
                lines["gloo"].barrier()
        if rank == 0:
            pipe.send(times)
        lines["gloo"].barrier()
    except PacelineError as error:
        pipe.send(str(error))
    finally:
        os._exit(0)


def _timed(line: Transport, collective: Collective, buffer: torch.Tensor, repeat: int) -> float:
    each = []
    for _ in range(repeat):
        line.barrier()
        began = time.perf_counter()
        collective.all_reduce(buffer)
        each.append(time.perf_counter() - began)
    return statistics.median(each)
