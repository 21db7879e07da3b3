"""Every error that Paceline raises on purpose.

PacelineError
├── BadRequest            the request cannot be carried out         (exit code 2)
│   ├── UnknownName       a name is not registered
│   └── DataUnavailable   a data set is not on this host
└── RunFailed             the request was valid, but the run failed (exit code 1)
    ├── DataCorrupt       a file does not have the expected content
    ├── NotFinite         the loss or the weights became nan or inf
    ├── ReplicasDiffer    workers that should have the same weights do not
    ├── TransportError    a transport could not move bytes
    │   ├── PeerLost      a rank has ended
    │   └── PeerSlow      a rank has not answered for `give_up_s`, and may or may not have ended
    └── WorkerFailed      a worker raised or died; carries its rank and its traceback

KeyboardInterrupt
└── Interrupted           Ctrl-C, SIGTERM or SIGHUP during a run, after its record was written
                          (exit codes 130, 143, 129); SIGUSR1 or --max-time (exit code 75)

A sentence that says what to type is written for the command line: `use --transport gloo`. A reader
in Python sees `use transport="gloo"`. `PacelineError.__str__` and `voiced` make the difference;
`on_the_command_line` says which reader this process has.
"""

from __future__ import annotations

import difflib
import re
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

# A command line to type stays as it is: `paceline data fetch mnist`, `paceline report DIR --pdf`.
_COMMAND = r"paceline [a-z]+(?: [^\s;,)`]+)*"
_FLAG = (
    r"(?<![\w-])--(?:set ([a-z_.]+)=([^\s,;:)`]+)"
    r"|([a-z][a-z0-9-]*)(?:[ =]([^\s,;:()`](?:[^\s,;:)`]|:(?=\w))*))?)"
)
# Words that go on with the sentence after a flag: they are not its value.
_NO_VALUES = (
    "and", "are", "as", "asked", "but", "for", "goes", "has", "in", "instead", "is", "it", "makes",
    "needs", "or", "out", "repeats", "rule", "sets", "so", "takes", "that", "to", "which", "with",
    "would",
)  # fmt: skip
_SWITCHES = ("compile", "force", "profile", "watch")  # flags without a value
LEFT = 75  # the exit code of a run to be started again: EX_TEMPFAIL in sysexits.h
_reads_flags = False  # whether the reader has typed a command line


@contextmanager
def on_the_command_line() -> Iterator[None]:
    """While the body runs, errors and notices speak of flags: the reader has typed a command."""
    global _reads_flags
    before, _reads_flags = _reads_flags, True
    try:
        yield
    finally:
        _reads_flags = before


def voiced(text: str) -> str:
    """Return a sentence in the words of this process's reader: flags, or arguments in Python."""
    return text if _reads_flags else in_python(text)


def in_python(text: str) -> str:
    """Return a sentence with arguments in the place of flags.

    `--workers 2` becomes `workers=2`, `--transport gloo` becomes `transport="gloo"`, and a flag
    without a value its name in backticks. Commands to type (`paceline ...`) stay.
    """
    return re.sub(f"({_COMMAND})|{_FLAG}", _argument, text)


def _argument(found: re.Match[str]) -> str:
    command, setting, set_to, flag, value = found.groups()
    if command:
        return str(command)
    if setting:
        return f"{setting}={_literal(set_to)}"
    name = flag.replace("-", "_")
    if value is None or value in _NO_VALUES:
        after = "" if value is None else f" {value}"
        return f"{name}=True{after}" if name in _SWITCHES else f"`{name}`{after}"
    if name in _SWITCHES:
        return f"{name}=True {value}"
    end = value[len(value.rstrip(".")) :]
    return f"{name}={_literal(value.rstrip('.'))}{end}"


def _literal(value: str) -> str:
    """Write a value as Python has it; a placeholder such as FILE stays bare."""
    number = re.fullmatch(r"-?[0-9][0-9_]*(\.[0-9]+)?(e-?[0-9]+)?", value)
    return value if number or re.fullmatch("[A-Z]+", value) else f'"{value}"'


class PacelineError(Exception):
    """Base of the tree; `exit_code` is the exit code of the command line."""

    exit_code = 1
    told = False  # another rank reports this error to the user

    def __str__(self) -> str:
        return voiced(super().__str__())


class BadRequest(PacelineError, ValueError):
    exit_code = 2


class UnknownName(BadRequest):
    """A name that is not registered; the message lists all names and suggests the nearest."""

    def __init__(self, kind: str, given: str, known: Iterable[str], hint: str = "") -> None:
        self.kind, self.given, self.known, self.hint = kind, given, sorted(known), hint
        near = difflib.get_close_matches(given, self.known, n=1)
        guess = f" Did you mean {near[0]!r}?" if near else ""
        names = ", ".join(self.known) or "none"
        super().__init__(
            f"unknown {kind} {given!r}.{guess} Available: {names}.{' ' + hint if hint else ''}"
        )

    def __reduce__(self) -> tuple[type, tuple[str, str, list[str], str]]:
        return type(self), (self.kind, self.given, self.known, self.hint)


class DataUnavailable(BadRequest):
    pass


class RunFailed(PacelineError, RuntimeError):
    pass


class DataCorrupt(RunFailed):
    pass


class NotFinite(RunFailed):
    pass


class ReplicasDiffer(RunFailed):
    pass


class TransportError(RunFailed):
    pass


class PeerLost(TransportError):
    """A rank that others wait for has ended; `rank` is None if the transport cannot tell which."""

    def __init__(self, rank: int | None, detail: str = "") -> None:
        self.rank, self.detail = rank, detail
        who = "a rank" if rank is None else f"rank {rank}"
        super().__init__(f"{who} is gone{': ' + detail if detail else ''}")

    def __reduce__(self) -> tuple[type, tuple[int | None, str]]:
        return type(self), (self.rank, self.detail)


class PeerSlow(TransportError):
    """The run has given a slow rank up, after `give_up_s`. No strategy goes on without that rank.

    `rank` is its rank in the world; None if the ranks waited for each other.
    """

    def __init__(self, rank: int | None, waited_s: float, what: str = "") -> None:
        self.rank, self.waited_s, self.what = rank, waited_s, what
        who = "a rank" if rank is None else f"rank {rank}"
        doing = f", while waiting for {what}" if what else ""
        super().__init__(
            f"no answer from {who} within {waited_s:g} s{doing}: if it is only slow, use a longer"
            " --give-up-s"
        )

    def __reduce__(self) -> tuple[type, tuple[int | None, float, str]]:
        return type(self), (self.rank, self.waited_s, self.what)


class WorkerFailed(RunFailed):
    """A worker raised an error that is not in this tree, or its process died."""

    def __init__(self, rank: int, summary: str, worker_traceback: str = "") -> None:
        self.rank, self.summary, self.worker_traceback = rank, summary, worker_traceback
        super().__init__(f"worker {rank} failed: {summary}")

    def __reduce__(self) -> tuple[type, tuple[int, str, str]]:
        return type(self), (self.rank, self.summary, self.worker_traceback)


class Interrupted(KeyboardInterrupt):
    """A signal or its time limit has ended the run.

    `number` says which signal, and the exit code is that of a shell; it is `LEFT` where the run
    left with a checkpoint, for SIGUSR1 or --max-time (no signal: `number` is 0).
    """

    told = False

    def __init__(self, text: str = "interrupted", number: int = signal.SIGINT) -> None:
        self.number = number
        super().__init__(text)

    @property
    def exit_code(self) -> int:
        return LEFT if self.number in (0, signal.SIGUSR1) else 128 + self.number


def to_plain(error: PacelineError) -> dict[str, Any]:
    """An error as JSON: the name of its class and the arguments of its constructor.

    An error of another class (a plugin's) becomes one of its nearest base class in this file, with
    the same message.
    """
    kind = type(error)
    if BY_NAME.get(kind.__name__) is kind and str(kind(*error.__reduce__()[1])) == str(error):
        return {"error": kind.__name__, "arguments": list(error.__reduce__()[1])}
    nearest = next(c for c in (*kind.__mro__, RunFailed) if c in PLAIN)
    return {"error": nearest.__name__, "arguments": [str(error)]}


def from_plain(said: Any) -> PacelineError:
    """Make the error that `to_plain` wrote.

    Only classes of this file are made, so that text from an untrusted sender can do no harm.
    """
    try:
        return BY_NAME[said["error"]](*said["arguments"])
    except (KeyError, TypeError, ValueError, AttributeError):
        return TransportError("another rank reported a failure in a form that cannot be read")


_ALL: list[type[PacelineError]] = [
    BadRequest,
    UnknownName,
    DataUnavailable,
    RunFailed,
    DataCorrupt,
    NotFinite,
]
_ALL += [ReplicasDiffer, TransportError, PeerLost, PeerSlow, WorkerFailed]
BY_NAME: dict[str, type[PacelineError]] = {kind.__name__: kind for kind in _ALL}
PLAIN = tuple(kind for kind in _ALL if "__init__" not in vars(kind))  # made from a message alone
