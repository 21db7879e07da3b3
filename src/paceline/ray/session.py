"""A driver's session with Ray: with a cluster that is up, or with one that lasts as long as it."""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import Any

from paceline.common.extras import need
from paceline.errors import BadRequest, PacelineError, RunFailed

REACH_S = 5.0  # how long the cluster's head may take to accept a connection, and to answer
CPUS_S = 5.0  # for the cluster's nodes to register
WHAT = "launcher=ray"
PRINTS = "print_to_stdstream"  # the function in Ray's module that prints raylets' messages
HOW = "Is it up? (`ray status` on its head says so)"
# The beginning of an HTTP/2 connection, and the type of the frame that a server answers with.
SETTINGS = b"\x04"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + SETTINGS + bytes(5)
QUIET = {  # set while Ray starts, where the user has not set them
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # or Ray warns that it will change this one day
}

FEW_TRIES = {"RAY_NUM_REDIS_GET_RETRIES": "4"}  # of a second each, to reach a head; Ray's own: 20


class Session:
    """Connect to a cluster, or start one, for a `with` block; or use the program's own session.

    `address`: `host:port` of the cluster's head, `auto` for the cluster that this machine is a node
    of, or `local` for one that is started here and ends with the block. A session of the program is
    left as it is.
    """

    def __init__(self, address: str, cpus: int) -> None:
        self.address, self.cpus = address, cpus
        self.started = False  # whether this block started the cluster
        self._theirs = False
        self._before: dict[str, Any] = {}  # of Ray's module, replaced in this session

    def __enter__(self) -> Session:
        loaded = sys.modules.get("ray")
        self._theirs = loaded is not None and bool(loaded.is_initialized())
        if not self._theirs and find_spec("ray") is not None:
            check_address(self.address)  # before Ray is imported, which takes seconds
        variables = QUIET | (FEW_TRIES if self.address != "local" else {})
        with _set(variables):
            self.ray = need("ray", "ray[train]", "ray", WHAT)
        if self._theirs:
            self._refuse_another()
            return self
        self._inside = need("ray._private.worker", "ray[train]", "ray", WHAT)
        self.started = self.address == "local"
        own: dict[str, Any] = {"address": self.address}
        if self.started:
            own |= {"num_cpus": self.cpus, "include_dashboard": False}
        try:
            with _set(variables), _handlers_kept():
                self.ray.init(log_to_driver=False, logging_level=logging.ERROR, **own)
            self._hush()
        except BaseException as error:
            with suppress(Exception):
                self.ray.shutdown()
            if not isinstance(error, Exception):
                raise
            raise not_connected(self.address, error) from None
        return self

    def __exit__(self, *_: Any) -> None:
        self.end()

    def end(self) -> None:
        """End what belongs to this session: its actors, and the cluster that it started."""
        if not self._theirs:
            self.ray.shutdown()
            vars(self._inside).update(self._before)

    def _hush(self) -> None:
        """Leave out what Ray prints on standard output when it loses a process: pages of its log.

        `log_to_driver=False` does not cover that.
        """
        if PRINTS in vars(self._inside):
            self._before = {PRINTS: vars(self._inside)[PRINTS]}
            vars(self._inside)[PRINTS] = lambda *_, **__: None

    @property
    def theirs(self) -> bool:
        """Whether the program had a session before."""
        return self._theirs

    def _refuse_another(self) -> None:
        here = str(self.ray.get_runtime_context().gcs_address)
        if self.address not in ("auto", "local", here):
            raise BadRequest(
                f"master={self.address}, but this program already has a session with the Ray"
                f" cluster at {here}: leave master out, or call ray.shutdown() first"
            )

    @property
    def place(self) -> str:
        """The address of the cluster's head."""
        return str(self.ray.get_runtime_context().gcs_address)

    def enough(self, ranks: int, cpus: int, kind: str = "CPU") -> None:
        """Refuse more ranks than the cluster has room for; Ray itself would wait for ever."""
        until = time.monotonic() + CPUS_S
        while not self._room(ranks, cpus, kind):
            if time.monotonic() > until:
                has = int(self.ray.cluster_resources().get(kind, 0))
                each = "" if cpus == 1 else f" with {cpus} {kind}s each"
                raise BadRequest(
                    f"{ranks} ranks{each}, but the Ray cluster at {self.place} has {has} {kind}(s)"
                    f" on {len(self._nodes())} node(s): use fewer workers, or add nodes"
                )
            time.sleep(0.2)

    def _room(self, ranks: int, each: int, kind: str) -> bool:
        """Whether all ranks fit on the nodes at once, were nothing else running there."""
        return sum(int(node.get(kind, 0)) // each for node in self._nodes()) >= ranks

    def _nodes(self) -> list[dict[str, float]]:
        return [dict(node["Resources"]) for node in self.ray.nodes() if node["Alive"]]

    def waits_for_room(self) -> bool:
        """Whether Ray has not found free CPUs yet for something that was asked for."""
        asked = self.ray.util.placement_group_table()
        return any(each["state"] in ("PENDING", "RESCHEDULING") for each in asked.values())


def check_address(address: str) -> None:
    """Refuse at once what is no address, or what does not answer."""
    if address in ("auto", "local"):
        return
    if address.startswith("ray://"):
        raise BadRequest(
            f"master={address}: a driver of Ray Train must run on a node of the cluster. Run"
            " paceline there with its host:port, or by `ray job submit -- paceline train ...`"
        )
    if re.fullmatch(r"[^:/,\s]+:\d+", address) is None:
        raise BadRequest(f"master={address}: write host:port of the Ray cluster, auto or local")
    host, port = address.split(":")
    try:
        with socket.create_connection((host, int(port)), REACH_S) as connection:
            answers = _speaks(connection)
    except (OSError, OverflowError) as error:  # OverflowError: no such port
        reason = getattr(error, "strerror", None) or str(error)
        raise BadRequest(
            f"master={address}: no Ray cluster answers there: {reason}. {HOW}"
        ) from None
    if not answers:
        raise BadRequest(
            f"master={address}: something listens there, but it does not answer as the head of a"
            f" Ray cluster. {HOW}"
        )


def _speaks(connection: socket.socket) -> bool:
    """Whether the other side speaks HTTP/2, as the head of a Ray cluster does.

    Ray itself would ask anything that listens there for minutes.
    """
    if os.environ.get("RAY_USE_TLS", "0") != "0":
        return True
    connection.settimeout(REACH_S)
    try:
        connection.sendall(PREFACE)
        return connection.recv(4)[3:] == SETTINGS
    except OSError:
        return False


def not_connected(address: str, error: Exception) -> PacelineError:
    """Return why a session with the cluster could not begin."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = lines[0] if lines else type(error).__name__
    if address == "local":
        return RunFailed(f"Ray could not be started here: {first[:300]}")
    if address == "auto" and isinstance(error, ConnectionError):
        return BadRequest(
            "master=auto: this machine is no node of a running Ray cluster: start one"
            " with `ray start`, give its host:port, or leave master out for a cluster of this run"
        )
    return BadRequest(f"master={address} cannot be used: {first[:300]}. {HOW}")


@contextmanager
def _handlers_kept() -> Iterator[None]:
    """Restore the handler of SIGTERM: Ray replaces it by one that leaves the program."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _set(environment: dict[str, str]) -> Iterator[None]:
    """Set variables that are not set, for the processes that Ray starts, and remove them again."""
    new = {key: value for key, value in environment.items() if key not in os.environ}
    os.environ.update(new)
    try:
        yield
    finally:
        for key in new:
            os.environ.pop(key, None)
