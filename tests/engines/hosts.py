"""Hosts on this machine: each has processes, a network, a name and mounts of its own.

A host is a set of namespaces. The kernel ends all its processes together with its first one, so
that ending a host leaves nothing behind, and it ends also when the test process is killed.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.common.parents import dying_with_parent
from tests.engines.engine import until

TOOLS = ("unshare", "nsenter", "ip", "mount")  # Debian: util-linux, iproute2, mount
# The first process of a host. Bash reaps the processes whose parents have ended.
INIT = """
hostname "$1" && mount --bind "$2" /etc/hosts && ip link set lo up && echo ready
while :; do sleep 3600 & wait $!; done
"""
# Mounts are the host's own, so a folder can be entered only from inside.
ENTER = 'cd "$1" && shift && exec "$@"'


class Host:
    """One host. `names` is its /etc/hosts."""

    def __init__(self, name: str, names: Path) -> None:
        self.name, self._names = name, names
        self._unshare: subprocess.Popen[str] | None = None
        self._started: list[subprocess.Popen[Any]] = []
        self.init = 0  # its first process, as this machine numbers it

    def start(self) -> None:
        separate = ["--fork", "--kill-child", "--pid", "--mount-proc", "--net", "--uts"]
        command = ["unshare", *separate, "bash", "-c", INIT, "init", self.name, str(self._names)]
        self._unshare = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=dying_with_parent(os.getpid()),  # noqa: PLW1509 (one thread here)
        )
        assert self._unshare.stdout is not None
        assert self._unshare.stdout.readline() == "ready\n", f"host {self.name} did not start"
        pid = self._unshare.pid
        self.init = int(Path(f"/proc/{pid}/task/{pid}/children").read_text())

    def inside(self, command: Sequence[str], folder: Path | str = "/") -> list[str]:
        """Return the command that runs another one on this host."""
        enter = [str(shutil.which("nsenter")), "-t", str(self.init), "-m", "-u", "-n", "-p", "--"]
        return [*enter, "/bin/sh", "-c", ENTER, "sh", str(folder), *command]

    def popen(
        self, command: Sequence[str], env: Mapping[str, str], folder: Path | str = "/", **more: Any
    ) -> subprocess.Popen[Any]:
        """Start a process on this host. It ends with the host at the latest."""
        process = subprocess.Popen(self.inside(command, folder), env=dict(env), **more)
        self._started.append(process)
        return process

    def run(
        self, command: Sequence[str], env: Mapping[str, str], folder: Path | str = "/"
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.inside(command, folder),
            env=dict(env),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def processes(self) -> dict[int, str]:
        """The processes of this host, but for its first one and what that waits for."""
        own = _namespace(self.init)
        found: dict[int, str] = {}
        for entry in Path("/proc").iterdir():
            with suppress(OSError, ValueError):
                pid = int(entry.name)
                if pid != self.init and own and _namespace(pid) == own:
                    line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    if line and not line.startswith("sleep 3600"):
                        found[pid] = line.strip()
        return found

    def end(self) -> None:
        """End the host and everything on it, as a power failure would."""
        if self._unshare is None:
            return
        with suppress(ProcessLookupError):
            os.kill(self.init, signal.SIGKILL)
        self._unshare.wait(30)
        assert self._unshare.stdout is not None
        self._unshare.stdout.close()
        for process in self._started:
            process.wait(30)
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
        until(f"{self.name} is gone", lambda: not self.processes(), 30)
        self._started.clear()
        self._unshare, self.init = None, 0


def _namespace(pid: int) -> str:
    with suppress(OSError):
        return os.readlink(f"/proc/{pid}/ns/pid")
    return ""


def connect(switch: Host, address: str, others: Mapping[str, Host]) -> None:
    """Connect hosts, by address, with a switch that is on one of them and has an address, too."""
    for command in (
        "ip link add br0 type bridge",
        f"ip address add {address}/24 dev br0",
        "ip link set br0 up",
    ):
        _do(switch, command)
    for own, host in others.items():
        plug_in(switch, own, host)


def plug_in(switch: Host, address: str, host: Host) -> None:
    """Connect one more host with the switch."""
    port = f"to-{host.name}"
    _do(switch, f"ip link add {port} type veth peer name eth0", inner=host.init)
    _do(switch, f"ip link set {port} master br0 up")
    _do(host, f"ip address add {address}/24 dev eth0")
    _do(host, "ip link set eth0 up")


def _do(host: Host, command: str, inner: int | None = None) -> None:
    """Run `ip` in a host's network; `inner`: the process to whose network the other end goes."""
    words = command.split() + ([] if inner is None else ["netns", str(inner)])
    # Only the network is entered, so that the number of a process means what it means here.
    subprocess.run(["nsenter", "-t", str(host.init), "-n", "--", *words], check=True, timeout=30)
