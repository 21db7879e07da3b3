"""Real mpirun: the transport's promises, MPI under plain torch.distributed and DDP, deaths, and 20
clean exits out of 20.
"""

import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.conftest import make_pairs, small_net, weights_distance
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import paceline
from paceline.collectives.operations import Operations
from paceline.errors import TransportError, WorkerFailed
from paceline.launch.mpi import on_mpi_ranks
from paceline.registry import collectives
from paceline.transport.base import Rendezvous, Transport
from paceline.transport.c10d.store import connect_store
from paceline.transport.mpi.transport import MpiTransport

pytestmark = pytest.mark.skipif(
    not MpiTransport.available(), reason=f"no MPI: {MpiTransport.missing()}"
)
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


def test_the_transport_keeps_its_promises() -> None:
    results, failures = on_mpi_ranks(everything, 3)
    assert failures == {}
    for rank, found in results.items():
        assert not [k for k in found if k.startswith("wrong:")], found
        assert found["messages"] == [True] * 3
        assert found["group"] == [(1, 2, 4.0), (0, 1, 2.0), (0, 2, 4.0)][rank]
        assert found["broadcast"] == [1.0] * 4
        assert found["native broadcast"] == [2.0] * 4
        for name in ("native", "ring"):
            assert "rank 1" in found[f"different lengths, {name}"]
            assert "50 float32" in found[f"different lengths, {name}"]
        assert "meta" in found["wrong device"]
    assert len(results[0]["told"]) == 1
    assert "rank 0 has waited" in results[0]["told"][0], "a slow rank is told, and waited for"


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


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_ddp_over_mpi_is_ddp_over_gloo(size: int) -> None:
    results, failures = on_mpi_ranks(with_both, size)
    assert failures == {}
    ours, theirs = (
        {rank: results[rank][backend] for rank in range(size)}
        for backend in ("paceline-mpi", "gloo")
    )
    for rank in range(size):
        assert ours[rank]["calls"] == theirs[rank]["calls"]
        assert ours[rank]["pair"] == theirs[rank]["pair"]
        assert weights_distance(ours[rank]["weights"], ours[0]["weights"]) == 0.0
        assert weights_distance(ours[rank]["weights"], theirs[rank]["weights"]) <= (
            0.0 if size == 2 else 1e-6
        )


OPERATIONS = ("SUM", "AVG", "MAX", "MIN", "PRODUCT", "BAND", "BOR", "BXOR", "PREMUL_SUM")


def every_operation(rendezvous: Rendezvous, say: object) -> dict[tuple[str, str, str], object]:
    """What each rank gets of every collective that combines, by every operation, in floating-point
    numbers and integers.
    """
    import paceline.transport.mpi.torch_backend  # noqa: F401

    me, size = rendezvous.rank, rendezvous.size
    store = dist.PrefixStore("operations", connect_store(rendezvous))
    dist.init_process_group(
        "paceline-mpi", store=store, rank=me, world_size=size, timeout=timedelta(seconds=60)
    )
    found: dict[tuple[str, str, str], object] = {}

    def brought(dtype: torch.dtype) -> torch.Tensor:
        return operands(size)[me].to(dtype)

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
        for dtype in (torch.float32, torch.int64):
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


def operands(size: int) -> torch.Tensor:
    """Row r is what rank r brings: one number for each rank."""
    return torch.arange(1, size * size + 1).view(size, size) * 3


def test_every_operation_is_right_or_refused() -> None:
    size = 3
    results, failures = on_mpi_ranks(every_operation, size)
    assert failures == {}
    rows = operands(size)
    bits = {
        "BAND": rows[0] & rows[1] & rows[2],
        "BOR": rows[0] | rows[1] | rows[2],
        "BXOR": rows[0] ^ rows[1] ^ rows[2],
    }
    whole = {"SUM": rows.sum(0), "MAX": rows.amax(0), "MIN": rows.amin(0), "PRODUCT": rows.prod(0)}
    expected = {
        "torch.float32": {**whole, "AVG": rows.double().mean(0)},
        "torch.int64": {**whole, **bits},
    }
    refused = {
        ("AVG", "torch.int64"): "cannot average torch.int64: use SUM and divide",
        **{
            (name, "torch.float32"): f"cannot combine torch.float32 by {name}: use integers"
            for name in bits
        },
        **{("PREMUL_SUM", d): "cannot combine by PREMUL_SUM: use SUM, AVG, MAX" for d in expected},
    }
    for rank, found in results.items():
        assert len(found) == len(OPERATIONS) * 2 * 4
        for (call, name, dtype), got in found.items():
            if (name, dtype) in refused:
                assert refused[name, dtype] in str(got), (call, name, dtype)
                continue
            full = expected[dtype][name].tolist()
            wanted = {"all_reduced": full, "reduced": full if rank == size - 1 else None}.get(
                call, [full[rank]]
            )
            assert got == wanted, (rank, call, name, dtype)


def train(out: Path, **options: object) -> paceline.Run:
    return paceline.train(
        **{  # type: ignore[arg-type]
            "model": small_net,
            "data": (make_pairs(60), make_pairs(20, seed=1)),
            "batch_size": 6,
            "memory_format": "contiguous",
            "out": str(out),
            "progress": False,
            **options,
        }
    )


@pytest.mark.slow
def test_training_under_mpirun_follows_serial(tmp_path: Path) -> None:
    serial = train(tmp_path / "serial", batch_size=12, epochs=2)
    many = train(
        tmp_path / "many",
        strategy="allreduce:collective=ring",
        workers=2,
        transport="mpi",
        epochs=2,
    )
    assert weights_distance(serial.weights, many.weights) < 1e-5
    n = sum(p.numel() for p in small_net().parameters())
    assert sum(w["payload_sent_bytes"] for w in many.record["workers"]) == many.steps * 2 * 4 * n


def test_a_killed_rank_is_named(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(
        WorkerFailed, match="worker 1 failed: its process was killed by SIGKILL, and mpirun ended"
    ):
        train(
            tmp_path / "run",
            strategy="allreduce",
            workers=3,
            transport="mpi",
            faults=["die:rank=1,step=3"],
        )
    assert time.monotonic() - began < 60
    assert '"status": "failed"' in (tmp_path / "run" / "run.json").read_text()


def killed_while_idle(rendezvous: Rendezvous, say: object) -> None:
    if rendezvous.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def test_nothing_is_left_running() -> None:
    results, failures = on_mpi_ranks(killed_while_idle, 2)
    assert results == {}
    assert list(failures) == [1]
    time.sleep(0.2)
    assert "paceline.launch.mpi" not in "".join(
        Path(f"/proc/{pid}/cmdline").read_text()
        for pid in os.listdir("/proc")
        if pid.isdigit() and _is_ours(pid)
    )


def _is_ours(pid: str) -> bool:
    """Whether a process comes from this test run: it is in a folder of ours."""
    try:
        return os.readlink(f"/proc/{pid}/cwd") == os.getcwd()
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_ddp_over_mpi_exits_cleanly_20_times_out_of_20(tmp_path: Path) -> None:
    for number in range(20):
        run = train(tmp_path / str(number), strategy="ddp", workers=2, transport="mpi", steps=3)
        assert run.record["status"] == "completed"
