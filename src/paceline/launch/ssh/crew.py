"""All hosts of a run, as the launcher sees them: one loop reads what they say and prints it."""

from __future__ import annotations

import os
import selectors
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from paceline.errors import BadRequest, PacelineError, RunFailed
from paceline.launch.ssh.command import explain
from paceline.launch.ssh.hosts import Host
from paceline.launch.ssh.line import Line, Message

GREET_S = 12.0  # for a host to answer at all
ASK_S = 30.0  # for a host that has answered to do what it is asked for
BEAT_S = 2.0  # between two signs of life
LOOK_S = 0.05
LEAVE_S = 8.0  # for the supervisors to end their ranks: longer than they wait before they kill


class Crew:
    """The connections to all hosts. The body of `with` uses them; then all are closed."""

    def __init__(
        self,
        hosts: Sequence[Host],
        ssh: list[str],
        python: str,
        lost_s: float,
        show: Callable[[Host, Message], None] | None = None,
    ) -> None:
        self._ssh, self._python = ssh, python
        self._show = show or print_line
        self._selector = selectors.DefaultSelector()
        self._over = threading.Event()
        self._beats = threading.Thread(target=self._beat, name="signs of life", daemon=True)
        self._ended_at: dict[str, float] = {}  # when the ssh of a host was seen to have ended
        self.lines: list[Line] = []
        try:
            for host in hosts:
                self.lines.append(line := Line(host, ssh, python, lost_s))
                for name in ("stdout", "stderr"):
                    stream = getattr(line.process, name)
                    os.set_blocking(stream.fileno(), False)
                    kind = "out" if name == "stdout" else "error"
                    self._selector.register(stream, selectors.EVENT_READ, (line, kind))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, BrokenPipeError):
            self._show = lambda host, message: None  # the reader of what is printed has gone
        self.close()

    def pump(self, wait_s: float = LOOK_S) -> None:
        """Wait a moment for what the hosts say, and print it."""
        for key, _ in self._selector.select(wait_s):
            line, kind = key.data
            try:
                part = os.read(key.fd, 1 << 16)
            except BlockingIOError:
                continue
            if not part:
                self._selector.unregister(key.fileobj)
            for message in line.take(kind, part):
                self._show(line.host, message)
        for line in self.lines:
            line.flush()
            self._look_at(line, time.monotonic())

    def show_life(self) -> None:
        """From now on let the supervisors know that this process lives.

        A thread does so: a terminal or a pager that is stopped holds up the one that prints.
        """
        self._beats.start()

    def _beat(self) -> None:
        while not self._over.wait(BEAT_S):
            for line in self.lines:
                line.beat()

    def _look_at(self, line: Line, now: float) -> None:
        """Note the end of an ssh, when everything that it has said is read."""
        if line.over or (code := line.process.poll()) is None:
            return
        since = self._ended_at.setdefault(line.host.destination, now)
        unread = any(key.data[0] is line for key in self._selector.get_map().values())
        if not unread or now > since + 1.0:  # another process may hold its output open
            line.code = code

    # --- questions

    def greet(self) -> None:
        """Wait until Python on all hosts has answered; refuse a host that cannot be used."""
        until = time.monotonic() + GREET_S
        while missing := [line for line in self.lines if line.greeting is None]:
            self.pump()
            for line in missing:
                if line.over and line.greeting is None:
                    raise self._unusable(line, line.code)
            if time.monotonic() > until:
                raise self._unusable(missing[0], None)

    def _unusable(self, line: Line, code: int | None) -> BadRequest:
        said = "\n".join(line.said)
        if code is None and not said:
            said = f"no answer within {GREET_S:g} s: the connection timed out"
        return BadRequest(explain(line.host, said, code, self._python, self._ssh))

    def ask(self, lines: Sequence[Line], order: dict[str, Any]) -> list[Message]:
        """Send an order to some hosts and return their answers."""
        counts = [len(line.answers) + 1 for line in lines]
        for line in lines:
            line.send(**order, ranks=line.host.ranks)
        return [self._answer(line, count) for line, count in zip(lines, counts, strict=True)]

    def _answer(self, line: Line, count: int) -> Message:
        until = time.monotonic() + ASK_S
        while len(line.answers) < count:
            if line.over:
                raise lost(line)
            if time.monotonic() > until:
                raise RunFailed(f"host {line.host} has not answered for {ASK_S:g} s")
            self.pump()
        message = line.answers[count - 1]
        if "refused" in message:
            kind: type[PacelineError] = BadRequest if message["mistake"] else RunFailed
            raise kind(f"host {line.host}: {message['refused']}")
        return dict(message["answer"])

    # --- the end

    def end(self, grace_s: float) -> None:
        """Let the supervisors end their ranks, and wait for that."""
        for line in self.lines:
            line.send(do="end", grace_s=grace_s)
        self._leave()

    def close(self) -> None:
        """Close all connections; the supervisors end their ranks, as they do after a loss."""
        self._over.set()
        if self._beats.is_alive():
            self._beats.join()
        for line in self.lines:
            line.flush()
            line.close()
            if line.greeting is None:  # it still tries to connect
                line.process.kill()
        self._leave()
        for line in self.lines:
            line.kill()
        self._selector.close()

    def _leave(self) -> None:
        until = time.monotonic() + LEAVE_S
        while time.monotonic() < until and not all(line.over for line in self.lines):
            self.pump()


def lost(line: Line) -> RunFailed:
    """The failure of a run whose connection to a host has ended too early."""
    words = next((text.strip() for text in reversed(line.said) if text.strip()), "")
    ranks = line.running
    which = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    return RunFailed(
        f"the connection to host {line.host} ({which}) was lost"
        f"{': ' + words if words else f' (ssh ended with exit code {line.code})'}"
    )


def print_line(host: Host, message: Message) -> None:
    """Print a line of a rank, with its host in front."""
    rank = "" if message["rank"] is None else f" rank {message['rank']}"
    stream = sys.stderr if message["error"] else sys.stdout
    print(f"[{host}{rank}] {message['text']}", file=stream, flush=True)
