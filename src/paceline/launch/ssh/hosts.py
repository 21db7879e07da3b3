"""The hosts of `--hosts` and `--hosts-file`, and the ranks that each of them gets."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.errors import BadRequest

# No name begins with a hyphen: ssh would take it for an option.
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
ADDRESS = re.compile(r"[0-9A-Fa-f:.]+(%[\w.-]+)?")  # IPv6
MOST_SLOTS = 1024
HOW = "write names with commas between them: a,b:2,me@c (two ranks on b)"


@dataclass(frozen=True)
class Host:
    """One machine: how ssh reaches it, and how many ranks it takes."""

    name: str
    slots: int = 1
    user: str = ""
    ranks: tuple[int, ...] = ()  # that run there

    @property
    def destination(self) -> str:
        """What ssh is called with."""
        return f"{self.user}@{self.name}" if self.user else self.name

    def __str__(self) -> str:
        return self.name


def read_hosts(text: str) -> list[Host]:
    """Read `a,b:2,me@c`."""
    return _merged([_host(word.strip()) for word in text.split(",")])


def read_hosts_file(file: str) -> list[Host]:
    """Read a file with a host per line: `a`, `me@b:2`, or `b slots=2` as mpirun has it."""
    try:
        lines = Path(file).read_text().splitlines()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not a text"
        raise BadRequest(f"--hosts-file {file} cannot be read: {reason}") from None
    found = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            slots = [w.removeprefix("slots=") for w in words[1:] if w.startswith("slots=")]
            if len(words) > 2 or len(slots) != len(words) - 1:
                raise BadRequest(f"{' '.join(words)!r} is not a host: write a, me@b:2 or b slots=2")
            found.append(_host(":".join([words[0], *slots])))
        except BadRequest as error:
            raise BadRequest(f"--hosts-file {file}, line {number}: {error}") from None
    if not found:
        raise BadRequest(f"--hosts-file {file} names no host")
    return _merged(found)


def deal(hosts: Sequence[Host], ranks: int | None = None) -> list[Host]:
    """Give each host its ranks, in order; hosts that get none are left out.

    `ranks`: how many there are in all; None: as many as the hosts take.
    """
    slots = sum(host.slots for host in hosts)
    wanted = slots if ranks is None else ranks
    if wanted > slots:
        first = hosts[0]
        more = replace(first, slots=first.slots + wanted - slots)
        raise BadRequest(
            f"{wanted} ranks need {wanted} slots, and {described(hosts)}"
            f" {'has' if len(hosts) == 1 else 'have'} {slots}: add hosts, or more slots"
            f" (--hosts {','.join(written(h) for h in [more, *hosts[1:]])})"
        )
    dealt, begin = [], 0
    for host in hosts:
        end = min(begin + host.slots, wanted)
        if end > begin:
            dealt.append(replace(host, ranks=tuple(range(begin, end))))
        begin = end
    return dealt


def described(hosts: Sequence[Host]) -> str:
    """Name the hosts in a sentence."""
    return ", ".join(host.name for host in hosts)


def written(host: Host) -> str:
    """The host as the user writes it."""
    name = f"[{host.name}]" if ":" in host.name else host.name
    at = f"{host.user}@{name}" if host.user else name
    return at if host.slots == 1 else f"{at}:{host.slots}"


def _host(text: str) -> Host:
    if not text:
        raise BadRequest(f"a host has no name: {HOW}")
    user, at, rest = text.rpartition("@")
    if at and not NAME.fullmatch(user):
        raise BadRequest(f"{text!r}: {user!r} is not the name of a user; {HOW}")
    if bracketed := re.fullmatch(r"\[([^\]]*)\](?::(.*))?", rest):
        name, slots = bracketed[1], bracketed[2]
    elif rest.count(":") > 1:
        name, slots = rest, None
    else:
        name, colon, after = rest.partition(":")
        slots = after if colon else None
    if not NAME.fullmatch(name) and not (":" in name and ADDRESS.fullmatch(name)):
        raise BadRequest(f"{text!r} is not a host: {HOW}")
    if slots is not None and not (slots.isascii() and slots.isdigit() and int(slots) > 0):
        raise BadRequest(f"{text!r}: after the colon comes a number of ranks, 1 or more; {HOW}")
    if slots is not None and int(slots) > MOST_SLOTS:
        raise BadRequest(
            f"{text!r} would be {slots} ranks: after the colon comes a number of ranks; a port"
            f" belongs into --ssh 'ssh -p {slots}'"
        )
    return Host(name, 1 if slots is None else int(slots), user)


def _merged(hosts: Sequence[Host]) -> list[Host]:
    """Add the slots of a host that is named several times."""
    found: dict[str, Host] = {}
    for host in hosts:
        earlier = found.get(host.destination)
        slots = host.slots + (earlier.slots if earlier else 0)
        found[host.destination] = replace(host, slots=slots)
    return list(found.values())
