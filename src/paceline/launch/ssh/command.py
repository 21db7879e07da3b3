"""The command line of `ssh` for one host, and what its failure means in one sentence."""

from __future__ import annotations

import re
import secrets
import shlex
from importlib.resources import files

from paceline.errors import BadRequest
from paceline.launch.ssh.hosts import Host

CONNECT_S = 9  # for ssh to reach a host
# The first line of the standard input is a program, since every quotation mark in it would have to
# survive the shell of the host, whichever that is. It is read without a buffer, which would
# swallow what follows.
FIRST = 'exec(eval(open(0, "rb", 0, closefd=False).readline()))'


def ssh_words(given: str) -> list[str]:
    """Split the user's `--ssh 'ssh -p 2222'`."""
    try:
        words = shlex.split(given)
    except ValueError as error:
        raise BadRequest(f"--ssh {given!r} cannot be read as a command: {error}") from None
    if not words:
        raise BadRequest("--ssh is empty: write a command, such as --ssh 'ssh -p 2222 -i KEY'")
    return words


def command_line(ssh: list[str], host: Host, python: str, lost_s: float) -> list[str]:
    """Return the command that starts Python on a host.

    BatchMode: ssh never asks for a password. Options of the user's own come first, and with ssh the
    first one counts. Nothing secret is among the words, since every user of both hosts sees them.
    """
    every = max(1, round(lost_s / 4))  # ssh gives up a host before the ranks do
    options = {
        "BatchMode": "yes",
        "ConnectTimeout": str(CONNECT_S),
        "ServerAliveInterval": str(every),
        "ServerAliveCountMax": "3",
        "ControlMaster": "no",  # a connection of its own, which ends with this process
        "ForwardX11": "no",
        "LogLevel": "ERROR",
    }
    added = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    there = f"{quoted(python)} -u -c {shlex.quote(FIRST)}"
    return [*ssh, *added, "-T", "--", host.destination, there]


def quoted(path: str) -> str:
    """Quote a path for a shell; `~/` at its beginning stays the user's home there."""
    return f"~/{shlex.quote(path[2:])}" if path.startswith("~/") else shlex.quote(path)


def first_line(mark: str) -> bytes:
    """The program that Python on a host runs first (boot.py), as one line."""
    source = files("paceline.launch.ssh").joinpath("boot.py").read_text()
    return repr(f"{source}\nbegin({mark!r})\n").encode() + b"\n"


def new_mark() -> str:
    """What the host's first answer begins with. A shell there may print a greeting before it."""
    return f"paceline-{secrets.token_hex(8)}:"


def explain(host: Host, said: str, code: int | None, python: str, ssh: list[str]) -> str:
    """Say in one sentence why a host could not be used, from ssh's own words and its exit code."""
    last = next((line.strip() for line in reversed(said.splitlines()) if line.strip()), "")
    by_hand = shlex.join([*ssh, host.destination])
    for pattern, sentence in REASONS:
        if re.search(pattern, said):
            return sentence.format(host=host.destination, by_hand=by_hand, last=last)
    if code in (126, 127):
        return (
            f"host {host} has no Python that can be started at {python} ({last}): name the"
            " interpreter that has Paceline there with --python PATH"
        )
    if code == 255:
        return f"host {host} cannot be reached: {last or 'ssh says nothing'} (try: {by_hand})"
    if "SyntaxError" in said:
        return f"host {host}: {python} is too old for Paceline: name another with --python PATH"
    how = f"exit code {code}" if code is not None else "no answer"
    return f"host {host}: {python} could not be started there: {last or how} (try: {by_hand})"


# What ssh says, and what it means.
REASONS = (
    (
        r"Could not resolve hostname|Name or service not known",
        "host {host} has no address here: ssh cannot resolve its name. Check the spelling, or name"
        " it in ~/.ssh/config or /etc/hosts",
    ),
    (
        r"Connection refused",
        "host {host} refuses the connection: no SSH server listens at that port there. Start one,"
        " or name its port with --ssh 'ssh -p PORT' ({last})",
    ),
    (
        r"REMOTE HOST IDENTIFICATION HAS CHANGED",
        "host {host} shows another host key than the one in known_hosts: it was installed anew, or"
        " another machine answers in its place. If you know which, remove the old key:"
        " ssh-keygen -R {host}",
    ),
    (
        r"Host key verification failed|host key is known|Host key for",
        "host {host} has a host key that ssh does not know: connect once by hand and compare it"
        " ({by_hand}), or accept it with --ssh 'ssh -o StrictHostKeyChecking=accept-new'",
    ),
    (
        r"Permission denied \(|Too many authentication failures|sign_and_send_pubkey",
        "host {host} refuses your key, and ssh may not ask for a password here: {by_hand} must work"
        " without one. Copy your key there (ssh-copy-id), load it (ssh-add), or name it with"
        " --ssh 'ssh -i KEY' ({last})",
    ),
    (
        r"timed out|No route to host|Network is unreachable|Host is down",
        "host {host} does not answer ({last}): is it up, and is there a way to it from here?",
    ),
    (
        r"Identity file .* not accessible|Load key|Bad configuration option|usage: ssh",
        "ssh refuses its options ({last}): check what you gave with --ssh",
    ),
)
