"""Start the ranks of `paceline launch --hosts`, wait for them, and say how they have ended."""

from __future__ import annotations

import secrets
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from paceline import __version__
from paceline.errors import LEFT, BadRequest, Interrupted, RunFailed
from paceline.launch.processes import describe_end
from paceline.launch.seat import find
from paceline.launch.secret import BOARD, HOSTS, LAUNCHER, SECRET
from paceline.launch.ssh.crew import Crew, lost
from paceline.launch.ssh.hosts import Host, described
from paceline.launch.ssh.line import Line, Message

GRACE_S = 5.0  # after the first failure: the other ranks notice it, and write their record
STOP_S = 60.0  # after a signal: the ranks write a checkpoint and their record
END_S = 5.0  # between asking a rank to end (SIGTERM) and killing it
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
MISTAKE = BadRequest.exit_code  # of a rank that has refused the request
TRAIN = "from paceline.cli.entry import main; main()"


@dataclass(frozen=True)
class Wanted:
    """What is started where, as the user has asked for."""

    hosts: Sequence[Host]  # with their ranks
    command: tuple[str, ...]  # `train` and its options, or a script and its arguments
    ssh: list[str]
    python: str  # on the hosts
    cd: str  # the folder on the hosts where the ranks start
    folder: str | None = None  # that all hosts must see; None: it is not known
    interface: str | None = None  # of the first host
    threads: int | None = None
    lost_s: float = 60.0

    @property
    def trains(self) -> bool:
        return self.command[0] == "train"

    @property
    def size(self) -> int:
        return sum(len(host.ranks) for host in self.hosts)

    @property
    def words(self) -> list[str]:
        """What Python on a host is called with."""
        return ["-c", TRAIN, *self.command] if self.trains else list(self.command)


def launch_on_hosts(wanted: Wanted) -> None:
    """Start the ranks on their hosts and wait. The first rank that fails ends all others."""
    if find() is not None:
        raise BadRequest("paceline launch runs inside a launcher already: start the command itself")
    secret = secrets.token_bytes(32)
    with Crew(wanted.hosts, wanted.ssh, wanted.python, wanted.lost_s) as crew:
        crew.greet()
        _refuse_other_versions(crew.lines)
        told = _prepare(crew, wanted, secret)
        crew.show_life()
        with hearing() as heard:
            _start(crew, wanted, secret, told)
            watch = _Watch(crew, heard)
            watch.wait()
            crew.end(END_S)
    watch.conclude(wanted)


def _refuse_other_versions(lines: Sequence[Line]) -> None:
    for line in lines:
        found = line.greeting or {}
        if found["paceline"] is None:
            raise BadRequest(
                f"host {line.host} has no Paceline in {found['executable']} (Python"
                f" {found['python']}; {found['why']}): install paceline=={__version__} there, or"
                " name the interpreter that has it with --python PATH"
            )
        if found["paceline"] != __version__:
            raise BadRequest(
                f"host {line.host} has Paceline {found['paceline']} in {found['executable']}, and"
                f" this machine has Paceline {__version__}: install the same version on both, or"
                " name another interpreter with --python PATH"
            )


def _prepare(crew: Crew, wanted: Wanted, secret: bytes) -> Message:
    """Let the first host open the board, and the others look whether they reach it.

    The secret goes over ssh's standard input, which other users cannot read.
    """
    first, *others = crew.lines
    common: dict[str, Any] = {
        "cd": wanted.cd,
        "script": None if wanted.trains else wanted.command[0],
        "secret": secret.hex(),
        "lost_s": wanted.lost_s,
    }
    asked = {
        **common,
        "do": "prepare",
        "alone": not others,
        "folder": wanted.folder if others else None,
        "interface": wanted.interface,
        "towards": [_reached_at(line) for line in others],
        "own": _reached_at(first),
    }
    [told] = crew.ask([first], asked)
    looked = {**common, "do": "look", "board": told["board"], "token": told["token"]}
    for line, answer in zip(others, crew.ask(others, looked), strict=True):
        if not answer["seen"]:
            raise BadRequest(
                f"--out {wanted.folder} is not shared by the hosts: a file that {first.host} has"
                f" written there is not there on {line.host}. Name a folder that all hosts see (on"
                " NFS, for example)"
            )
        if answer["unreached"] is not None:
            raise BadRequest(
                f"host {line.host} does not reach host {first.host} at"
                f" {told['board'].partition(':')[2]} ({answer['unreached']}), and ranks talk to"
                f" each other directly: name an interface or address of {first.host} that the other"
                " hosts reach with --interface, or open its ports to them"
            )
    return told


def _reached_at(line: Line) -> str:
    """The address at which ssh has reached a host: the third word of its SSH_CONNECTION."""
    words = str((line.greeting or {}).get("connection", "")).split()
    return words[2] if len(words) == 4 else ""


def _start(crew: Crew, wanted: Wanted, secret: bytes, told: Message) -> None:
    master, port = told["master"]
    environment = {
        "MASTER_ADDR": str(master),
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(wanted.size),
        SECRET: secret.hex(),
        BOARD: told["board"],
        LAUNCHER: "ssh",
        HOSTS: ",".join(host.name for host in wanted.hosts),
        "PYTHONUNBUFFERED": "1",  # what a rank prints arrives when it prints it
    }
    for line in crew.lines:
        line.send(
            do="start",
            ranks=line.host.ranks,
            environment=environment,
            command=wanted.words,
            set_threads=not wanted.trains,  # `train` counts the cores of its host itself
            threads=wanted.threads,
        )


class _Watch:
    """Waits for the ranks and remembers what ended first."""

    def __init__(self, crew: Crew, heard: list[int]) -> None:
        self._crew, self._heard = crew, heard
        self._failed: dict[int, tuple[Host, int]] = {}  # by rank, in the order of their ends
        self._lost: list[RunFailed] = []
        self.stopped: int | None = None  # the signal that has ended the run

    def wait(self) -> None:
        """Wait until all ranks have ended, or until some time after a failure or a signal."""
        until = float("inf")
        while True:
            self._crew.pump()
            until = min(until, self._pass_on(until), self._look())
            if time.monotonic() > until or all(
                line.over or not line.running for line in self._crew.lines
            ):
                return

    def _pass_on(self, until: float) -> float:
        """Pass on signals to all ranks; return when the wait ends because of them.

        After one that ends the run, a second one ends it at once.
        """
        while self._heard:
            number = self._heard.pop(0)
            if self.stopped is not None:
                return 0.0
            for line in self._crew.lines:
                line.send(do="signal", number=number)
            if number != signal.SIGUSR1:
                self.stopped = number
                until = time.monotonic() + STOP_S
        return until

    def _look(self) -> float:
        """Note what has failed; return when the wait ends because of it."""
        grace_s = float("inf")
        for line in self._crew.lines:
            for rank, code in line.codes.items():
                if code and rank not in self._failed:
                    self._failed[rank] = line.host, code
                    grace_s = min(grace_s, STOP_S if code == LEFT else GRACE_S)
            if line.over and line.running and not self._lost:
                self._lost.append(lost(line))
                grace_s = GRACE_S
        return time.monotonic() + grace_s if self.stopped is None else float("inf")

    def conclude(self, wanted: Wanted) -> None:
        """Raise what has ended the run, if something has."""
        if self.stopped is not None:
            name = signal.Signals(self.stopped).name
            by = "" if self.stopped == signal.SIGINT else f" by {name}"
            where = described(wanted.hosts)
            raise Interrupted(f"interrupted{by}; the ranks on {where} were ended", self.stopped)
        if self._lost:
            raise RunFailed(f"{self._lost[0]}; the others were ended")
        if not self._failed:
            return
        # A rank that a signal has ended is the cause; the others only lost it.
        killed = [rank for rank, (_, code) in self._failed.items() if code < 0]
        rank = next(iter([*killed, *self._failed]))
        host, code = self._failed[rank]
        failure = RunFailed(
            f"rank {rank} on host {host}: {describe_end(code)}; the others were ended"
        )
        if code in (LEFT, MISTAKE):
            failure.exit_code = code
            failure.told = wanted.trains  # rank 0 has said why
        raise failure


@contextmanager
def hearing() -> Iterator[list[int]]:
    """Collect signals inside the block, instead of obeying them.

    Those that are ignored (`nohup`) stay so. Only the main thread can hear signals.
    """
    heard: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield heard
        return

    def hear(number: int, frame: FrameType | None) -> None:
        heard.append(number)

    before = {}
    for number in PASSED_ON:
        if signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, hear)
    try:
        yield heard
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
