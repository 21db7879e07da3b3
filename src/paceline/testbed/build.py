"""Build a testbed, and take it down again also if the process that built it is killed.

Only namespaces that a testbed has made itself are ever deleted.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.common.links import Links
from paceline.errors import BadRequest
from paceline.testbed.hosts import LAUNCHER, NAMESPACES, Testbed, host_name, remove
from paceline.testbed.shaping import MTU, can_delay, shaping

FOLDER = "paceline-testbed-"  # how the name of a testbed's folder begins
MOST_HOSTS = 64


def missing() -> str | None:
    """Return what this machine lacks for a testbed; None if it lacks nothing."""
    if sys.platform != "linux":
        return "a testbed needs Linux, because it uses network namespaces"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"a testbed needs the command {tool}: apt-get install iproute2"
    if os.geteuid() != 0:
        return (
            "a testbed needs root to make network namespaces and links: use sudo, or a container"
            " with CAP_SYS_ADMIN"
        )
    return None


def up(hosts: int, links: Links, name: str | None = None) -> Testbed:
    """Build a testbed; if a part cannot be built, nothing is left."""
    bed = _planned(hosts, links, name)
    _build(bed)
    return bed


@contextmanager
def lasting(hosts: int, links: Links) -> Iterator[Testbed]:
    """Build a testbed for the body; it is taken down also if this process is killed."""
    bed = _planned(hosts, links, None)
    watcher = _watcher(bed)  # before anything is made
    assert watcher.stdin is not None
    telling = watcher.stdin

    def tell(namespace: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # without a watcher, `down` does its work
            telling.write(f"{namespace}\n".encode())

    try:
        try:
            _build(bed, tell)
        except Exception:
            # `_build` has removed what it made. The last name that the watcher was told may be a
            # namespace of another process.
            watcher.kill()
            raise
        try:
            yield bed
        finally:
            bed.down()
    finally:
        telling.close()
        watcher.wait()


def _planned(hosts: int, links: Links, name: str | None) -> Testbed:
    """Check the request, and choose name, subnet and folder; no namespace is made yet."""
    if not 1 <= hosts <= MOST_HOSTS:
        raise BadRequest(f"{hosts} hosts: a testbed has 1 to {MOST_HOSTS} hosts")
    if (reason := missing()) is not None:
        raise BadRequest(reason)
    notices: list[str] = []
    if links.latency_s and not can_delay():
        notices.append(
            "this kernel cannot shape latency (it has no netem): the links have only their rate,"
            f" not the latency of {links.latency_s * 1e3:g} ms"
        )
        links = Links(links.rate, 0.0)
    subnet = _free_subnet()
    folder = tempfile.mkdtemp(prefix=FOLDER, dir=_plain_place())
    return Testbed(
        name or f"pl{secrets.token_hex(8)}", hosts, links, subnet, folder, tuple(notices)
    )


def _plain_place() -> str:
    """Return a folder for temporary files whose path mpirun's options can hold.

    mpirun splits them at spaces and colons.
    """
    places = (tempfile.gettempdir(), "/tmp", "/var/tmp")
    for place in places:
        if re.fullmatch(r"[\w./+-]+", place, re.ASCII) and os.access(place, os.W_OK):
            return place
    raise BadRequest(
        "a testbed needs a folder for temporary files whose path has only letters, digits and"
        f" . / + - _, and {places[0]} has others: set TMPDIR to another folder"
    )


def _free_subnet() -> str:
    """Return a subnet that no route of this machine leads to."""
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


def _build(bed: Testbed, tell: Callable[[str], None] = lambda _: None) -> None:
    """Build the testbed or leave nothing; `tell` gets each namespace just before it is made."""
    made: list[str] = []
    try:
        _make(bed, made, tell)
    except subprocess.CalledProcessError as error:
        remove(made, bed.folder)
        raise BadRequest(
            f"a testbed cannot be built here: {' '.join(error.cmd)}: {error.stderr.strip()}"
        ) from None
    except BaseException:
        remove(made, bed.folder)
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
    """Connect a host to the switch, shape its link, and write its /etc/hosts."""
    switch, space, port = bed.namespace("switch"), bed.namespace(host), f"port{host}"[:15]
    made = ("ip", "link", "add", port, "mtu", str(MTU), "type", "veth", "peer", "name", "eth0")
    _inside(switch, *made, "mtu", str(MTU), "netns", space)
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
    # Some programs ask for the IPv4 address in IPv6's form.
    lines = [f"{form}{found} {name}" for found, name in names.items() for form in ("", "::ffff:")]
    (own / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
    (own / "resolv.conf").write_text("")


WATCHER = """
trap '' INT TERM HUP
folder=$1; shift
while read -r namespace; do set -- "$@" "$namespace"; done
for namespace; do ip netns del "$namespace" 2>/dev/null; done
rm -rf -- "$folder"
"""


def _watcher(bed: Testbed) -> subprocess.Popen[bytes]:
    """Start a process that takes the network down when this process ends, however it ends.

    It reads the namespaces from its standard input, one per line, until that closes. Names and
    paths reach the shell as arguments, never as part of its script.
    """
    command = ["sh", "-c", WATCHER, "sh", bed.folder]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, bufsize=0, start_new_session=True
    )


def _inside(namespace: str, *command: str) -> None:
    _run("ip", "netns", "exec", namespace, *command)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
