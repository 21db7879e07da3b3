"""A real Slurm cluster on this machine: munged and slurmctld on one host, slurmd on three others.

Nothing of the machine's own Slurm or munge is used: configuration, key, socket, folders and network
belong to the cluster, and all its processes end with its hosts (hosts.py).
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from tests.commands import ROOT
from tests.engines.engine import needs, until, used
from tests.engines.hosts import TOOLS, Host, connect, plug_in

INSTALL = "apt-get install slurm-wlm munge"
COMMANDS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scancel", "scontrol", "sinfo")
NODES = ("n1", "n2", "n3")
NETWORK = "10.177.0"
BIN = Path(sys.executable).parent
DAEMONS = ("slurmd", "slurmctld", "munged")

# Requeued jobs wait about two minutes, whatever the configuration says: `Cluster.release` ends
# that. KillWait: seconds from SIGTERM to SIGKILL. SlurmdTimeout: until a silent node is down.
CONFIGURATION = """
ClusterName=paceline
SlurmctldHost=ctl({network}.254)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
MailProg=/bin/true
ReturnToService=2
JobRequeue=1
KillWait=20
SlurmdTimeout=20
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=3,bf_interval=3
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/spool.%n
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdLogFile={folder}/slurmd.%n.log
NodeName=n[1-3] NodeAddr={network}.[1-3] CPUs=4 Sockets=1 CoresPerSocket=4 ThreadsPerCore=1 \
RealMemory=4000
PartitionName=p Nodes=ALL Default=YES State=UP
"""


class Cluster:
    """The cluster. Commands of a user run on the host `ctl`."""

    def __init__(self) -> None:
        needs("Slurm", COMMANDS, INSTALL, root=True)
        needs("Slurm", TOOLS, "apt-get install util-linux iproute2 mount")
        self.folder = Path(tempfile.mkdtemp(prefix="pl-slurm-"))  # short: sockets are in it
        self.folder.chmod(0o755)
        self.env = _environment(self.folder / "slurm.conf")
        self._write_files()
        names = self.folder / "hosts"
        self.ctl = Host("ctl", names)
        self.nodes = {name: Host(name, names) for name in NODES}
        try:
            self._start()
        except BaseException:
            self.end()
            raise

    def _write_files(self) -> None:
        text = CONFIGURATION.format(folder=self.folder, network=NETWORK)
        (self.folder / "slurm.conf").write_text(text)
        # Without this file slurmd does not start, though no plugin here uses cgroups.
        (self.folder / "cgroup.conf").write_text('CgroupPlugin="cgroup/v1"\n')
        addresses = {self._address(name): name for name in NODES} | {f"{NETWORK}.254": "ctl"}
        lines = ["127.0.0.1 localhost", *(f"{where} {name}" for where, name in addresses.items())]
        (self.folder / "hosts").write_text("\n".join(lines) + "\n")
        (self.folder / "state").mkdir()
        (self.folder / "home").mkdir()
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(1024))

    def _address(self, name: str) -> str:
        return f"{NETWORK}.{NODES.index(name) + 1}"

    def _start(self) -> None:
        for host in (self.ctl, *self.nodes.values()):
            host.start()
        connect(self.ctl, f"{NETWORK}.254", {self._address(n): h for n, h in self.nodes.items()})
        files = {
            "socket": "munge.socket",
            "key-file": "munge.key",
            "pid-file": "munge.pid",
            "log-file": "munge.log",
            "seed-file": "munge.seed",
        }
        munged = [f"--{option}={self.folder / name}" for option, name in files.items()]
        self._daemon(self.ctl, "munged", "--foreground", "--force", *munged)
        until("munged listens", (self.folder / "munge.socket").exists, 30)
        self._daemon(self.ctl, "slurmctld", "-D")
        for name, host in self.nodes.items():
            self._daemon(host, "slurmd", "-D", "-N", name)
        self.wait_idle()
        used("slurm", self.run("sinfo", "--version").stdout)

    def _daemon(self, host: Host, *command: str) -> None:
        with (self.folder / f"{host.name}.{command[0]}.out").open("ab") as said:
            streams = {"stdin": subprocess.DEVNULL, "stdout": said, "stderr": said}
            host.popen(command, self.env, **streams)

    def end(self) -> None:
        """End all hosts, and remove the cluster's files."""
        for host in (*self.nodes.values(), self.ctl):
            host.end()
        shutil.rmtree(self.folder, ignore_errors=True)

    # --- nodes

    def kill(self, name: str) -> None:
        """A node fails: its daemon and all tasks are gone at once."""
        self.nodes[name].end()

    def start_again(self, name: str) -> None:
        """A node that failed comes back."""
        self.nodes[name].start()
        plug_in(self.ctl, self._address(name), self.nodes[name])
        self._daemon(self.nodes[name], "slurmd", "-D", "-N", name)

    def wait_idle(self, deadline_s: float = 90.0) -> None:
        """Wait until no job runs and all nodes can take one."""

        def idle() -> bool:
            states = self.run("sinfo", "-h", "-N", "-o", "%N %T").stdout.split("\n")
            return sorted(filter(None, states)) == [f"{name} idle" for name in NODES]

        try:
            until("all nodes are idle", idle, deadline_s, 0.5)
        except AssertionError as error:
            shown = self.run("scontrol", "show", "nodes").stdout + self.logs()
            raise AssertionError(f"{error}\n{shown}") from None

    def logs(self) -> str:
        found = sorted([*self.folder.glob("*.log"), *self.folder.glob("*.out")])
        return "".join(f"--- {p.name}\n{p.read_text()[-2000:]}\n" for p in found)

    def left(self) -> dict[str, dict[int, str]]:
        """Processes on the hosts that are not daemons of the cluster, by host."""
        found = {}
        for host in (self.ctl, *self.nodes.values()):
            others = {
                pid: line
                for pid, line in (host.processes() if host.init else {}).items()
                if os.path.basename(line.split()[0]) not in DAEMONS
                and not line.endswith(": slurmscriptd")
            }
            if others:
                found[host.name] = others
        return found

    # --- what a user does

    def run(
        self, *command: str, folder: Path | str = "/", env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command of a user on `ctl`."""
        return self.ctl.run(command, env or self.env, folder)

    def srun(
        self, folder: Path, *words: str, log: str = "srun.log", env: dict[str, str] | None = None
    ) -> Step:
        """Start `srun WORDS` in a folder; its output goes to a file there."""
        return Step(self, folder, ["srun", *words], folder / log, env or self.env)

    def sbatch(self, folder: Path, script: str | Path, *options: str) -> Job:
        """Submit a script in a folder."""
        done = self.run("sbatch", "--parsable", *options, str(script), folder=folder)
        assert done.returncode == 0, done.stderr
        return Job(self, int(done.stdout.strip().partition(";")[0]), folder)


class Step:
    """`srun` as a user has started it."""

    def __init__(
        self, cluster: Cluster, folder: Path, command: Sequence[str], log: Path, env: dict[str, str]
    ) -> None:
        self.log = log
        with log.open("wb") as said:
            self.process = cluster.ctl.popen(
                command, env, folder, stdin=subprocess.DEVNULL, stdout=said, stderr=said
            )

    def wait(self, deadline_s: float = 150.0) -> int:
        """Wait for the end; returns the exit code."""
        try:
            return self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"srun has not ended: {self.said()}") from None

    def said(self) -> str:
        return self.log.read_text()

    def signal(self, number: int) -> None:
        """Send a signal to srun itself, which is a child of the process that entered the host."""
        inner = psutil.Process(self.process.pid).children(recursive=True)
        inner[0].send_signal(number)


class Job:
    """A job that `sbatch` has queued."""

    def __init__(self, cluster: Cluster, number: int, folder: Path) -> None:
        self.cluster, self.number, self.folder = cluster, number, folder

    def show(self, field: str) -> str:
        """Return a field of `scontrol show job`."""
        said = self.cluster.run("scontrol", "show", "job", str(self.number)).stdout
        found = re.search(rf"\b{field}=(\S+)", said)
        return found[1] if found else ""

    @property
    def state(self) -> str:
        return self.show("JobState")

    def release(self) -> None:
        """Let a requeued job begin now."""
        self.cluster.run("scontrol", "update", f"JobId={self.number}", "StartTime=now")

    def wait(self, *states: str, deadline_s: float = 150.0, release: bool = True) -> str:
        """Wait until the job has one of the states; `release` it where it was requeued."""

        def there() -> str:
            state = self.state
            if release and state == "PENDING" and self.show("Reason") == "BeginTime":
                self.release()
            return state if state in states else ""

        try:
            return until(f"job {self.number} is {' or '.join(states)}", there, deadline_s, 0.5)
        except AssertionError as error:
            shown = self.cluster.run("scontrol", "show", "job", str(self.number)).stdout
            raise AssertionError(f"{error}\n{shown}\n{self.said()}") from None

    def said(self) -> str:
        """What the job wrote to its output file."""
        path = Path(self.show("StdOut"))
        return path.read_text() if path.is_file() else ""


def record_of(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "run.json").read_text())
    return found


def none_left(cluster: Cluster) -> None:
    """Fail if a process of a job is left on a host after its end."""
    end = time.monotonic() + 30
    while (left := cluster.left()) and time.monotonic() < end:
        time.sleep(0.2)
    assert not left, left


def _environment(configuration: Path) -> dict[str, str]:
    """The environment of users and daemons: this interpreter, and nothing of pytest or Slurm."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "PYTEST"))}
    return {
        **kept,
        "PATH": f"{BIN}:/usr/sbin:/sbin:{kept.get('PATH', '/usr/bin:/bin')}",
        "PYTHONPATH": str(ROOT / "src"),
        "SLURM_CONF": str(configuration),
        "HOME": str(configuration.parent / "home"),
        "OMP_NUM_THREADS": "1",
    }
