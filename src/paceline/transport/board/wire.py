"""How a rank and the board talk: a handshake with the run's secret, then authenticated JSON.

    board -> rank   GREETING, a nonce
    rank  -> board  a nonce, what the rank says about itself, HMAC(secret, both nonces and that)
    board -> rank   HMAC(secret, both nonces): the board knows the secret, too
    then, each way  length, HMAC(key of this direction, number of the message, JSON), JSON

Every connection has fresh nonces, and every message its number, so that nothing can be replayed.
The secret itself is never sent. Only the standard library is used here, because the board of ranks
that another launcher started is a small process without PyTorch.
"""

from __future__ import annotations

import base64
import hmac
import json
import secrets
import socket
import struct
import time
from dataclasses import dataclass
from typing import Any

GREETING = b"paceline board 1\n"
NONCE_BYTES, MAC_BYTES, HEAD = 32, 32, struct.Struct("!I")
MOST_HELLO_BYTES = 1 << 10  # of a connection that has not shown the secret
MOST_BYTES = 64 << 20  # of one message
UNIX, TCP = "unix:", "tcp:"


class NotARank(Exception):
    """The other end of a connection has not shown that it knows the secret."""


@dataclass
class Sealed:
    """One end of a connection after the handshake: it seals what goes out, opens what comes in."""

    key_out: bytes
    key_in: bytes
    sent: int = 0
    received: int = 0

    def seal(self, content: Any) -> bytes:
        body = json.dumps(content).encode()
        mac = hmac.digest(self.key_out, self.sent.to_bytes(8) + body, "sha256")
        self.sent += 1
        return HEAD.pack(len(body)) + mac + body

    def open(self, mac: bytes, body: bytes) -> Any:
        right = hmac.digest(self.key_in, self.received.to_bytes(8) + body, "sha256")
        self.received += 1
        if not hmac.compare_digest(mac, right):
            raise NotARank("a message is not authenticated")
        return json.loads(body)


def nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def proof(secret: bytes, who: bytes, of_board: bytes, of_rank: bytes, said: bytes = b"") -> bytes:
    return hmac.digest(secret, who + of_board + of_rank + said, "sha256")


def same(one: bytes, other: bytes) -> bool:
    """Compare two authentication codes without telling by the time it takes where they differ."""
    return hmac.compare_digest(one, other)


def session(secret: bytes, of_board: bytes, of_rank: bytes, board: bool) -> Sealed:
    to_board = proof(secret, b"to the board", of_board, of_rank)
    to_rank = proof(secret, b"to the rank", of_board, of_rank)
    return Sealed(to_rank, to_board) if board else Sealed(to_board, to_rank)


def hello(secret: bytes, of_board: bytes, of_rank: bytes, said: dict[str, Any]) -> bytes:
    """What a rank sends first."""
    body = json.dumps(said).encode()
    mac = proof(secret, b"rank", of_board, of_rank, body)
    return HEAD.pack(len(body)) + of_rank + mac + body


def welcome(secret: bytes, of_board: bytes, of_rank: bytes) -> bytes:
    """What the board answers to a rank that knows the secret."""
    return proof(secret, b"board", of_board, of_rank)


def reach(address: str, timeout_s: float, lost_s: float) -> socket.socket:
    """Connect to the board at an address: `unix:NAME` (Linux's abstract names) or `tcp:HOST:PORT`.

    A TCP connection breaks when the other host has not answered for `lost_s`.
    """
    if address.startswith(UNIX):
        return _reach_here("\0" + address.removeprefix(UNIX), timeout_s)
    host, _, port = address.removeprefix(TCP).rpartition(":")
    line = socket.create_connection((host, int(port)), timeout_s)
    keep_alive(line, lost_s)
    return line


def _reach_here(name: str, timeout_s: float) -> socket.socket:
    line, until = socket.socket(socket.AF_UNIX), time.monotonic() + timeout_s
    line.settimeout(timeout_s)
    try:
        while True:
            try:
                line.connect(name)
                return line
            except BlockingIOError:  # many connect at the same time
                if time.monotonic() > until:
                    raise TimeoutError("too many connections are waiting") from None
            time.sleep(0.01)
    except BaseException:
        line.close()
        raise


def keep_alive(line: socket.socket, lost_s: float) -> None:
    """Let the kernel notice that the other host has not answered for `lost_s`.

    The other host's kernel answers for a process that is stopped or busy, so that such a process is
    not taken for lost.
    """
    if line.family == getattr(socket, "AF_UNIX", None):
        return
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in (
        ("TCP_KEEPIDLE", max(1, round(lost_s / 2))),
        ("TCP_KEEPINTVL", max(1, round(lost_s / 8))),
        ("TCP_KEEPCNT", 4),
        ("TCP_USER_TIMEOUT", max(1000, round(1000 * lost_s))),
    ):
        if hasattr(socket, name):
            line.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def text(value: str | bytes) -> str:
    """A value as JSON can hold it."""
    content = value.encode() if isinstance(value, str) else bytes(value)
    return base64.b64encode(content).decode()


def raw(value: str) -> bytes:
    return base64.b64decode(value)


def read_exactly(line: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = line.recv(count - len(parts))
        if not part:
            raise ConnectionResetError("the board closed the connection")
        parts += part
    return bytes(parts)
