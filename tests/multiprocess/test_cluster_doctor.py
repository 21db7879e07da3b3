"""`paceline doctor --cluster`: what the ranks of a launcher find, and what they miss."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from tests.commands import PACELINE, free_port

from paceline.doctor import cluster
from paceline.doctor.cluster import Report, examine_cluster, examine_seat
from paceline.launch.looked import claimed_rank, looked_for
from paceline.launch.seat import Seat
from paceline.transport.mpi.transport import MpiTransport, mpirun

SECRET = b"0123456789abcdef"
BIN = Path(sys.executable).parent


def on_two_hosts(secrets: tuple[bytes, bytes] = (SECRET, SECRET)) -> list[Seat]:
    port = free_port()
    return [
        Seat("a launcher", rank, 2, 0, 1, "127.0.0.1", port, secret=secret)
        for rank, secret in enumerate(secrets)
    ]


def together(
    seats: list[Seat], folders: list[Path | None], wait_s: float = 20.0, insecure: bool = False
) -> list[Report]:
    """The reports of ranks that are threads here."""
    futures: list[Future[Report]] = [Future() for _ in seats]

    def look(seat: Seat, out: Path | None, future: Future[Report]) -> None:
        try:
            report = examine_seat(seat, out, insecure, wait_s)
            report.end()
            future.set_result(report)
        except BaseException as error:
            future.set_exception(error)

    for seat, out, future in zip(seats, folders, futures, strict=True):
        threading.Thread(target=look, args=(seat, out, future), daemon=True).start()
    return [future.result(60) for future in futures]


def found(report: Report) -> dict[str, Any]:
    return {finding.name: finding for finding in report.findings}


def missing(report: Report) -> list[str]:
    return [finding.name for finding in report.findings if not finding.ok]


def test_two_ranks_tell_what_they_have(tmp_path: Path) -> None:
    out = tmp_path / "new" / "run"
    first, second = together(on_two_hosts(), [out, out])
    assert first.findings == second.findings
    assert first.ok
    names = ["launcher", "hosts", "cores", "meeting", "versions", "addresses", "folder"]
    assert list(found(first)) == names
    assert found(first)["launcher"].detail == "a launcher, 2 ranks"
    assert found(first)["hosts"].detail.startswith("1 host on 1 machine: ")
    assert found(first)["hosts"].detail.endswith(": ranks 0-1")
    assert "affinity mask" in found(first)["cores"].detail
    assert "for each rank" in found(first)["cores"].detail
    assert "PACELINE_SECRET_FILE" in found(first)["meeting"].detail
    assert "ranks 0-1: 127.0.0.1" in found(first)["addresses"].detail
    assert "the same folder for all" in found(first)["folder"].detail
    assert SECRET.decode() not in json.dumps(first.described())
    assert [one["rank"] for one in first.described()["ranks"]] == [0, 1]
    assert not (tmp_path / "new").exists(), "what was made for the look is gone"


def test_a_folder_that_is_another_one_on_the_other_host(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    first, second = together(on_two_hosts(), [tmp_path / "a", tmp_path / "b"])
    assert missing(first) == missing(second) == ["folder"]
    assert "does not see the file of rank 1" in found(first)["folder"].detail
    assert list((tmp_path / "a").iterdir()) == []


def test_a_folder_that_a_rank_cannot_write(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    first, _ = together(on_two_hosts(), [tmp_path / "a", tmp_path / "file" / "a"])
    assert missing(first) == ["folder"]
    assert "rank 1 on" in found(first)["folder"].detail
    assert "cannot write: " in found(first)["folder"].detail


def test_without_a_folder_it_says_how_to_try_one() -> None:
    first, _ = together(on_two_hosts(), [None, None])
    assert first.ok
    assert found(first)["folder"].detail == "not tried: add --out DIR, the folder of the job"


def test_a_rank_that_does_not_come() -> None:
    [first] = together(on_two_hosts()[:1], [None], wait_s=0.3)
    assert missing(first) == ["ranks"]
    assert found(first)["ranks"].detail == "rank 1 of 2 did not come within 0.3 s"


def test_a_rank_without_the_secret_is_none() -> None:
    first, second = together(on_two_hosts((SECRET, b"another secret..")), [None, None], 1.0)
    assert missing(first) == ["ranks"]
    assert "rank 1 of 2 did not come" in found(first)["ranks"].detail
    assert missing(second) == ["meeting"]
    assert "does not accept this rank's secret" in found(second)["meeting"].detail


def test_ranks_on_several_hosts_need_a_secret() -> None:
    for report in together(on_two_hosts((b"", b"")), [None, None], 1.0):
        assert missing(report) == ["meeting"]
        assert "PACELINE_SECRET_FILE" in found(report)["meeting"].detail
    first, _ = together(on_two_hosts((b"", b"")), [None, None], insecure=True)
    assert first.ok
    assert found(first)["meeting"].detail.endswith("--insecure: there is no secret")


def test_a_rank_that_others_cannot_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_call", lambda host, port, token: "timed out")
    first, second = together(on_two_hosts(), [None, None])
    assert missing(first) == missing(second) == ["addresses"]
    assert "does not reach rank 1 at 127.0.0.1" in found(first)["addresses"].detail
    assert found(first)["addresses"].detail.endswith(": timed out (and 1 more)")


def test_another_program_at_the_address_is_not_the_rank() -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listening:
        answering = threading.Thread(target=cluster._answer, args=(listening, b"another"))
        answering.start()
        port = listening.getsockname()[1]
        assert cluster._call("127.0.0.1", port, "7f" * 16) == "something else answers there"
        assert cluster._call("127.0.0.1", port, "another") is None
        listening.shutdown(socket.SHUT_RDWR)
        answering.join(10)
    assert cluster._call("127.0.0.1", port, "another") is not None


def test_versions_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = iter(range(100))
    monkeypatch.setattr(cluster, "version", lambda name: f"1.{next(numbers)}")
    first, _ = together(on_two_hosts(), [None, None])
    assert missing(first) == ["versions"]
    assert found(first)["versions"].fix == "install the same versions everywhere"


@pytest.mark.parametrize(("size", "calls"), [(1, []), (3, [2, 0]), (1000, 64)])
def test_a_rank_calls_no_more_than_it_must(size: int, calls: Any) -> None:
    called = cluster._others(1 % size, size)
    assert (called if isinstance(calls, list) else len(set(called))) == calls


# --- no launcher


@pytest.mark.parametrize(
    ("environment", "launcher", "says"),
    [
        ({}, "torchrun", "RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set"),
        ({"RANK": "1"}, "torchrun", "RANK set, WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set"),
        ({"PET_NNODES": "2"}, "torchrun", "PET_NNODES is set, which torchrun reads"),
        ({"JOB_COMPLETION_INDEX": "0"}, "torchrun", "a pod of an indexed Job"),
        ({}, "mpirun", "OMPI_COMM_WORLD_RANK, PMI_RANK not set"),
        ({"SLURM_JOB_ID": "7"}, "srun", "the script or a shell of job 7, not a task"),
    ],
)
def test_what_was_looked_for(environment: dict[str, str], launcher: str, says: str) -> None:
    looked = {one.launcher: one for one in looked_for(environment)}
    assert list(looked) == ["torchrun", "mpirun", "srun"]
    assert says in looked[launcher].found
    assert looked[launcher].start.endswith("paceline doctor --cluster")


def test_the_rank_that_a_launcher_claims() -> None:
    assert claimed_rank({}) is None
    assert claimed_rank({"RANK": "x", "SLURM_PROCID": "3"}) == 3


def test_variables_that_are_incomplete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    report = examine_cluster(None, False, 1.0)
    assert (report.rank, missing(report)) == (1, ["launcher"])
    assert "inside mpirun, but the variables" in found(report)["launcher"].detail


# --- real launchers


def json_of(*command: str) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=100, check=False, env=dict(os.environ)
    )
    assert done.stdout.startswith("{"), done.stdout + done.stderr
    return done.returncode, json.loads(done.stdout)


def by_torchrun() -> list[str]:
    return [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2", str(PACELINE)]


def by_launch() -> list[str]:
    return [str(PACELINE), "launch", "-n", "2", str(PACELINE)]


def by_mpirun() -> list[str]:
    if not MpiTransport.available():
        pytest.skip("no MPI here: pip install 'paceline[mpi]'")
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return [str(mpirun()), *root, "--oversubscribe", "-n", "2", str(PACELINE)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "launcher"),
    [(by_torchrun, "torchrun"), (by_launch, "a launcher"), (by_mpirun, "mpirun")],
)
def test_under_real_launchers(
    command: Callable[[], list[str]], launcher: str, tmp_path: Path
) -> None:
    asked = ["doctor", "--cluster", "--json", "--wait", "60", "--out", str(tmp_path / "run")]
    code, told = json_of(*command(), *asked)
    assert (code, told["ok"]) == (0, True)
    assert told["findings"]["launcher"]["detail"] == f"{launcher}, 2 ranks"
    assert [one["rank"] for one in told["ranks"]] == [0, 1]
    assert not (tmp_path / "run").exists()
