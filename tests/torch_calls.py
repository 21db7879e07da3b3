"""What ranks do under mpirun in test_mpi.py with `paceline-mpi`: calls of torch.distributed that
gloo can do as well. They import this file, and so need no pytest.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

import paceline.transport.mpi.torch_backend  # noqa: F401  registers the backend
from paceline.transport.base import Rendezvous
from paceline.transport.c10d.store import connect_store

Layout = Callable[[Tensor], Tensor]


def like_gloo(rendezvous: Rendezvous, say: object) -> dict[str, object]:
    """Layouts, coalesced calls, messages from any source, groups that come and go, refusals."""
    me, size = rendezvous.rank, rendezvous.size
    store = dist.PrefixStore("like gloo", connect_store(rendezvous))
    dist.init_process_group(
        "paceline-mpi", store=store, rank=me, world_size=size, timeout=timedelta(seconds=60)
    )
    found: dict[str, object] = {
        f"{name}, {layout.__name__}": call(layout, me, size)
        for name, call in CALLS.items()
        for layout in (contiguous, transposed, strided, a_parameter)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PyTorch will rename these calls
        found |= coalesced(me, size)
    found["conjugate"] = conjugate(me, size)
    found["any source"] = from_any_source(me, size)
    found["groups"] = groups_that_go(me, size)
    found["refused"] = refusals((me + 1) % size)
    found["timed out"] = timed_out_barrier(me)
    dist.destroy_process_group()
    return found


def contiguous(tensor: Tensor) -> Tensor:
    return tensor.clone()


def transposed(tensor: Tensor) -> Tensor:
    return tensor.t().contiguous().t()


def strided(tensor: Tensor) -> Tensor:
    """Every second column of a wider tensor."""
    return tensor.repeat_interleave(2, dim=1)[:, ::2]


def a_parameter(tensor: Tensor) -> Tensor:
    return torch.nn.Parameter(transposed(tensor))


def numbers(me: int, size: int) -> Tensor:
    return torch.arange(3.0 * size).view(size, 3) + 100 * me


def all_reduced(layout: Layout, me: int, size: int) -> object:
    tensor = layout(numbers(me, size))
    dist.all_reduce(tensor)
    return tensor.tolist()


def averaged(layout: Layout, me: int, size: int) -> object:
    tensor = layout(numbers(me, size)).bfloat16()
    dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
    return tensor.tolist()


def reduced(layout: Layout, me: int, size: int) -> object:
    tensor = layout(numbers(me, size))
    dist.reduce(tensor, 0)
    return tensor.tolist() if me == 0 else None


def broadcast(layout: Layout, me: int, size: int) -> object:
    tensor = layout(numbers(me, size))
    dist.broadcast(tensor, 1)
    return tensor.tolist()


def all_gathered(layout: Layout, me: int, size: int) -> object:
    into = [layout(torch.zeros(size, 3)) for _ in range(size)]
    dist.all_gather(into, layout(numbers(me, size)))
    return [tensor.tolist() for tensor in into]


def all_gathered_whole(layout: Layout, me: int, size: int) -> object:
    into = layout(torch.zeros(size * size, 3))
    dist.all_gather_single(into, layout(numbers(me, size)))
    return into.tolist()


def gathered(layout: Layout, me: int, size: int) -> object:
    into = [layout(torch.zeros(size, 3)) for _ in range(size)]
    dist.gather(layout(numbers(me, size)), into if me == 1 else None, dst=1)
    return [tensor.tolist() for tensor in into]


def scattered(layout: Layout, me: int, size: int) -> object:
    into, rows = layout(torch.zeros(size, 3)), [layout(numbers(r, size)) for r in range(size)]
    dist.scatter(into, rows if me == 1 else None, src=1)
    return into.tolist()


def reduce_scattered(layout: Layout, me: int, size: int) -> object:
    into, rows = layout(torch.zeros(size, 3)), [layout(numbers(r, size)) for r in range(size)]
    dist.reduce_scatter(into, rows)
    return into.tolist()


def reduce_scattered_whole(layout: Layout, me: int, size: int) -> object:
    into = layout(torch.zeros(1, 3))
    dist.reduce_scatter_single(into, layout(numbers(me, size)))
    return into.tolist()


def all_to_all(layout: Layout, me: int, size: int) -> object:
    into = layout(torch.zeros(size, 3))
    dist.all_to_all_single(into, layout(numbers(me, size)))
    return into.tolist()


def messages(layout: Layout, me: int, size: int) -> object:
    into = layout(torch.zeros(size, 3))
    sent = dist.isend(layout(numbers(me, size)), (me + 1) % size)
    dist.recv(into, (me - 1) % size)
    assert sent is not None
    sent.wait()
    return into.tolist()


CALLS = {
    call.__name__: call
    for call in (
        *(all_reduced, averaged, reduced, broadcast, all_gathered, all_gathered_whole, gathered),
        *(scattered, reduce_scattered, reduce_scattered_whole, all_to_all, messages),
    )
}


def coalesced(me: int, size: int) -> dict[str, object]:
    """Several tensors in one call, as gloo can: of different shapes, one of them empty."""
    shapes = ((2,), (0,), (1, 3))
    own = [torch.full(shape, float(me + 1)) for shape in shapes]
    dist.all_reduce_coalesced(own)
    rows = [[torch.zeros(shape) for shape in shapes] for _ in range(size)]
    dist.all_gather_coalesced(rows, [torch.full(shape, float(me)) for shape in shapes])
    parts, wholes = [torch.zeros(1), torch.zeros(2)], [torch.zeros(size), torch.zeros(2 * size)]
    with dist._coalescing_manager():
        for part, whole in zip(parts, wholes, strict=True):
            dist.all_gather_single(whole, part + me)
    with dist._coalescing_manager():
        for part, whole in zip(parts, wholes, strict=True):
            dist.reduce_scatter_single(part, whole)
    return {
        "all_reduce_coalesced": [tensor.tolist() for tensor in own],
        "all_gather_coalesced": [[tensor.tolist() for tensor in row] for row in rows],
        "all_gather, coalesced": [whole.tolist() for whole in wholes],
        "reduce_scatter, coalesced": [part.tolist() for part in parts],
    }


def conjugate(me: int, size: int) -> object:
    """PyTorch keeps a conjugate as a flag on the memory of the original."""
    into = [torch.zeros(1, dtype=torch.complex64) for _ in range(size)]
    dist.group.WORLD.allgather([into], [torch.tensor([complex(me, 1)]).conj()]).wait()
    return [tensor.item() for tensor in into]


def from_any_source(me: int, size: int) -> object:
    """Rank 0 receives from all others without saying from which, in the world and in a group."""
    got = []
    for group in (None, dist.new_group([0, size - 1])):
        others = range(1, size) if group is None else [size - 1]
        if me == 0:
            for _ in others:
                heard = torch.zeros(1)
                source = dist.recv(heard, group=group)
                got.append((source, heard.item()))
        elif me in others:
            dist.send(torch.tensor([10.0 * me]), 0, group=group)
        dist.barrier()
    return sorted(got)


def groups_that_go(me: int, size: int) -> object:
    """Make and destroy subgroups; the world is as it was."""
    names = []
    for _ in range(3):
        group = dist.new_group([0, 1])
        if me in (0, 1):
            one = torch.ones(1)
            dist.all_reduce(one, group=group)
            assert one.item() == 2.0
            names.append(group.group_name)
            dist.destroy_process_group(group)
    one = torch.ones(1)
    dist.all_reduce(one)
    return len(set(names)), one.item()


def refusals(peer: int) -> object:
    told = []
    for tensor in (torch.ones(2).to_sparse(), torch.ones(2, device="meta")):
        for call in (dist.all_reduce, lambda t: dist.broadcast(t, 0), lambda t: dist.send(t, peer)):
            try:
                call(tensor)
            except RuntimeError as error:
                told.append(str(error))
    try:
        dist.all_reduce(torch.ones(2).to(torch.float8_e4m3fn))
    except RuntimeError as error:
        told.append(str(error))
    return told


def timed_out_barrier(me: int) -> object:
    """Rank 0 alone comes to a barrier of a group with a short timeout, and then uses it again."""
    group = dist.new_group(timeout=timedelta(seconds=0.2))
    told = []
    for _ in range(2 if me == 0 else 0):
        try:
            dist.barrier(group)
        except RuntimeError as error:
            told.append(str(error))
    dist.barrier()
    return told


def left_alone(rendezvous: Rendezvous, say: object) -> str:
    """Rank 0 alone calls an all-reduce, which times out. Its process must end all the same."""
    me, size = rendezvous.rank, rendezvous.size
    store = dist.PrefixStore("left alone", connect_store(rendezvous))
    dist.init_process_group(
        "paceline-mpi", store=store, rank=me, world_size=size, timeout=timedelta(seconds=1)
    )
    try:
        if me == 0:
            dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        return str(error)
    return "nothing"
