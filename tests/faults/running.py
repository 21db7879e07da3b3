"""Start one command of a trial, strike its launcher, wait for its end, and see what is left.

Nothing that belongs to other processes of the machine is looked at or ended: the process that runs
trials adopts all orphans of its runs, and has /dev/shm and the mounts of namespaces to itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests import commands

PR_SET_CHILD_SUBREAPER = 36
CLONE_NEWNS, MS_REC, MS_PRIVATE = 0x00020000, 0x4000, 0x40000
STACKS = signal.SIGRTMIN + 5  # as in plugin.py
GONE_S = 15.0  # for what a launcher has left to end by itself
CLOSED_S = 5.0  # for the kernel to close the sockets of processes that have ended
LOOK_S = 0.005
SIGNALS = {
    "kill": signal.SIGKILL,
    "segv": signal.SIGSEGV,
    "term": signal.SIGTERM,
    "int": signal.SIGINT,
    "hup": signal.SIGHUP,
    "stop": signal.SIGSTOP,
    "gil": signal.SIGUSR1,  # the plugin holds the launcher's GIL
}
LOOPBACK = ("0100007F", "0" * 24 + "01000000", "0" * 16 + "FFFF00000100007F")


def be_alone() -> bool:
    """Give this process a /dev/shm of its own; False where it may not (it is not root)."""
    libc = ctypes.CDLL(None, use_errno=True)
    return (
        os.geteuid() == 0
        and libc.unshare(CLONE_NEWNS) == 0
        and libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None) == 0
        and libc.mount(b"none", b"/dev/shm", b"tmpfs", 0, None) == 0
    )


@dataclass
class Ran:
    """What became of one command."""

    code: int | None = None  # None: it hung
    said: str = ""
    seconds: float = 0.0
    struck: dict[str, Any] | None = None
    stacks: str = ""  # of a hang
    orphans: list[str] = field(default_factory=list)
    segments: list[str] = field(default_factory=list)
    ports: list[str] = field(default_factory=list)  # that are still open at the end
    exposed: list[str] = field(default_factory=list)  # that were open beyond loopback
    files: list[str] = field(default_factory=list)  # in its folder for temporary files
    namespaces: list[str] = field(default_factory=list)


@dataclass
class Blow:
    """What the harness itself does when the rank has come to its point."""

    mark: Path  # the file that the plugin makes
    launcher: str = ""  # what strikes the launcher
    go_on_s: float = 0.0  # SIGCONT after so long


OWN: list[int] = []  # the processes that `conduct` has started


def conduct(
    command: list[Any], folder: Path, name: str, limit_s: float, env: dict[str, str], blow: Blow
) -> Ran:
    """Run a command to its end, or for `limit_s`; then wait for what it has left to end."""
    temporary = folder / "t"
    temporary.mkdir(exist_ok=True)
    found, shm, mounts = Ran(), _segments(), _namespaces()
    listening: dict[str, str] = {}
    began = time.monotonic()
    with open(folder / name, "w") as said:
        process = commands.Popen(
            command,
            stdout=said,
            stderr=said,
            cwd=folder,
            start_new_session=True,
            env={**os.environ, **env, "TMPDIR": str(temporary)},
        )
        OWN.append(process.pid)
    commands._prctl(PR_SET_CHILD_SUBREAPER, 1)
    go_on_at, stopped, looked_at = float("inf"), 0, began
    while process.poll() is None and time.monotonic() - began < limit_s:
        now = time.monotonic()
        if found.struck is None and (told := _told(blow.mark)) is not None:
            found.struck = told
            listening |= _listening()
            looked_at = now
            if blow.launcher:
                process.send_signal(SIGNALS[blow.launcher])
                blow.mark.with_suffix(".done").touch()
            if blow.go_on_s:
                go_on_at = now + blow.go_on_s
                stopped = process.pid if blow.launcher else told["pid"]
        elif now - looked_at > 1.0:
            listening |= _listening()
            looked_at = now
        if now > go_on_at:
            go_on_at = float("inf")
            with contextlib.suppress(ProcessLookupError):
                os.kill(stopped, signal.SIGCONT)
        time.sleep(LOOK_S)
    found.seconds = round(time.monotonic() - began, 2)
    found.code = process.returncode
    if process.returncode is None:
        found.stacks = _stacks(folder / name)
    found.struck = found.struck or _told(blow.mark)
    _see_what_is_left(found, process)
    found.said = (folder / name).read_text(errors="replace")
    until = time.monotonic() + CLOSED_S  # a process may have ended before its last thread
    while (still := _sockets().keys() & listening.keys()) and time.monotonic() < until:
        time.sleep(0.05)
    found.ports = sorted(listening[inode] for inode in still)
    found.exposed = sorted({w for w in listening.values() if w.split(":")[0] not in LOOPBACK})
    found.segments = sorted(_segments() - shm)
    found.namespaces = sorted(_namespaces() - mounts)
    found.files = sorted(
        str(path.relative_to(temporary))
        for path in temporary.iterdir()
        if not path.name.startswith("torchinductor_")  # torch's own
    )
    return found


def _told(mark: Path) -> dict[str, Any] | None:
    try:
        return dict(json.loads(mark.read_text()))
    except (OSError, ValueError):  # not there, or not written yet
        return None


# --- processes


def _family() -> list[psutil.Process]:
    """All processes below this one that have not ended. Those that have are reaped."""
    alive = []
    for one in commands.children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if one.status() != psutil.STATUS_ZOMBIE:
                alive.append(one)
                continue
            # The process that was started is left to its Popen, which knows its exit code then.
            if one.ppid() == os.getpid() and one.pid not in OWN:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(one.pid, os.WNOHANG)
    return alive


def _see_what_is_left(found: Ran, process: commands.Popen) -> None:
    """Wait for the run's processes to end; note those that do not, and end them."""
    if process.returncode is None:
        process.kill()  # a hang: what it has started ends with it
        process.wait(30)
    until = time.monotonic() + GONE_S
    while (left := _family()) and time.monotonic() < until:
        time.sleep(0.02)
    for one in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.orphans.append(f"{one.pid} {' '.join(one.cmdline())[:120]}")
            one.kill()
    psutil.wait_procs(left, timeout=10)
    _family()


def _stacks(said: Path) -> str:
    """What each process of a run that hangs does: states, kernel functions, Python's stacks."""
    told = []
    family = _family()
    for one in family:
        with contextlib.suppress(psutil.NoSuchProcess, OSError):
            told.append(f"--- {one.pid} {one.status()} {' '.join(one.cmdline())[:100]}")
            for task in sorted(Path(f"/proc/{one.pid}/task").iterdir()):
                facts = [(task / name).read_text().strip() for name in ("comm", "wchan", "syscall")]
                told.append(f"    {task.name} " + " | ".join(facts))
    before = said.stat().st_size
    for one in family:
        with contextlib.suppress(psutil.NoSuchProcess, OSError):
            if "python" in one.name() or "python" in one.cmdline()[0]:
                one.send_signal(signal.SIGCONT)
                one.send_signal(STACKS)  # faulthandler
    time.sleep(1.0)
    with open(said, errors="replace") as file:
        file.seek(before)
        return "\n".join(told) + "\n" + file.read()


# --- sockets, segments, namespaces


def _sockets() -> dict[str, str]:
    """The listening sockets of this network by inode."""
    found = {}
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A":
                found[words[9]] = words[1]
    return found


def _listening() -> dict[str, str]:
    """The listening sockets of the run by inode: the address and the port."""
    among, found = _sockets(), {}
    for one in _family():
        with contextlib.suppress(OSError):
            for fd in os.listdir(f"/proc/{one.pid}/fd"):
                with contextlib.suppress(OSError):
                    inode = os.readlink(f"/proc/{one.pid}/fd/{fd}").removeprefix("socket:[")[:-1]
                    if inode in among:
                        found[inode] = among[inode]
    return found


def _segments() -> set[str]:
    return set(os.listdir("/dev/shm"))


def _namespaces() -> set[str]:
    """The network namespaces that are mounted here: by this process's runs, after `be_alone`."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return {line.split()[4] for line in lines if "/netns/" in line.split()[4]}
