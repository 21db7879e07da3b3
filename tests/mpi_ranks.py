"""What ranks do under mpirun in test_mpi.py. They import this file, and so need no pytest."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.collectives.operations import Operations
from paceline.errors import TransportError
from paceline.registry import collectives
from paceline.transport.base import Rendezvous, Transport
from paceline.transport.c10d.store import connect_store
from paceline.transport.mpi.transport import MpiTransport
from tests.torch_calls import like_gloo

INPUTS = torch.randn(3, 300_001, generator=torch.Generator().manual_seed(0))


def everything(rendezvous: Rendezvous, say: object) -> dict[str, object]:
    """What the other transports are tested for one by one, in one mpirun (each takes seconds to
    start).
    """
    transport: Transport = MpiTransport.connect(rendezvous)
    me, size = transport.rank, transport.size
    found: dict[str, object] = {}
    for name in collectives.names():
        collective = collectives.build(name, transport=transport)
        for length in (0, 1, 2, 1000, 300_001):
            buffer = INPUTS[me, :length].clone()
            collective.all_reduce(buffer)
            reference = INPUTS[:size, :length].double().sum(0)
            if length and not torch.allclose(buffer.double(), reference, rtol=1e-5, atol=1e-5):
                found[f"wrong: {name} {length}"] = float((buffer - reference).abs().max())
    for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8):
        for name in ("native", "ring"):
            buffer = torch.full((10,), me + 1).to(dtype)
            collectives.build(name, transport=transport).all_reduce(buffer)
            if buffer.tolist() != [6] * 10:
                found[f"wrong: {name} {dtype}"] = buffer.tolist()
    other = [(me + 1) % size, (me - 1) % size]
    out = [torch.full((n,), float(me)) for n in (3, 700_000, 5)]
    into = [torch.empty_like(t) for t in out]
    works = [transport.isend(t, other[0]) for t in out] + [
        transport.irecv(t, other[1]) for t in into
    ]
    for work in works:
        work.wait()
    found["messages"] = [t.unique().tolist() == [float(other[1])] for t in into]
    group = transport.group([2, 0] if me != 1 else [1])
    value = torch.tensor([float(me + 1)])
    group.all_reduce(value)
    found["group"] = (group.rank, group.size, float(value))
    found["broadcast"] = Operations(transport).broadcast(torch.full((4,), float(me)), 1).tolist()
    native = torch.full((4,), float(me))
    transport.broadcast(native, 2)
    found["native broadcast"] = native.tolist()
    for name in ("native", "ring"):
        try:
            tensor = torch.zeros(50 if me == 1 else 10)
            collectives.build(name, transport=transport).all_reduce(tensor)
        except TransportError as error:
            found[f"different lengths, {name}"] = str(error)
    try:
        collectives.build("native", transport=transport).all_reduce(torch.zeros(3, device="meta"))
    except TransportError as error:
        found["wrong device"] = str(error)
    transport.barrier()
    transport.patience.deadline_s, told = 0.5, []
    transport.patience.say = told.append
    if me == 0:
        transport.recv(torch.zeros(4), 1)
        found["told"] = told
    elif me == 1:
        time.sleep(1.5)
        transport.send(torch.ones(4), 0)
    return found


def with_torch_distributed(backend: str, rendezvous: Rendezvous, say: object) -> dict[str, object]:
    """Plain torch.distributed calls, and DDP with several buckets."""
    torch.set_num_threads(1)
    if backend == "paceline-mpi":
        import paceline.transport.mpi.torch_backend  # noqa: F401
    os.environ["GLOO_SOCKET_IFNAME"] = (
        "lo"  # gloo looks up the host's name otherwise, which may take its time
    )
    store = dist.PrefixStore(backend, connect_store(rendezvous))
    me, size, wait = rendezvous.rank, rendezvous.size, timedelta(seconds=60)
    dist.init_process_group(backend, store=store, rank=me, world_size=size, timeout=wait)
    reduced, largest = torch.arange(5.0) + me, torch.tensor([float(me)])
    dist.all_reduce(reduced)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    parts = [torch.zeros(2) for _ in range(size)]
    dist.all_gather(parts, torch.full((2,), float(me)))
    objects: list[object] = [None] * size
    dist.all_gather_object(objects, {"rank": me})
    told = torch.full((3,), float(me))
    dist.broadcast(told, src=1)
    heard = torch.zeros(3)
    works = [dist.isend(told + me, (me + 1) % size), dist.irecv(heard, (me - 1) % size)]
    for work in works:
        assert work is not None
        work.wait()
    pair = dist.new_group([0, size - 1])
    one = torch.ones(1)
    if me in (0, size - 1):
        dist.all_reduce(one, group=pair)
    dist.barrier()

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 50), nn.ReLU(), nn.Linear(50, 3))
    model = DistributedDataParallel(net, bucket_cap_mb=0.002)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    random = torch.Generator().manual_seed(me)
    for _ in range(15):
        optimizer.zero_grad()
        inputs, targets = (
            torch.randn(8, 20, generator=random),
            torch.randint(0, 3, (8,), generator=random),
        )
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    weights = {k: v.clone() for k, v in net.state_dict().items()}
    dist.destroy_process_group()
    return {
        "calls": [
            reduced.tolist(),
            largest.tolist(),
            [p.tolist() for p in parts],
            objects,
            told.tolist(),
            heard.tolist(),
        ],
        "pair": float(one),
        "weights": weights,
    }


def with_both(rendezvous: Rendezvous, say: object) -> dict[str, object]:
    """One after the other, in the same processes."""
    return {
        backend: with_torch_distributed(backend, rendezvous, say)
        for backend in ("gloo", "paceline-mpi")
    }


OPERATIONS = ("SUM", "AVG", "MAX", "MIN", "PRODUCT", "BAND", "BOR", "BXOR", "PREMUL_SUM")
DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool),
)


def every_operation(rendezvous: Rendezvous, say: object) -> dict[tuple[str, str, str], object]:
    """What each rank gets of every collective that combines, by every operation, in every
    type of numbers.
    """
    import paceline.transport.mpi.torch_backend  # noqa: F401

    me, size = rendezvous.rank, rendezvous.size
    store = dist.PrefixStore("operations", connect_store(rendezvous))
    dist.init_process_group(
        "paceline-mpi", store=store, rank=me, world_size=size, timeout=timedelta(seconds=60)
    )
    found: dict[tuple[str, str, str], object] = {}

    def brought(dtype: torch.dtype) -> torch.Tensor:
        return operands(size, dtype)[me]

    def all_reduced(dtype: torch.dtype, op: object) -> object:
        numbers = brought(dtype)
        dist.all_reduce(numbers, op=op)
        return numbers.tolist()

    def reduced(dtype: torch.dtype, op: object) -> object:
        numbers = brought(dtype)
        dist.reduce(numbers, size - 1, op=op)
        return numbers.tolist() if me == size - 1 else None

    def scattered(dtype: torch.dtype, op: object) -> object:
        part = torch.zeros(1, dtype=dtype)
        dist.reduce_scatter(part, list(brought(dtype).split(1)), op=op)
        return part.tolist()

    def scattered_whole(dtype: torch.dtype, op: object) -> object:
        part = torch.zeros(1, dtype=dtype)
        work = dist.group.WORLD._reduce_scatter_base(part, brought(dtype), _options(op))
        work.wait()
        return part.tolist()

    for name in OPERATIONS:
        op = (
            dist._make_nccl_premul_sum(2.0)
            if name == "PREMUL_SUM"
            else getattr(dist.ReduceOp, name)
        )
        for dtype in DTYPES:
            for call in (all_reduced, reduced, scattered, scattered_whole):
                try:
                    found[call.__name__, name, str(dtype)] = call(dtype, op)
                except RuntimeError as error:
                    found[call.__name__, name, str(dtype)] = str(error)
    dist.destroy_process_group()
    return found


def _options(op: object) -> object:
    options = dist.ReduceScatterOptions()
    options.reduceOp = op
    return options


def operands(size: int, dtype: torch.dtype) -> torch.Tensor:
    """Row r is what rank r brings: one number for each rank."""
    numbers = torch.arange(1, size * size + 1).view(size, size) * 3
    return numbers % 4 > 1 if dtype is torch.bool else numbers.to(dtype)


def all_of_it(rendezvous: Rendezvous, say: object) -> dict[str, dict[Any, object]]:
    """All in the same processes: starting them takes the time."""
    return {
        "operations": every_operation(rendezvous, say),
        "like gloo": like_gloo(rendezvous, say),
        "promises": everything(rendezvous, say),
    }


def killed_while_idle(rendezvous: Rendezvous, say: object) -> None:
    if rendezvous.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
