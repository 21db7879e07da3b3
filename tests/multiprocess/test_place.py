"""Ranks of other launchers find their board, and strangers do not."""

import json
import os
import stat
import threading
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from paceline.common.cores import cores
from paceline.errors import BadRequest, TransportError
from paceline.launch import place as places
from paceline.launch.joined import Meeting
from paceline.launch.place import KEY, Wanted, find_place
from paceline.launch.seat import Seat, find
from paceline.transport.board.client import Board

SECRET = b"0123456789abcdef"


def together(seats: list[Seat], wanted: Wanted) -> list[Any]:
    """What each rank's meeting is, or why it failed; ranks are threads here."""
    futures: list[Future[Any]] = [Future() for _ in seats]

    def meet(seat: Seat, future: Future[Any]) -> None:
        try:
            future.set_result(Meeting(seat, wanted))
        except BaseException as error:
            future.set_result(error)

    for seat, future in zip(seats, futures, strict=True):
        threading.Thread(target=meet, args=(seat, future), daemon=True).start()
    return [future.result(30) for future in futures]


def on_two_hosts(launcher: str, **more: Any) -> list[Seat]:
    return [Seat(launcher, rank, 2, 0, 1, "127.0.0.1", **more) for rank in range(2)]


def test_tasks_of_srun_meet_through_a_private_file_in_the_runs_folder(tmp_path: Path) -> None:
    out, modes = tmp_path / "run", []
    real = places._reach

    def watched(*given: Any, **more: Any) -> Any:
        [handed] = out.glob(".board-*")
        modes.append(stat.S_IMODE(handed.stat().st_mode))
        return real(*given, **more)

    seats = on_two_hosts("srun", key="slurm-7.0.0")
    stale = out / ".board-slurm-7.0.0"  # of ranks that have ended
    out.mkdir()
    stale.write_text(json.dumps(["unix:paceline-nothing", "00" * 32]))
    stale.chmod(0o600)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(places, "_reach", watched)
        first, second = together(seats, Wanted(out))
    assert first.present == second.present
    assert first.secret == second.secret != b""
    assert set(modes) == {0o600}
    assert list(out.glob(".board-*")) == [], "rank 0 removes it"
    assert first.rendezvous.board.startswith("tcp:")


def test_a_file_of_another_user_is_not_believed(tmp_path: Path) -> None:
    file = tmp_path / ".board-slurm-7.0.0"
    file.write_text(json.dumps(["unix:paceline-evil", "00" * 32]))
    file.chmod(0o644)
    seat = on_two_hosts("srun", key="slurm-7.0.0")[1]
    with pytest.raises(BadRequest, match="a file that you own and only you can read"):
        find_place(seat, Wanted(tmp_path))


def test_every_job_step_and_restart_of_slurm_has_a_file_of_its_own() -> None:
    told = {
        "SLURM_PROCID": "0", "SLURM_STEP_ID": "2", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "41",
        "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    }  # fmt: skip
    first, again = find(told), find({**told, "SLURM_RESTART_COUNT": "1"})
    assert first is not None
    assert again is not None
    assert (first.key, again.key, first.port) == ("slurm-41.2.0", "slurm-41.2.1", 0)


@pytest.fixture
def store() -> Any:
    return dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=20), wait_for_workers=False)


def test_under_torchrun_the_secret_comes_from_a_file(store: Any) -> None:
    seats = on_two_hosts("torchrun", port=store.port, store_exists=True, secret=SECRET)
    first, second = together(seats, Wanted())
    assert first.present == second.present
    assert first.secret == second.secret == SECRET
    assert SECRET.hex() not in store.get(KEY).decode(), "only the address is there"
    assert first.notices == []


def test_an_address_that_a_stranger_wrote_is_not_believed(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "MEET_S", 0.5)
    store.set(KEY, json.dumps(["tcp:127.0.0.1:1", "00" * 32, ""]))
    [_, second] = on_two_hosts("torchrun", port=store.port, store_exists=True, secret=SECRET)
    with pytest.raises(TransportError, match="is not authenticated with this rank's secret"):
        find_place(second, Wanted())


@pytest.mark.parametrize("has_store", [True, False])
def test_insecure_is_asked_for_and_told(store: Any, has_store: bool) -> None:
    port = store.port if has_store else _free_port()
    seats = on_two_hosts("torchrun", port=port, store_exists=has_store)
    with pytest.raises(BadRequest, match="hands over no secret"):
        find_place(seats[0], Wanted())
    first, second = together(seats, Wanted(insecure=True))
    assert first.present == second.present
    assert first.secret == second.secret == b"", "nothing is unpickled"
    assert "--insecure: the ranks met without a secret" in first.notices[0]


def _free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def test_a_launcher_without_a_store_has_the_board_at_its_port() -> None:
    port = _free_port()
    first, second = together(on_two_hosts("a launcher", port=port, secret=SECRET), Wanted())
    assert first.rendezvous.board.endswith(f":{port}")
    with pytest.raises(TransportError, match="does not accept this rank's secret"):
        Board(first.rendezvous.board, b"another secret..", 1).get("a")
    assert first.present == second.present


def test_on_one_host_no_secret_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    seats = [Seat("torchrun", r, 2, r, 2, "127.0.0.1", 29511, True) for r in range(2)]
    first, second = together(seats, Wanted())
    assert first.present == second.present
    assert first.rendezvous.board.startswith("unix:")
    assert first.secret
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_others_can_open_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / f"paceline-{os.geteuid()}").mkdir(mode=0o777)
    (tmp_path / f"paceline-{os.geteuid()}").chmod(0o777)
    with pytest.raises(BadRequest, match="a folder that only you can open: chmod 700"):
        find_place(Seat("torchrun", 0, 2, 0, 2, "127.0.0.1", 29512, True), Wanted())


def test_ranks_of_one_machine_know_that_they_share_it() -> None:
    """Though each is alone on its host: containers of one machine."""
    port = _free_port()
    first, second = together(on_two_hosts("a launcher", port=port, secret=SECRET), Wanted())
    assert (first.sharing.rooms, second.sharing.rank) == (second.sharing.rooms, 1)
    assert (first.sharing.machines, first.sharing.cores) == (1, cores())
    assert first.sharing.threads(0) == max(1, cores() // 2)
