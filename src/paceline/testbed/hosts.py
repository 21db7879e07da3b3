"""A testbed: hosts on one machine, each a network namespace with an address and a link to a switch.

    host 0 -- eth0 ======== port 0 -- switch -- port 1 ======== eth0 -- host 1
                  shaped both ways     |
                                    launcher

The switch is a bridge in a namespace of its own, and the launcher's end is in another. So nothing
of the machine's own network (its firewall, its addresses) changes. A process enters a host after it
was forked; from then on its connections go through that host's link.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import signal
import socket
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.common.links import Links
from paceline.errors import RunFailed

NAMESPACES = Path("/run/netns")
LAUNCHER = "launcher"  # the name of the launcher's end
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET = 0x00020000, 0x04000000, 0x40000000
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000


@dataclass(frozen=True)
class Testbed:
    """A network of hosts that is up."""

    name: str
    hosts: int
    links: Links
    subnet: str  # 10.213.7
    folder: str  # with each host's /etc/hosts; its path has neither spaces nor colons
    notices: tuple[str, ...] = ()

    @property
    def launcher(self) -> str:
        """The launcher's address, which all hosts can reach."""
        return f"{self.subnet}.254"

    def host(self, index: int) -> int:
        """Return the host of a rank; ranks are dealt out in turn."""
        return index % self.hosts

    def address(self, host: int) -> str:
        return f"{self.subnet}.{host + 1}"

    def namespace(self, host: int | str) -> str:
        return f"{self.name}-{host}"

    @property
    def namespaces(self) -> list[str]:
        return [self.namespace(host) for host in ("switch", LAUNCHER, *range(self.hosts))]

    def enter(self, host: int | str) -> None:
        """Move this process to a host, or to the `launcher`'s end; it must have one thread only."""
        with open(NAMESPACES / self.namespace(host)) as namespace:
            _call(
                "setns", ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET)
            )
        self.take_names(host)

    def take_names(self, host: int | str) -> None:
        """Give this process the host's name and its /etc/hosts.

        Without them names would be looked up at name servers that a host cannot reach.
        """
        libc = ctypes.CDLL(None, use_errno=True)
        _call("unshare", libc.unshare(CLONE_NEWNS | CLONE_NEWUTS))
        _call("mount", libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None))
        for file in ("hosts", "resolv.conf"):
            if Path(f"/etc/{file}").exists():
                source = str(Path(self.folder) / str(host) / file).encode()
                _call(
                    f"mount {file}",
                    libc.mount(source, f"/etc/{file}".encode(), None, MS_BIND, None),
                )
        socket.sethostname(host_name(host) if isinstance(host, int) else host)

    def remote_shell(self) -> str:
        """Write a command that starts a process on a host, as ssh does, and return its path.

        mpirun calls it as `PATH host-1 COMMAND`, and splits its path at spaces.
        """
        path = Path(self.folder) / "remote-shell"
        path.write_text(
            "#!/bin/sh\n"
            'while [ "${1#-}" != "$1" ]; do shift; done\n'
            "n=${1#host-}; shift\n"
            f'exec ip netns exec {shlex.quote(self.name)}-"$n" unshare --uts sh -c "hostname'
            ' host-$n; $*"\n'
        )
        path.chmod(0o700)
        return str(path)

    def down(self) -> None:
        """Delete all namespaces and files of the testbed.

        Never call this for a testbed that could not be built: a namespace that has one of its names
        may belong to another process.
        """
        remove(self.namespaces, self.folder)


def host_name(host: int) -> str:
    return f"host-{host}"


def remove(namespaces: list[str], folder: str) -> None:
    """Delete these network namespaces, where they exist, and the folder.

    Processes that are still in them end: mpirun's daemons do not when a link is down.
    """
    for namespace in namespaces:
        if (NAMESPACES / namespace).exists():
            _end_all_in(namespace)
            subprocess.run(["ip", "netns", "del", namespace], check=False, capture_output=True)
    shutil.rmtree(folder, ignore_errors=True)


def _end_all_in(namespace: str) -> None:
    found = subprocess.run(
        ["ip", "netns", "pids", namespace], check=False, capture_output=True, text=True
    )
    for word in found.stdout.split():
        if int(word) != os.getpid():
            with suppress(ProcessLookupError, PermissionError):
                os.kill(int(word), signal.SIGKILL)


def _call(what: str, code: int) -> None:
    if code != 0:
        raise RunFailed(
            f"cannot enter a host of the testbed: {what}: {os.strerror(ctypes.get_errno())}"
        )
