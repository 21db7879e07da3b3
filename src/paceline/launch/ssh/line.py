"""The launcher's end of the connection to one host."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from paceline.errors import BadRequest
from paceline.launch.signals import delayed
from paceline.launch.ssh.command import command_line, first_line, new_mark
from paceline.launch.ssh.hosts import Host
from paceline.launch.ssh.output import Lines

Message = dict[str, Any]
KEPT_LINES = 20  # of what ssh itself says, to explain its end


class Line:
    """One `ssh`, with the supervisor of a host at its other end."""

    def __init__(self, host: Host, ssh: list[str], python: str, lost_s: float) -> None:
        self.host = host
        self.greeting: Message | None = None  # what Python there has said first
        self.answers: list[Message] = []  # to `prepare` and `look`
        self.codes: dict[int, int] = {}  # of ranks that have ended
        self.code: int | None = None  # of ssh, once it has ended
        self.said: list[str] = []  # the last lines of ssh and of the host's Python
        self._mark, self._out = new_mark(), bytearray()
        self._writing = threading.Lock()  # a thread of its own sends the signs of life
        self._streams = {"out": Lines(whole=True), "error": Lines(is_error=True)}
        self.process = self._start(command_line(ssh, host, python, lost_s))
        assert self.process.stdin is not None
        os.set_blocking(self.process.stdin.fileno(), False)
        self._out += first_line(self._mark)
        self.flush()

    def _start(self, command: list[str]) -> subprocess.Popen[bytes]:
        # A session of its own: Ctrl-C is for the launcher, and ssh has no terminal to ask at.
        try:
            with delayed():
                return subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env={**os.environ, "SSH_ASKPASS_REQUIRE": "never"},
                    start_new_session=True,
                )
        except OSError as error:
            raise BadRequest(
                f"{command[0]} cannot be started ({error.strerror}): install it (apt-get install"
                " openssh-client), or name it with --ssh"
            ) from None

    @property
    def over(self) -> bool:
        return self.code is not None

    @property
    def running(self) -> list[int]:
        """The ranks of this host that have not ended, as far as is known here."""
        return [rank for rank in self.host.ranks if rank not in self.codes]

    def send(self, **order: Any) -> None:
        """Send an order, as soon as the connection takes it."""
        with self._writing:
            self._out += json.dumps(order).encode() + b"\n"
        self.flush()

    def beat(self) -> None:
        """Show the supervisor that the launcher lives, unless it has not read the last orders."""
        if not self._out:
            self.send(do="beat")

    def flush(self) -> None:
        """Write as much as the connection takes."""
        with self._writing:
            self._write()

    def _write(self) -> None:
        assert self.process.stdin is not None
        if self.process.stdin.closed:
            self._out.clear()
        try:
            while self._out:
                del self._out[: os.write(self.process.stdin.fileno(), self._out)]
        except BlockingIOError:
            pass
        except OSError:  # ssh has ended; its exit code says so
            self._out.clear()

    def take(self, stream: str, part: bytes) -> Iterator[Message]:
        """Read what came; give the lines to print as {"rank", "error", "text"}."""
        lines = self._streams[stream]
        for text in lines.add(part) if part else lines.rest():
            if stream == "out":
                yield from self._heard(text)
            else:
                self.said = [*self.said, text][-KEPT_LINES:]
                if self.greeting is not None:
                    yield {"rank": None, "error": True, "text": text}

    def _heard(self, text: str) -> Iterator[Message]:
        if self.greeting is None:
            before, mark, after = text.partition(self._mark)
            if mark:
                self.greeting = json.loads(after)
            elif before.strip():  # what a shell there prints; it may say what is wrong
                self.said = [*self.said, before][-KEPT_LINES:]
            return
        try:
            message: Message = json.loads(text)
        except ValueError:  # something else there writes to the connection
            yield {"rank": None, "error": True, "text": text}
            return
        if "code" in message:
            self.codes[int(message["rank"])] = int(message["code"])
        elif "text" in message:
            yield message
        else:
            self.answers.append(message)

    def close(self) -> None:
        """Close the connection: the supervisor notices, and ends its ranks."""
        assert self.process.stdin is not None
        with self._writing, suppress(OSError):
            self.process.stdin.close()

    def kill(self) -> None:
        self.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()
