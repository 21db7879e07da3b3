"""PyTorch's key-value store, where the ranks of a run meet."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from paceline.errors import TransportError
from paceline.transport.base import Rendezvous
from paceline.transport.patience import Patience

# For waits that have no deadline of their own: a server may hear nothing during a long evaluation.
LONG = timedelta(hours=24)


def open_store(host: str, port: int, timeout_s: float) -> Any:
    """Open a key-value store that listens on this address only ("0.0.0.0": on all addresses).

    PyTorch's TCPStore listens on all interfaces unless it is given a socket.
    """
    return store_on(socket.create_server((host, port)), timeout_s)


def store_on(listening: socket.socket, timeout_s: float) -> Any:
    """Open a key-value store on a socket that is listening."""
    host, port = listening.getsockname()[:2]
    timeout = timedelta(seconds=timeout_s)
    return dist.TCPStore(
        host, port, None, True, timeout, wait_for_workers=False, master_listen_fd=listening.detach()
    )


def connect_store(rendezvous: Rendezvous) -> Any:
    """Connect to the launcher's key-value store."""
    try:
        store = dist.TCPStore(
            rendezvous.host, rendezvous.port, None, False, timedelta(seconds=rendezvous.deadline_s)
        )
        if rendezvous.watched:  # a read may have to wait for a slow rank's write
            store.set_timeout(LONG)
        return store
    except RuntimeError as error:
        raise TransportError(
            f"no store answers at {rendezvous.host}:{rendezvous.port}: {first_line(error)}"
        ) from None


def patience_for(rendezvous: Rendezvous) -> Patience:
    """A rank's `Patience`. It opens its own connection to the store at the first long wait."""

    def connect() -> Any:
        return dist.PrefixStore(f"patience-{rendezvous.generation}", connect_store(rendezvous))

    patience = Patience(
        rendezvous.rank,
        rendezvous.size,
        rendezvous.deadline_s,
        connect,
        rendezvous.watched,
        rendezvous.give_up_s,
    )
    if rendezvous.status is not None:
        patience.open_status(rendezvous.status)
    return patience


def first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
