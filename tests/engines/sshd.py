"""Machines that are reached by ssh: hosts of a testbed, each with an OpenSSH server of its own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from paceline.common.links import Links
from paceline.testbed import build
from paceline.testbed.hosts import LAUNCHER, Testbed
from tests.engines.engine import until

ROOT = Path(__file__).parent.parent.parent
PATH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"  # where Debian has sshd
SSHD, KEYGEN = shutil.which("sshd", path=PATH), shutil.which("ssh-keygen")
MAIN = "from paceline.cli.entry import main; main()"
CONFIG = """
Port 22
ListenAddress {address}
HostKey {folder}/host-key-{host}
AuthorizedKeysFile {folder}/authorized_keys
SetEnv PYTHONPATH={source}
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
StrictModes no
UsePAM no
PidFile none
MaxStartups 100
"""


def missing() -> str | None:
    """What this machine lacks for these tests, and the command that installs it."""
    if SSHD is None or KEYGEN is None or shutil.which("ssh") is None:
        return "OpenSSH's server is not here: apt-get install openssh-server openssh-client"
    return build.missing()


class Machines:
    """Hosts host-0, host-1, ... with an sshd each, and the end of the network where a user is."""

    def __init__(self, folder: Path, bed: Testbed) -> None:
        self.folder, self.bed = folder, bed
        self.servers: list[subprocess.Popen[bytes]] = []
        self._key("user-key")
        self._key("strangers-key")
        shutil.copy(folder / "user-key.pub", folder / "authorized_keys")
        known = []
        for host in range(bed.hosts):
            self._key(f"host-key-{host}")
            public = (folder / f"host-key-{host}.pub").read_text().split()[:2]
            known.append(f"host-{host},{bed.address(host)} {' '.join(public)}\n")
        (folder / "known_hosts").write_text("".join(known))
        (folder / "known_to_nobody").touch()
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd separates its privileges there
        for host in range(bed.hosts):
            self._serve(host)

    def _key(self, name: str) -> None:
        command = [str(KEYGEN), "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name)]
        subprocess.run(command, check=True, timeout=30)

    def _serve(self, host: int) -> None:
        file, log = self.folder / f"sshd-{host}", self.folder / f"sshd-{host}.log"
        file.write_text(
            CONFIG.format(
                address=self.bed.address(host), folder=self.folder, host=host, source=ROOT / "src"
            )
        )
        with log.open("wb") as written:
            self.servers.append(
                subprocess.Popen(
                    [str(SSHD), "-D", "-e", "-f", str(file)],
                    stdin=subprocess.DEVNULL,
                    stderr=written,
                    preexec_fn=lambda: self._own_place(host),  # noqa: PLW1509 (one thread here)
                )
            )
        until(f"sshd {host}", lambda: "Server listening" in log.read_text(), 30)

    def _own_place(self, host: int) -> None:
        """In the new process: enter the host, with a folder there that no other host sees."""
        self.bed.enter(host)
        own = self.folder / "own"
        own.mkdir(exist_ok=True)
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(own)], check=True)

    @property
    def ssh(self) -> str:
        return self.ssh_with("user-key", "known_hosts")

    def ssh_with(self, key: str, known_hosts: str) -> str:
        """What `--ssh` is given: nothing of this machine's own configuration is read."""
        return (
            f"ssh -F none -i {self.folder / key} -o IdentitiesOnly=yes -o IdentityAgent=none"
            f" -o UserKnownHostsFile={self.folder / known_hosts} -o GlobalKnownHostsFile=none"
        )

    def launch(self, *words: str, ssh: str | None = None, **more: Any) -> subprocess.Popen[str]:
        """Start `paceline launch WORDS` at the user's end of the network."""
        command = [sys.executable, "-c", MAIN, "launch", "--ssh", ssh or self.ssh, *words]
        given = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "text": True,
            "env": {**os.environ, "PYTHONPATH": str(ROOT / "src")},
            **more,
        }
        return subprocess.Popen(command, preexec_fn=lambda: self.bed.enter(LAUNCHER), **given)  # noqa: PLW1509

    def processes(self, host: int) -> list[psutil.Process]:
        """The processes on a host, but for the server that listens."""
        command = ["ip", "netns", "pids", self.bed.namespace(host)]
        pids = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
        found = []
        for pid in map(int, pids):
            with suppress(psutil.NoSuchProcess):
                one = psutil.Process(pid)
                if pid != self.servers[host].pid and one.status() != psutil.STATUS_ZOMBIE:
                    found.append(one)
        return found

    def named(self, host: int, *words: str) -> list[psutil.Process]:
        """The processes on a host whose command line contains all words."""
        found = []
        for one in self.processes(host):
            with suppress(psutil.NoSuchProcess):
                line = " ".join(one.cmdline())
                if all(word in line for word in words):
                    found.append(one)
        return found

    def ranks(self, host: int) -> dict[int, psutil.Process]:
        """The ranks on a host, by number."""
        found = {}
        for one in self.processes(host):
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                own = one.environ()
                parent = one.parent()
                if (
                    "PACELINE_SECRET" in own
                    and parent
                    and "PACELINE_SECRET" not in parent.environ()
                ):
                    found[int(own["RANK"])] = one
        return found

    def nothing_is_left(self) -> None:
        def left() -> list[str]:
            hosts = range(self.bed.hosts)
            return [f"{host}: {one}" for host in hosts for one in self.processes(host)]

        with suppress(AssertionError):
            until("all processes end", lambda: not left(), 40)
        assert not left()

    def end(self) -> None:
        for server in self.servers:
            server.terminate()
        for server in self.servers:
            server.wait(30)


@contextmanager
def machines(folder: Path, hosts: int) -> Iterator[Machines]:
    """Build the network and start the servers; nothing of them is left."""
    with build.lasting(hosts, Links()) as bed:
        made = Machines(folder, bed)
        try:
            yield made
        finally:
            made.end()


def finish(process: subprocess.Popen[str], timeout_s: float = 150) -> tuple[int, str, str]:
    """Wait for the end of a launcher; return its exit code and what it has printed."""
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        out, err = process.communicate()
        raise AssertionError(f"the launcher did not end:\n{out}\n{err}") from None
    return process.returncode, out, err


def words(options: dict[str, object]) -> Sequence[str]:
    """Options of `train` as flags."""
    return [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
