"""Where ranks that torchrun, mpirun, srun or another launcher has started find their board.

Rank 0 starts the board and hands its address and the run's secret over: by MPI, in a file that only
this user can read, or (the address alone) through the launcher's own store. To leave the host
without a secret the user must say `--insecure`.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import stat
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from paceline.common.files import write_whole
from paceline.errors import BadRequest, TransportError
from paceline.launch.addresses import keep_to_loopback
from paceline.launch.board import HostedApart, listen_for, listen_here
from paceline.launch.seat import Seat
from paceline.launch.unshared import Unshared
from paceline.request.config import Config
from paceline.request.earlier import AUTO
from paceline.transport.base import WAITS, Waits
from paceline.transport.board.client import Board
from paceline.transport.board.wire import TCP
from paceline.transport.c10d.store import first_line
from paceline.transport.mpi.transport import load as load_mpi

MEET_S = 300.0  # ranks read their data before they meet, and some disks are slow
PLACE_BYTES = 512  # of the message that tells MPI's ranks where the board is
AGAIN_S = 0.05  # between two looks for a board that is not there yet
KEY = "paceline/board"  # in the launcher's own store
Way = Literal["launcher", "mpi", "file", "store", "port"]


@dataclass(frozen=True)
class Place:
    """The board of the ranks of a launcher, and this rank's connection to it."""

    address: str
    secret: bytes = field(repr=False)
    board: Board
    secure: bool = True  # only this run's ranks know the secret
    handed: Path | None = None  # the file by which rank 0 hands both over; it removes it

    @property
    def endpoint(self) -> tuple[str, int]:
        """Host and port of a board that other hosts reach."""
        host, _, port = self.address.removeprefix(TCP).rpartition(":")
        return host, int(port)


@dataclass(frozen=True)
class Wanted:
    """What the user asked for about the meeting of the ranks."""

    out: Path | None = None  # the run's folder, which all hosts see
    insecure: bool = False
    waits: Waits = WAITS
    meet_s: float | None = None  # for the board to appear; None: MEET_S

    @property
    def appear_s(self) -> float:
        return MEET_S if self.meet_s is None else self.meet_s

    @classmethod
    def read(cls, options: Mapping[str, Any]) -> Wanted:
        """Read it from the options of a run, before the rest of them is looked at."""
        names = ("out", "insecure", "resume", "deadline_s", "give_up_s", "lost_s")
        config = Config.make({name: options[name] for name in names if options.get(name)})
        folder = config.out or (config.resume if config.resume != AUTO else None)
        return cls(Path(folder) if folder else None, config.insecure, config.waits)


def find_place(seat: Seat, wanted: Wanted) -> Place:
    """Connect to the board of the seat's run; rank 0 first starts it, unless the launcher has."""
    if seat.meets_on_loopback:
        keep_to_loopback()
    found = way(seat)
    if found == "launcher":
        return _reach(seat, wanted, seat.board, seat.secret)
    if found == "mpi":
        return _through_mpi(seat, wanted)
    if found == "file":
        return _through_a_file(seat, wanted)
    if not seat.secret and not wanted.insecure:
        raise BadRequest(
            f"{seat.launcher} has started ranks on several hosts and hands over no secret that"
            " keeps strangers out: name a file with 16 or more random bytes that only you can read"
            " in PACELINE_SECRET_FILE on all hosts, or use --insecure on a network where every"
            " program may be trusted"
        )
    return _through_its_store(seat, wanted) if found == "store" else _at_its_port(seat, wanted)


def way(seat: Seat) -> Way:
    """Return how the ranks of a launcher learn the board's address and the run's secret."""
    if seat.board:
        return "launcher"
    if not seat.host:
        return "mpi"
    if seat.meets_on_loopback or seat.launcher == "srun":
        return "file"
    return "store" if seat.store_exists else "port"


def _reach(seat: Seat, wanted: Wanted, address: str, secret: bytes, secure: bool = True) -> Place:
    board = Board(
        address, secret, seat.rank, lost_s=wanted.waits.lost_s, wait_s=wanted.appear_s, alive=True
    )
    return Place(address, secret, board, secure)


@cache
def _host(seat: Seat, lost_s: float, port: int = 0, secret: bytes = b"") -> HostedApart:
    """Start rank 0's board. It lasts as long as the process, since further runs in it use it."""
    here = seat.meets_on_loopback
    host = seat.host or os.uname().nodename
    listening, address = listen_here() if here else listen_for(host, port)
    known = seat.secret or secret or secrets.token_bytes(32)
    return HostedApart(listening, address, known, lost_s)


def _through_mpi(seat: Seat, wanted: Wanted) -> Place:
    """Rank 0 broadcasts the address and the secret by MPI."""
    try:
        world = load_mpi().COMM_WORLD
    except BadRequest as error:
        raise BadRequest(f"inside mpirun the ranks meet through MPI: {error}") from None
    if world.size != seat.size:
        raise BadRequest(
            f"mpirun has started {seat.size} processes, but mpi4py sees {world.size}: mpi4py"
            " seems to use another MPI than this mpirun; start the ranks with the mpirun of its MPI"
        )
    said = ("", "")
    if seat.rank == 0:
        hosted = _host(seat, wanted.waits.lost_s)
        said = (hosted.address, hosted.secret.hex())
    message = bytearray(json.dumps(said).encode().ljust(PLACE_BYTES))
    world.Bcast(message)
    address, secret = json.loads(message)
    return _reach(seat, wanted, address, bytes.fromhex(secret))


# --- through a file that only this user can read


def _through_a_file(seat: Seat, wanted: Wanted) -> Place:
    """Rank 0 writes the address and the secret to a file; the others look for it.

    On one host the file is in a folder of this user; elsewhere in the run's folder, which all hosts
    see. A file of earlier ranks names a board that has ended, so that ranks go on looking.
    """
    folder = _own_folder() if seat.meets_on_loopback else _shared_folder(wanted)
    path = folder / f".board-{seat.key or seat.port}"
    if seat.rank == 0:
        hosted = _host(seat, wanted.waits.lost_s)
        said = json.dumps([hosted.address, hosted.secret.hex()])
        write_whole(path, said, mode=0o600)
        place = _reach(seat, wanted, hosted.address, hosted.secret)
        return replace(place, handed=path)
    until, reason = time.monotonic() + wanted.appear_s, f"{path} did not appear"
    unshared = Unshared(seat, path)
    while time.monotonic() < until:
        try:
            _refuse_a_foreign(path)
            address, secret = json.loads(path.read_text())
            return _reach(seat, wanted, str(address), bytes.fromhex(secret))
        except BadRequest:
            raise
        except (OSError, ValueError, TypeError, TransportError) as error:
            if not isinstance(error, FileNotFoundError):
                reason = f"{path}: {error}"
        unshared.look()
        time.sleep(AGAIN_S)
    raise TransportError(
        f"rank {seat.rank}: rank 0 did not appear within {wanted.appear_s:g} s ({reason}); the"
        " run's folder (--out) must be one that all hosts see"
    )


def _refuse_a_foreign(path: Path) -> None:
    found = path.lstat()
    own = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
    if not own or found.st_mode & 0o077:
        raise BadRequest(
            f"{path} must be a file that you own and only you can read: another user may have"
            " written it; remove it"
        )


def _shared_folder(wanted: Wanted) -> Path:
    folder = wanted.out if wanted.out is not None else Path.cwd()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadRequest(f"{folder} cannot be made: {error.strerror}") from None
    return folder


def _own_folder() -> Path:
    """A folder of this user on this host: $XDG_RUNTIME_DIR, or one with mode 0700 in /tmp."""
    given = os.environ.get("XDG_RUNTIME_DIR", "")
    if given and os.path.isdir(given) and os.stat(given).st_uid == os.geteuid():
        return Path(given)
    folder = Path(tempfile.gettempdir()) / f"paceline-{os.geteuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise BadRequest(f"{folder} must be a folder that only you can open: chmod 700 {folder}")
    return folder


# --- through what the launcher offers; the secret comes from the user's file


def _through_its_store(seat: Seat, wanted: Wanted) -> Place:
    """Rank 0 writes the board's address, authenticated, into the launcher's own store."""
    store, secure = _connect(seat, wanted), bool(seat.secret)
    if seat.rank == 0:
        hosted = _host(seat, wanted.waits.lost_s)
        mac = hmac.digest(seat.secret, hosted.address.encode(), "sha256").hex()
        told = "" if secure else hosted.secret.hex()  # --insecure: strangers may read it
        store.set(KEY, json.dumps([hosted.address, mac, told]))
        return _reach(seat, wanted, hosted.address, hosted.secret, secure)
    until, reason = time.monotonic() + wanted.appear_s, "it did not appear"
    while time.monotonic() < until:
        try:
            if store.check([KEY]):
                address, mac, told = json.loads(store.get(KEY))
                right = hmac.digest(seat.secret, address.encode(), "sha256").hex()
                if not hmac.compare_digest(mac, right):
                    raise ValueError("its address is not authenticated with this rank's secret")
                secret = seat.secret or bytes.fromhex(told)
                return _reach(seat, wanted, address, secret, secure)
        except (ValueError, TypeError, AttributeError, TransportError) as error:
            reason = str(error)
        except RuntimeError as error:
            raise _lost_store(seat, error) from None
        time.sleep(AGAIN_S)
    raise TransportError(f"rank {seat.rank} found no board within {wanted.appear_s:g} s: {reason}")


def _at_its_port(seat: Seat, wanted: Wanted) -> Place:
    """The board itself listens at the address that the launcher names."""
    secret, secure = seat.secret or b"insecure", bool(seat.secret)
    if seat.rank == 0:
        hosted = _host(seat, wanted.waits.lost_s, seat.port, secret)
        return _reach(seat, wanted, hosted.address, secret, secure)
    address, until = f"tcp:{seat.host}:{seat.port}", time.monotonic() + wanted.appear_s
    while True:
        try:
            return _reach(seat, wanted, address, secret, secure)
        except TransportError:
            if time.monotonic() > until:
                raise
        time.sleep(AGAIN_S)


def _connect(seat: Seat, wanted: Wanted) -> Any:
    try:
        timeout = timedelta(seconds=wanted.appear_s)
        return dist.TCPStore(seat.host, seat.port, None, False, timeout)
    except RuntimeError as error:
        raise _lost_store(seat, error) from None


def _lost_store(seat: Seat, error: RuntimeError) -> TransportError:
    return TransportError(
        f"rank {seat.rank} cannot reach {seat.launcher}'s store at {seat.host}:{seat.port}:"
        f" {first_line(error)}"
    )
