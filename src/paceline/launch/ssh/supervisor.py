"""The supervisor of one host: it starts the ranks of that host, passes on what they print, and
ends them.

It reads orders from its standard input, which is the connection to the launcher and its lifeline:
when it is closed, or silent for too long, the ranks end (SIGTERM, then SIGKILL to each one's
process group). It has one thread, and imports no PyTorch.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

from paceline.common.cores import cores
from paceline.common.parents import dying_with_parent
from paceline.errors import BadRequest, PacelineError
from paceline.launch.ssh import checks
from paceline.launch.ssh.output import Lines

LOST_S = 60.0  # without a sign of life from the launcher
END_S = 5.0  # between asking a rank to end (SIGTERM) and killing it
LOOK_S = 0.05  # between two looks at the ranks
MOST_WAITING_BYTES = 1 << 20  # of output that the launcher has not taken: then the ranks wait
FOR_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


class Rank:
    """A rank's process, the leader of a group of its own."""

    def __init__(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        self.rank, self.process = rank, process
        self.told = False  # its end was reported
        self.open: dict[int, Lines] = {}  # by descriptor: its output that has not ended

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def send(self, number: int) -> None:
        if self.alive:
            with suppress(ProcessLookupError):
                self.process.send_signal(number)

    def kill_group(self) -> None:
        """Kill the rank and all processes that it has started in its group."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)


class Supervisor:
    """One connection to the launcher, and the ranks that it has asked for."""

    def __init__(self, inlet: int = 0, outlet: int = 1) -> None:
        self._inlet, self._outlet = inlet, outlet
        self._came, self._out = bytearray(), bytearray()
        self._ranks: list[Rank] = []
        self._prepared = checks.Prepared()
        self._heard_at, self._lost_s = time.monotonic(), LOST_S
        self._kill_at: float | None = None  # once it is ending
        self._selector = selectors.DefaultSelector()
        self._asked_to_end = False

    def run(self, first: bytes) -> int:
        """Obey the launcher until it has no more ranks here, or is gone."""
        for number in FOR_SIGNALS:  # a handler, which a rank does not inherit
            signal.signal(number, self._hear)
        os.set_blocking(self._inlet, False)
        os.set_blocking(self._outlet, False)
        self._selector.register(self._inlet, selectors.EVENT_READ)
        self._came += first
        try:
            self._obey_all()
            while not self._over():
                self._turn()
        finally:
            for rank in self._ranks:
                if not rank.told:
                    rank.kill_group()
            self._prepared.close()
        return 0

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._asked_to_end = True

    def _turn(self) -> None:
        waiting = len(self._out) > MOST_WAITING_BYTES
        for key, _ in self._selector.select(LOOK_S):
            if key.fd == self._inlet:
                self._listen()
            elif isinstance(key.data, Rank) and not waiting:
                self._read(key.data, key.fd)
        if waiting:
            time.sleep(LOOK_S)  # the ranks' pipes are readable, and are not read
        for rank in self._ranks:
            if not rank.told and not rank.alive:
                self._report(rank)
        self._flush()
        silent_s = time.monotonic() - self._heard_at
        if self._asked_to_end or silent_s > self._lost_s:
            self._end(END_S)
        if self._kill_at is not None and time.monotonic() > self._kill_at:
            for rank in self._ranks:
                if not rank.told:
                    rank.kill_group()

    def _over(self) -> bool:
        if self._kill_at is None or not all(rank.told for rank in self._ranks):
            return False
        return not self._out or time.monotonic() > self._kill_at

    # --- the launcher

    def _listen(self) -> None:
        try:
            part = os.read(self._inlet, 1 << 16)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        if not part:  # the connection is gone
            self._selector.unregister(self._inlet)
            self._end(END_S)
            return
        self._heard_at = time.monotonic()
        self._came += part
        self._obey_all()

    def _obey_all(self) -> None:
        while b"\n" in self._came:
            line, _, rest = bytes(self._came).partition(b"\n")
            self._came = bytearray(rest)
            order = json.loads(line)
            try:
                self._obey(order)
            except PacelineError as error:
                # As it was written, with flags: the reader has typed a command.
                said = str(error.args[0])
                self._say(refused=said, mistake=isinstance(error, BadRequest))

    def _obey(self, order: dict[str, Any]) -> None:
        what = order["do"]
        answers: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "prepare": self._prepared.first,
            "look": self._prepared.other,
        }
        if what in answers:
            self._lost_s = float(order["lost_s"])
            self._say(answer=answers[what](order))
            self._flush()
        elif what == "start":
            self._prepared.remove_token()
            self._start(order)
        elif what == "signal":
            for rank in self._ranks:
                rank.send(int(order["number"]))
        elif what == "end":
            self._end(float(order["grace_s"]))

    def _say(self, **content: Any) -> None:
        self._out += json.dumps(content).encode() + b"\n"

    def _flush(self) -> None:
        try:
            while self._out:
                del self._out[: os.write(self._outlet, self._out[: 1 << 16])]
        except BlockingIOError:
            pass
        except OSError:  # the launcher reads no more; the end of the input says so, too
            self._out.clear()

    # --- the ranks

    def _start(self, order: dict[str, Any]) -> None:
        own: list[int] = order["ranks"]
        common = {**os.environ, **order["environment"], "LOCAL_WORLD_SIZE": str(len(own))}
        if order["set_threads"]:
            threads = order["threads"] or max(1, cores() // len(own))
            if order["threads"] or "OMP_NUM_THREADS" not in os.environ:
                common["OMP_NUM_THREADS"] = str(threads)
        die_with_this = dying_with_parent(os.getpid())
        for local, number in enumerate(own):
            environment = {**common, "RANK": str(number), "LOCAL_RANK": str(local)}
            # A preexec_fn is safe here: this process has one thread.
            process = subprocess.Popen(
                [sys.executable, *order["command"]],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                preexec_fn=die_with_this,  # noqa: PLW1509
            )
            rank = Rank(number, process)
            self._ranks.append(rank)
            for stream, is_error in ((process.stdout, False), (process.stderr, True)):
                assert stream is not None
                os.set_blocking(stream.fileno(), False)
                rank.open[stream.fileno()] = Lines(is_error)
                self._selector.register(stream.fileno(), selectors.EVENT_READ, rank)

    def _read(self, rank: Rank, descriptor: int) -> bool:
        """Pass on what a rank has printed; returns whether there may be more."""
        lines = rank.open[descriptor]
        try:
            part = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            return False
        for text in lines.add(part) if part else lines.rest():
            self._say(rank=rank.rank, error=lines.is_error, text=text)
        if not part:
            self._selector.unregister(descriptor)
            del rank.open[descriptor]
        return bool(part)

    def _report(self, rank: Rank) -> None:
        """Report the end of a rank, after everything that it has printed.

        Processes that it has left behind in its group end with it.
        """
        for descriptor in tuple(rank.open):
            while self._read(rank, descriptor):
                pass
        rank.kill_group()
        for descriptor in tuple(rank.open):  # such a process may hold it open
            self._selector.unregister(descriptor)
            del rank.open[descriptor]
        rank.told = True
        self._say(rank=rank.rank, code=rank.process.returncode)

    def _end(self, grace_s: float) -> None:
        """Ask all ranks to end; those that have not after `grace_s` are killed."""
        if self._kill_at is None:
            for rank in self._ranks:
                rank.send(signal.SIGTERM)
        until = time.monotonic() + grace_s
        self._kill_at = until if self._kill_at is None else min(self._kill_at, until)
