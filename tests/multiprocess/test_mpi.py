"""Real mpirun: the transport's promises, MPI under plain torch.distributed and DDP, deaths, and 20
clean exits out of 20.
"""

import os
import time
from contextlib import suppress
from pathlib import Path

import pytest
from tests.mpi_ranks import (
    OPERATIONS,
    killed_while_idle,
    operands,
    promises_and_operations,
    with_both,
)
from tests.small import make_pairs, small_net, weights_distance

import paceline
from paceline.errors import WorkerFailed
from paceline.launch.mpi import on_mpi_ranks
from paceline.transport.mpi.transport import MpiTransport

pytestmark = pytest.mark.skipif(
    not MpiTransport.available(), reason=f"no MPI: {MpiTransport.missing()}"
)


@pytest.fixture(scope="module")
def told() -> dict[int, tuple[dict[tuple[str, str, str], object], dict[str, object]]]:
    """What three ranks of one mpirun found."""
    results, failures = on_mpi_ranks(promises_and_operations, 3)
    assert failures == {}
    return results


def test_the_transport_keeps_its_promises(told) -> None:
    results = {rank: promises for rank, (_, promises) in told.items()}
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


def test_every_operation_is_right_or_refused(told) -> None:
    size = 3
    results = {rank: operations for rank, (operations, _) in told.items()}
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
    with pytest.raises(
        WorkerFailed, match="worker 1 failed: its process was killed by SIGKILL, and mpirun ended"
    ):
        train(
            tmp_path / "run",
            strategy="allreduce",
            workers=2,
            transport="mpi",
            faults=["die:rank=1,step=3"],
        )
    assert '"status": "failed"' in (tmp_path / "run" / "run.json").read_text()


def test_nothing_is_left_running() -> None:
    results, failures = on_mpi_ranks(killed_while_idle, 2)
    assert results == {}
    assert list(failures) == [1]
    until = time.monotonic() + 60
    while (left := _ranks()) and time.monotonic() < until:
        time.sleep(0.05)
    assert left == []


def _ranks() -> list[str]:
    """The command lines of the processes that on_mpi_ranks has started and that are alive."""
    lines = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        if _is_ours(pid):
            with suppress(OSError):
                lines.append(Path(f"/proc/{pid}/cmdline").read_text())
    return [line for line in lines if "paceline.launch.mpi" in line]


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
