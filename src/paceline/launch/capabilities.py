"""Try out which operation works on which transport and device, for `paceline list transports
--capabilities`.

native         the library behind the transport has the operation, and its result was right
ours           our schedule runs over the transport's messages, and its result was right
not possible   the transport does not reach that device, or the result was wrong
not tested     this machine lacks what the transport or the device needs
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from paceline.collectives.operations import Operations
from paceline.common.devices import cuda_names, take_device
from paceline.errors import PacelineError
from paceline.launch.forks import on_forked_ranks
from paceline.launch.mpi import on_mpi_ranks
from paceline.registry import transports
from paceline.transport.base import Rendezvous, Transport
from paceline.transport.inproc import Hub

RANKS = 2
DEVICES = ("cpu", "cuda")
NATIVE, OURS, IMPOSSIBLE, UNTESTED = "native", "ours", "not possible", "not tested"
# Runs an operation on a buffer (rank + 1, rank + 1) and returns whether the result was right.
Probe = Callable[[Transport, Tensor], bool]
UNDEFINED = -1  # an element whose value the operation does not define


def _messages(transport: Transport, buffer: Tensor) -> bool:
    other, got = 1 - transport.rank, torch.zeros_like(buffer)
    with transport.together():
        works = [transport.isend(buffer, other), transport.irecv(got, other)]
    for work in works:
        work.wait()
    return got.tolist() == [other + 1] * 2


def _barrier(transport: Transport, buffer: Tensor) -> bool:
    transport.barrier()
    return True


def _native_all_reduce(transport: Transport, buffer: Tensor) -> bool:
    transport.all_reduce(buffer)
    return buffer.tolist() == [3, 3]


def _native_broadcast(transport: Transport, buffer: Tensor) -> bool:
    transport.broadcast(buffer, root=1)
    return buffer.tolist() == [2, 2]


def _ours(name: str, at_rank_0: list[int], at_rank_1: list[int]) -> Probe:
    def probe(transport: Transport, buffer: Tensor) -> bool:
        getattr(Operations(transport), name)(buffer)
        wanted = (at_rank_0, at_rank_1)[transport.rank]
        pairs = zip(buffer.tolist(), wanted, strict=True)
        return all(right in (UNDEFINED, got) for got, right in pairs)

    return probe


def _ring(transport: Transport, buffer: Tensor) -> bool:
    Operations(transport).all_reduce(buffer, collective="ring")
    return buffer.tolist() == [3, 3]


NATIVE_PROBES: dict[str, Probe] = {"all_reduce": _native_all_reduce, "broadcast": _native_broadcast}
PROBES: dict[str, Probe] = {
    "send, receive": _messages,
    "barrier": _barrier,
    "all_reduce": _ring,
    "broadcast": _ours("broadcast", [1, 1], [1, 1]),
    "reduce": _ours("reduce", [3, 3], [UNDEFINED, UNDEFINED]),
    "reduce_scatter": _ours("reduce_scatter", [3, UNDEFINED], [UNDEFINED, 3]),
    "all_gather": _ours("all_gather", [1, 2], [1, 2]),
    "gather": _ours("gather", [1, 2], [UNDEFINED, UNDEFINED]),
    "scatter": _ours("scatter", [1, UNDEFINED], [UNDEFINED, 1]),
    "all_to_all": _ours("all_to_all", [1, 2], [1, 2]),
}


def capabilities() -> list[dict[str, str]]:
    """Return one row per operation, transport and device."""
    rows = []
    for entry in transports:
        kind: Any = entry.make
        for device in DEVICES:
            if device not in kind.traits.devices:
                found = dict.fromkeys(PROBES, IMPOSSIBLE)
            elif not kind.available() or (device == "cuda" and not cuda_names()):
                found = dict.fromkeys(PROBES, UNTESTED)
            else:
                found = _try_out(entry.name, kind, device)
            rows += [
                {"operation": o, "transport": entry.name, "device": device, "how": how}
                for o, how in found.items()
            ]
    return rows


def _try_out(name: str, kind: Any, device: str) -> dict[str, str]:
    if kind.traits.runs_as == "threads" and device == "cpu":
        answers: list[Any] = kind.hub(RANKS).run(partial(_all_probes, device=device))
    elif kind.traits.runs_as == "threads":  # in a child: this process must be able to fork ranks
        results, _ = on_forked_ranks(partial(_threads, name, device), 1)
        answers = results.get(0, [])
    else:
        start = on_mpi_ranks if kind.traits.started_by == "mpirun" else on_forked_ranks
        try:
            results, _ = start(partial(_rank, name, device), RANKS)
        except PacelineError:
            results = {}
        answers = [results.get(rank) for rank in range(RANKS)]
    if not answers or not all(isinstance(a, dict) for a in answers):
        return dict.fromkeys(PROBES, IMPOSSIBLE)
    return {o: answers[0][o] if len({a[o] for a in answers}) == 1 else IMPOSSIBLE for o in PROBES}


def _rank(name: str, device: str, rendezvous: Rendezvous, say: Any) -> dict[str, str]:
    torch.set_num_threads(1)
    taken = take_device(device, rendezvous.rank)
    return _all_probes(transports.entry(name).make.connect(rendezvous), str(taken))


def _threads(name: str, device: str, rendezvous: Rendezvous, say: Any) -> list[Any]:
    torch.set_num_threads(1)
    kind: Any = transports.entry(name).make
    hub: Hub = kind.hub(RANKS)
    return hub.run(partial(_all_probes, device=device))


def _all_probes(transport: Transport, device: str) -> dict[str, str]:
    found = {}
    for operation, probe in PROBES.items():
        library = NATIVE_PROBES.get(operation) if operation in transport.traits.native else None
        if operation in ("send, receive", "barrier"):
            found[operation] = (
                NATIVE if probe(transport, _buffer(transport, device)) else IMPOSSIBLE
            )
        elif library is not None and library(transport, _buffer(transport, device)):
            found[operation] = NATIVE
        else:
            found[operation] = OURS if probe(transport, _buffer(transport, device)) else IMPOSSIBLE
    return found


def _buffer(transport: Transport, device: str) -> Tensor:
    return torch.full((2,), float(transport.rank + 1), device=device)
