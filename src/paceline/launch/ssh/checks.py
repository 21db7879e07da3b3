"""What a host is asked before ranks are started: its folders, its address, the way to rank 0."""

from __future__ import annotations

import os
import secrets
import socket
import struct
import time
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from paceline.errors import BadRequest, TransportError
from paceline.launch.addresses import LOOPBACK, address_towards, is_loopback
from paceline.launch.apart import HostedApart, listen_for, listen_here
from paceline.transport.board import wire

REACH_S = 5.0  # to connect to the board
SEEN_S = 3.0  # until a file of another host appears: NFS may be late
AGAIN_S = 0.1
SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


class Prepared:
    """What this host has made for the run: a file that shows a shared folder, the board."""

    def __init__(self) -> None:
        self._token: Path | None = None
        self._board: HostedApart | None = None

    def first(self, order: dict[str, Any]) -> dict[str, Any]:
        """As the first host: go to the folder, write the token, start the board."""
        _enter(order)
        if order["folder"] is not None:
            self._write_token(Path(order["folder"]).expanduser().absolute())
        secret = bytes.fromhex(order["secret"])
        if order["alone"]:
            listening, address = listen_here()
        else:
            own = own_address(order["interface"], order["towards"], order["own"])
            listening, address = listen_for(own)
        self._board = HostedApart(listening, address, secret, float(order["lost_s"]))
        host = LOOPBACK if order["alone"] else address.removeprefix(wire.TCP).rpartition(":")[0]
        return {
            "board": address,
            "token": None if self._token is None else str(self._token),
            "master": [host, _free_port()],
        }

    def other(self, order: dict[str, Any]) -> dict[str, Any]:
        """As another host: go to the folder, look for the token, reach the board."""
        _enter(order)
        seen = order["token"] is None or _appears(Path(order["token"]))
        rank, secret = int(order["ranks"][0]), bytes.fromhex(order["secret"])
        return {"seen": seen, "unreached": unreached(order["board"], secret, rank)}

    def _write_token(self, folder: Path) -> None:
        """Write a file with a random name where the run's folder is, or will be."""
        while not folder.exists() and folder.parent != folder:
            folder = folder.parent
        path = folder / f".paceline-{secrets.token_hex(16)}"
        try:
            path.touch(mode=0o600, exist_ok=False)
        except OSError as error:
            raise BadRequest(f"{folder} cannot be written: {error.strerror}") from None
        self._token = path

    def remove_token(self) -> None:
        if self._token is not None:
            with suppress(OSError):
                self._token.unlink()
            self._token = None

    def close(self) -> None:
        self.remove_token()
        if self._board is not None:
            self._board.end()


def _enter(order: dict[str, Any]) -> None:
    folder, script = Path(order["cd"]).expanduser(), order["script"]
    try:
        os.chdir(folder)
    except OSError as error:
        raise BadRequest(
            f"the folder {folder} cannot be entered ({error.strerror}): name one that every host"
            " has with --cd DIR"
        ) from None
    if script is not None and not Path(script).is_file():
        raise BadRequest(
            f"there is no file {script} in {folder}: copy it to every host, or name the folder"
            " where it is with --cd DIR"
        )


def _appears(path: Path) -> bool:
    until = time.monotonic() + SEEN_S
    while not path.exists():
        if time.monotonic() > until:
            return False
        time.sleep(AGAIN_S)
    return True


def own_address(interface: str | None, towards: list[str], own: str) -> str:
    """Return the address by which the other hosts reach this one.

    `interface`: its name or its address, as the user gave it. `towards`: the addresses at which ssh
    reached the other hosts: this host's address on the way to one of them is what they can reach.
    `own`: the address at which ssh reached this host.
    """
    if interface is not None:
        return interface if _is_address(interface) else address_of(interface)
    abroad = [other for other in towards if _is_address(other) and not is_loopback(other)]
    found = [address_towards(other, 1) for other in abroad] + [own]
    usable = (one for one in found if _is_address(one) and not is_loopback(one))
    return next(usable, socket.gethostname())


def _is_address(text: str) -> bool:
    """Whether this is an IPv4 address, which is what boards listen on."""
    try:
        return ip_address(text).version == 4
    except ValueError:
        return False


def address_of(interface: str) -> str:
    """Return the IPv4 address of a network interface of this host (Linux)."""
    from fcntl import ioctl

    known = [name for _, name in socket.if_nameindex()]
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            asked = struct.pack("256s", interface.encode()[:15])
            return socket.inet_ntoa(ioctl(any_socket.fileno(), SIOCGIFADDR, asked)[20:24])
    except OSError as error:
        raise BadRequest(
            f"--interface {interface} has no IPv4 address there ({error.strerror}): its interfaces"
            f" are {', '.join(known)}"
        ) from None


def unreached(board: str, secret: bytes, rank: int) -> str | None:
    """Connect to the board as a rank does; return why that failed, None if it did not."""
    try:
        with wire.reach(board, REACH_S, 60.0) as line:
            if wire.read_exactly(line, len(wire.GREETING)) != wire.GREETING:
                return "another program answers there"
            of_board, of_rank = wire.read_exactly(line, wire.NONCE_BYTES), wire.nonce()
            said = {"rank": rank, "alive": False}
            line.sendall(wire.hello(secret, of_board, of_rank, said))
            answer = wire.read_exactly(line, wire.MAC_BYTES)
            right = wire.same(answer, wire.welcome(secret, of_board, of_rank))
            return None if right else "another program answers there"
    except (OSError, TransportError) as error:
        return str(getattr(error, "strerror", None) or error)


def _free_port() -> int:
    """A port that is free now, for scripts that call `torch.distributed.init_process_group`."""
    with socket.socket() as found:
        found.bind(("", 0))
        return int(found.getsockname()[1])
