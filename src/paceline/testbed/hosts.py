"""Hosts on one machine: a network namespace each, an address each, and a link to a switch.

    host 0 -- eth0 ======== port 0 -- switch -- port 1 ======== eth0 -- host 1
                  shaped both ways     |
                                    launcher

The switch is a bridge in a namespace of its own, and so is the launcher's end, so nothing of the
machine's own network (its firewall, its addresses) is touched but for one address of the launcher.
A process enters a host after it was forked; from then on its connections go through that host's
link. The process that made a testbed takes it down, and if it is killed, a watcher does. Only
namespaces that a testbed has made itself are ever deleted.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.common.links import Links
from paceline.errors import BadRequest, RunFailed
from paceline.testbed.shaping import can_delay, shaping

STANDING = Path("/run/paceline-testbed.json")  # the one that `paceline testbed up` made
NAMESPACES = Path("/run/netns")
FOLDER = "paceline-testbed-"  # how a testbed's folder begins
MOST_HOSTS = 64
LAUNCHER = "launcher"  # what it calls its own end
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET = 0x00020000, 0x04000000, 0x40000000
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000


@dataclass(frozen=True)
class Testbed:
    """A network that is up."""

    name: str
    hosts: int
    links: Links
    subnet: str  # 10.213.7
    folder: str  # of each host's files (/etc/hosts); its path has neither spaces nor colons
    notices: tuple[str, ...] = ()

    @property
    def launcher(self) -> str:
        """The address of this side, which all hosts can reach."""
        return f"{self.subnet}.254"

    def host(self, index: int) -> int:
        """Which host a rank is on: ranks are dealt out."""
        return index % self.hosts

    def address(self, host: int) -> str:
        return f"{self.subnet}.{host + 1}"

    def namespace(self, host: int | str) -> str:
        return f"{self.name}-{host}"

    @property
    def namespaces(self) -> list[str]:
        return [self.namespace(host) for host in ("switch", LAUNCHER, *range(self.hosts))]

    def enter(self, host: int | str) -> None:
        """From now on this process (it must have one thread only) is on that host, or at the
        `launcher`'s end.
        """
        with open(NAMESPACES / self.namespace(host)) as namespace:
            _call(
                "setns", ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET)
            )
        self.take_names(host)

    def take_names(self, host: int | str) -> None:
        """The host's own name, and its own list of names: without it names are looked up where
        nobody answers.
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
        """A command that starts another on a host, as ssh would: `AGENT host-1 COMMAND`. mpirun
        splits it at spaces.
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
        """Take down what was built, all of it: never call this for a testbed whose
        building failed.
        """
        _remove(self.namespaces, self.folder)
        with contextlib.suppress(OSError, ValueError, KeyError):
            if json.loads(STANDING.read_text())["name"] == self.name:
                STANDING.unlink()


def host_name(host: int) -> str:
    return f"host-{host}"


def missing() -> str | None:
    """What this machine lacks for a testbed; None: nothing."""
    if sys.platform != "linux":
        return "a testbed needs Linux: network namespaces"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"a testbed needs the command {tool}: apt-get install iproute2"
    if os.geteuid() != 0:
        return (
            "a testbed needs root: namespaces and links are the system's (sudo, or a container of"
            " your own with CAP_SYS_ADMIN)"
        )
    return None


def _planned(hosts: int, links: Links, name: str | None) -> Testbed:
    """Named and numbered; nothing is made yet."""
    if not 1 <= hosts <= MOST_HOSTS:
        raise BadRequest(f"{hosts} hosts: a testbed has 1 to {MOST_HOSTS}")
    if (reason := missing()) is not None:
        raise BadRequest(reason)
    notices: list[str] = []
    if links.latency_s and not can_delay():
        notices.append(
            "this kernel cannot shape latency (no netem): the links have their rate only, not"
            f" {links.latency_s * 1e3:g} ms"
        )
        links = Links(links.rate, 0.0)
    subnet = _free_subnet()
    folder = tempfile.mkdtemp(prefix=FOLDER, dir=_plain_place())
    return Testbed(
        name or f"pl{secrets.token_hex(8)}", hosts, links, subnet, folder, tuple(notices)
    )


def _plain_place() -> str:
    """Where a testbed's folder goes: its path becomes part of mpirun's options, which are split at
    spaces and colons.
    """
    places = (tempfile.gettempdir(), "/tmp", "/var/tmp")
    for place in places:
        if re.fullmatch(r"[\w./+-]+", place, re.ASCII) and os.access(place, os.W_OK):
            return place
    raise BadRequest(
        "a testbed needs a folder for temporary files whose path has letters, digits and . / + - _"
        f" only, and {places[0]} is not one: set TMPDIR to another"
    )


def up(hosts: int, links: Links, name: str | None = None) -> Testbed:
    """Make a network of hosts. What was made is taken down again if the rest cannot be made."""
    bed = _planned(hosts, links, name)
    _build(bed)
    return bed


def _build(bed: Testbed, tell: Callable[[str], None] = lambda _: None) -> None:
    """Make all of it, or nothing: `tell` hears of each namespace just before it is made."""
    made: list[str] = []
    try:
        _make(bed, made, tell)
    except subprocess.CalledProcessError as error:
        _remove(made, bed.folder)
        raise BadRequest(
            f"a testbed cannot be made here: {' '.join(error.cmd)}: {error.stderr.strip()}"
        ) from None
    except BaseException:
        _remove(made, bed.folder)
        raise


def _make(bed: Testbed, made: list[str], tell: Callable[[str], None]) -> None:
    for space in bed.namespaces:
        if (NAMESPACES / space).exists():
            raise BadRequest(
                f"a network namespace {space} exists already, and another process made it: try"
                " again"
            )
        tell(space)
        _run("ip", "netns", "add", space)  # fails where the name is taken
        made.append(space)
    switch = bed.namespace("switch")
    _inside(
        switch,
        "ip",
        "link",
        "add",
        "bridge",
        "type",
        "bridge",
        "stp_state",
        "0",
        "forward_delay",
        "0",
    )
    _inside(switch, "ip", "link", "set", "bridge", "up")
    _connect(bed, LAUNCHER, bed.launcher, Links())
    for host in range(bed.hosts):
        _connect(bed, host, bed.address(host), bed.links)


def _connect(bed: Testbed, host: int | str, address: str, links: Links) -> None:
    """A host, with its link to the switch, and with its names."""
    switch, space, port = bed.namespace("switch"), bed.namespace(host), f"port{host}"[:15]
    _inside(
        switch, "ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", space
    )
    _inside(switch, "ip", "link", "set", port, "master", "bridge", "up")
    _inside(space, "ip", "addr", "add", f"{address}/24", "dev", "eth0")
    _inside(space, "ip", "link", "set", "eth0", "up")
    _inside(space, "ip", "link", "set", "lo", "up")
    for command in shaping(links, "eth0"):
        _inside(space, *command)
    for command in shaping(links, port):
        _inside(switch, *command)
    own = Path(bed.folder) / str(host)
    own.mkdir()
    names = {bed.launcher: LAUNCHER, **{bed.address(h): host_name(h) for h in range(bed.hosts)}}
    lines = [
        f"{form}{found} {name}" for found, name in names.items() for form in ("", "::ffff:")
    ]  # some ask in IPv6's words
    (own / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
    (own / "resolv.conf").write_text("")


@contextmanager
def lasting(hosts: int, links: Links) -> Iterator[Testbed]:
    """A network for as long as this lasts; taken down also if this process is killed."""
    bed = _planned(hosts, links, None)
    watcher = _watcher(bed)  # before anything is made
    assert watcher.stdin is not None
    telling = watcher.stdin

    def tell(namespace: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # without a watcher, `down` still takes it down
            telling.write(f"{namespace}\n".encode())

    try:
        try:
            _build(bed, tell)
        except Exception:
            # what was made is gone again, and the last name that it was told of may be another's
            watcher.kill()
            raise
        try:
            yield bed
        finally:
            bed.down()
    finally:
        telling.close()
        watcher.wait()


WATCHER = """
trap '' INT TERM HUP
folder=$1; shift
while read -r namespace; do set -- "$@" "$namespace"; done
for namespace; do ip netns del "$namespace" 2>/dev/null; done
rm -rf -- "$folder"
"""


def _watcher(bed: Testbed) -> subprocess.Popen[bytes]:
    """Takes the network down when its standard input closes: when this process ends, however it
    ends.

    Its standard input names the namespaces, a line each. Names and paths reach the shell as
    arguments, never as its text.
    """
    command = ["sh", "-c", WATCHER, "sh", bed.folder]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, bufsize=0, start_new_session=True
    )


# --- the one that stands until it is taken down


def raise_standing(hosts: int, links: Links) -> Testbed:
    recorded = _recorded()
    if recorded is not None and _stands(recorded):
        raise BadRequest(
            f"a testbed is up already ({recorded.hosts} hosts, {recorded.links}): paceline testbed"
            " down"
        )
    if (reason := missing()) is not None:
        raise BadRequest(reason)
    if recorded is not None:
        recorded.down()  # what a restart of the machine has left of it
    bed = up(hosts, links, f"paceline-{secrets.token_hex(8)}")
    try:
        with STANDING.open("x") as record:
            json.dump({**asdict(bed), "links": str(bed.links)}, record)
    except FileExistsError:
        bed.down()
        raise BadRequest(
            "another process has brought a testbed up in the meantime: paceline testbed status"
        ) from None
    except BaseException:
        bed.down()
        raise
    return bed


def standing() -> Testbed | None:
    """The one that `paceline testbed up` made, if all of it is there: a restart of the machine
    takes it down, too.
    """
    bed = _recorded()
    return bed if bed is not None and _stands(bed) else None


def take_down() -> bool:
    """The standing one, or what is left of it; whether there was anything."""
    if (reason := missing()) is not None:
        raise BadRequest(reason)
    bed = _recorded()
    if bed is None:
        return False
    found = any((NAMESPACES / space).exists() for space in bed.namespaces)
    bed.down()
    return found


def _recorded() -> Testbed | None:
    """What the record of `paceline testbed up` says: it alone tells which namespaces that command
    made.
    """
    try:
        text, owner = STANDING.read_bytes(), STANDING.stat().st_uid
    except OSError:
        return None
    try:
        said: dict[str, Any] = json.loads(text)
        bed = Testbed(
            said["name"],
            int(said["hosts"]),
            Links.read(said["links"]),
            said["subnet"],
            said["folder"],
        )
        if owner not in (0, os.geteuid()) or not Path(bed.folder).name.startswith(FOLDER):
            raise ValueError
    except (ValueError, KeyError, TypeError, BadRequest):
        raise BadRequest(
            f"{STANDING} is not what `paceline testbed up` writes, so what it made is unknown: find"
            " it with `ip netns list`, delete each with `ip netns del NAME`, then delete"
            f" {STANDING}"
        ) from None
    return bed


def _stands(bed: Testbed) -> bool:
    return all((NAMESPACES / space).exists() for space in bed.namespaces)


# --- small things


def _call(what: str, code: int) -> None:
    if code != 0:
        raise RunFailed(
            f"entering a host of the testbed: {what}: {os.strerror(ctypes.get_errno())}"
        )


def _remove(namespaces: list[str], folder: str) -> None:
    for namespace in namespaces:
        if (NAMESPACES / namespace).exists():
            _try("ip", "netns", "del", namespace)
    shutil.rmtree(folder, ignore_errors=True)


def _free_subnet() -> str:
    """One that no route of this machine leads to."""
    routes = subprocess.run(
        ["ip", "-4", "route", "show", "table", "all"], check=False, capture_output=True, text=True
    ).stdout
    for number in range(secrets.randbelow(200), 455):
        subnet = f"10.213.{number % 255}"
        if f"{subnet}." not in routes:
            return subnet
    raise BadRequest(
        "all networks 10.213.0.0 to 10.213.254.0 are in use here: paceline testbed down"
    )


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def _try(*command: str) -> None:
    subprocess.run(command, check=False, capture_output=True)


def _inside(namespace: str, *command: str) -> None:
    _run("ip", "netns", "exec", namespace, *command)
