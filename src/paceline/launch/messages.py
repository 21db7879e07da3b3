"""What a rank tells the process that started it: events during the run, then a result or an error.

A message is a pair (kind, content). The kinds "done" and "error" end a rank's part.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from paceline.errors import PacelineError
from paceline.launch.failures import as_failure
from paceline.transport.base import Rendezvous

Hear = Callable[[str, dict[str, Any]], None]
Body = Callable[[Rendezvous, Hear], Any]  # what a rank does; its result or its error comes back


def teller(connection: Connection) -> Hear:
    """Return a function that sends messages, for all threads of a rank.

    One thread computes, and another reports slow peers; a lock keeps their messages apart.
    """
    lock = threading.Lock()

    def tell(kind: str, content: dict[str, Any]) -> None:
        with lock:
            connection.send((kind, content))

    return tell


def tell_result(connection: Connection, result: Any) -> None:
    # Pickled here, so that tensors travel as plain bytes, not as handles of shared memory.
    connection.send(("done", {"result": pickle.dumps(result)}))


def tell_error(connection: Connection, rank: int, error: BaseException) -> None:
    with suppress(OSError):  # the launcher is gone
        connection.send(("error", {"error": pickle.dumps(as_failure(rank, error))}))


class Outcome:
    """The results and the failures of all ranks, as their messages arrive."""

    def __init__(self, hear: Hear) -> None:
        self.results: dict[int, Any] = {}
        self.failures: dict[int, PacelineError] = {}
        self._hear = hear

    def take(self, rank: int, connection: Connection) -> bool:
        """Read all messages that have arrived from a rank. Returns whether it closed its end."""
        messages, closed = drain(connection)
        for kind, content in messages:
            if kind == "done":
                self.results[rank] = pickle.loads(content["result"])
            elif kind == "error":
                self.failures[rank] = pickle.loads(content["error"])
            else:
                self._hear(kind, content)
        return closed

    def has(self, rank: int) -> bool:
        return rank in self.results or rank in self.failures


def drain(connection: Connection) -> tuple[list[tuple[str, dict[str, Any]]], bool]:
    """Return the messages that have arrived, and whether the other end is closed."""
    messages = []
    try:
        while connection.poll():
            messages.append(connection.recv())
    except (EOFError, OSError):
        return messages, True
    return messages, False
