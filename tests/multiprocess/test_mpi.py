"""Real mpirun: the transport's promises, MPI under plain torch.distributed and DDP, deaths, and 20
clean exits out of 20.
"""

import os
import subprocess
import time
from contextlib import suppress
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.mpi_ranks import (
    DTYPES,
    OPERATIONS,
    all_of_it,
    killed_while_idle,
    operands,
    with_both,
)
from tests.small import make_pairs, small_net, weights_distance
from tests.torch_calls import CALLS, left_alone, numbers
from torch import Tensor

import paceline
from paceline.errors import WorkerFailed
from paceline.launch import mpi
from paceline.launch.mpi import on_mpi_ranks
from paceline.transport.mpi.transport import MpiTransport

pytestmark = pytest.mark.skipif(
    not MpiTransport.available(), reason=f"no MPI: {MpiTransport.missing()}"
)


@pytest.fixture(scope="module")
def told() -> dict[int, dict[str, dict[Any, object]]]:
    """What three ranks of one mpirun found."""
    results, failures = on_mpi_ranks(all_of_it, 3)
    assert failures == {}
    return results


def test_the_transport_keeps_its_promises(told) -> None:
    results = {rank: found["promises"] for rank, found in told.items()}
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
    assert results[0]["told"]
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
    for rank, found in ((rank, found["operations"]) for rank, found in told.items()):
        assert len(found) == len(OPERATIONS) * len(DTYPES) * 4
        for dtype in DTYPES:
            wanted = combined(operands(size, dtype))
            for name in OPERATIONS:
                full = wanted[name]
                for call in ("all_reduced", "reduced", "scattered", "scattered_whole"):
                    got = found[call, name, str(dtype)]
                    if isinstance(full, str):
                        assert full in str(got), (call, name, dtype)
                        continue
                    mine = {
                        "all_reduced": full.tolist(),
                        "reduced": full.tolist() if rank == size - 1 else None,
                    }
                    assert got == mine.get(call, [full[rank].item()]), (rank, call, name, dtype)


def combined(rows: Tensor) -> dict[str, Tensor | str]:
    """The result of each operation over the rows, computed exactly and rounded once, or what the
    refusal says.
    """
    dtype, long = rows.dtype, rows.to(torch.int64)
    bits = {"BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor}
    return {
        "SUM": long.sum(0).to(dtype),
        "MAX": long.amax(0).to(dtype),
        "MIN": long.amin(0).to(dtype),
        "PRODUCT": long.prod(0).to(dtype),
        "AVG": rows.double().mean(0).to(dtype)
        if dtype.is_floating_point
        else f"cannot average {dtype}: use SUM and divide",
        **{
            name: f"cannot combine {dtype} by {name}: use integers"
            if dtype.is_floating_point
            else reduce(call, rows)
            for name, call in bits.items()
        },
        "PREMUL_SUM": "cannot combine by PREMUL_SUM: use SUM, AVG, MAX",
    }


def test_every_layout_of_a_tensor_gives_the_same(told) -> None:
    size = 3
    whole = sum(numbers(rank, size) for rank in range(size))
    for rank, found in ((rank, found["like gloo"]) for rank, found in told.items()):
        assert found["all_reduced, transposed"] == whole.tolist()
        assert found["averaged, strided"] == (whole / size).bfloat16().tolist()
        assert found["messages, transposed"] == numbers((rank - 1) % size, size).tolist()
        for call in CALLS:
            for layout in ("transposed", "strided", "a_parameter"):
                assert found[f"{call}, {layout}"] == found[f"{call}, contiguous"], (call, layout)
        assert found["conjugate"] == [complex(source, -1) for source in range(size)]


def test_coalesced_calls(told) -> None:
    for found in (found["like gloo"] for found in told.values()):
        assert found["all_reduce_coalesced"] == [[6.0, 6.0], [], [[6.0] * 3]]
        assert found["all_gather_coalesced"] == [
            [[rank] * 2, [], [[rank] * 3]] for rank in (0.0, 1.0, 2.0)
        ]
        assert found["all_gather, coalesced"] == [[0, 1, 2], [0, 0, 1, 1, 2, 2]]
    for rank, found in told.items():
        assert found["like gloo"]["reduce_scatter, coalesced"] == [[3 * rank], [3 * rank] * 2]


def test_a_message_from_any_source_names_its_source(told) -> None:
    found = told[0]["like gloo"]["any source"]
    assert found == [(1, 10.0), (2, 20.0), (2, 20.0)]


def test_a_subgroup_can_be_destroyed(told) -> None:
    assert [told[rank]["like gloo"]["groups"] for rank in range(3)] == [(3, 3), (3, 3), (0, 3)]


def test_what_cannot_be_moved_is_refused(told) -> None:
    for found in told.values():
        refused = found["like gloo"]["refused"]
        assert len(refused) == 7
        assert all("not torch.sparse_coo: call .to_dense()" in told for told in refused[:3])
        assert all("moves CPU tensors, not meta: call .cpu()" in told for told in refused[3:6])
        assert "cannot combine torch.float8_e4m3fn: use float32" in refused[6]


def test_a_barrier_that_a_rank_never_enters_times_out(told) -> None:
    first, again = told[0]["like gloo"]["timed out"]
    assert "Timed out after 0.2 s in barrier: did every rank call it?" in first
    assert "has timed out before: make a new group" in again


@pytest.mark.slow
def test_a_collective_that_timed_out_does_not_keep_the_process() -> None:
    results, failures = on_mpi_ranks(left_alone, 2)
    assert failures == {}
    assert "Timed out after 1 s in all_reduce" in results[0]
    assert results[1] == "nothing"
    _nothing_is_left_running()


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


@pytest.mark.slow  # trials of tests/faults kill such ranks, too
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
    _nothing_is_left_running()


@pytest.mark.slow
def test_a_rank_that_is_killed_while_idle_leaves_nothing_running() -> None:
    results, failures = on_mpi_ranks(killed_while_idle, 2)
    assert results == {}
    assert list(failures) == [1]
    _nothing_is_left_running()


def _nothing_is_left_running() -> None:
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
@pytest.mark.timeout(900)
def test_ddp_over_mpi_exits_cleanly_20_times_out_of_20(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes, end = [], mpi._end

    def noted(process: subprocess.Popen[str], patience_s: float) -> None:
        codes.append(process.poll())
        end(process, patience_s)

    monkeypatch.setattr(mpi, "_end", noted)
    for number in range(20):
        run = train(tmp_path / str(number), strategy="ddp", workers=2, transport="mpi", steps=3)
        assert run.record["status"] == "completed"
        assert codes == [0] * (number + 1), "mpirun ended by itself, without a signal"
