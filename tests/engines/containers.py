"""A Podman of the tests' own: its settings, its images, and the base image that `FROM` names.

No image can be pulled where these tests run, so the base image is made here: Debian by debootstrap,
and the Python that runs the tests. It is made once, in a folder of the user's cache, and is
imported under the name that `deploy/Dockerfile` has after FROM. `podman build` then runs on the
real file.
"""

from __future__ import annotations

import fcntl
import os
import re
import shlex
import shutil
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline.common.files import write_whole
from paceline.common.places import cache_folder

ROOT = Path(__file__).parent.parent.parent
DEPLOY = ROOT / "deploy"
HOME = cache_folder("test-containers")  # before a test sets a cache of its own
COMMANDS = ("podman", "runc", "iptables", "debootstrap", "catatonit")
INSTALL = "apt-get install podman runc iptables netavark aardvark-dns debootstrap catatonit"
# The libraries that a Python built on Debian is linked with.
LIBRARIES = (
    *("ca-certificates", "netbase", "libbz2-1.0", "libffi8", "liblzma5", "libncursesw6"),
    *("libreadline8", "libsqlite3-0", "libssl3", "zlib1g"),
)
# crun refuses cgroups of both versions at once; where no limit may be raised, the default is too
# high; without systemd there is no journal.
CONTAINERS_CONF = """
[containers]
default_ulimits = ["nofile=20000:20000", "nproc=4096:4096"]
log_driver = "k8s-file"
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
[network]
network_config_dir = "{folder}/networks"
"""
STORAGE_CONF = """
[storage]
driver = "overlay"
graphroot = "{folder}/images"
runroot = "{folder}/running"
"""


def home() -> Path:
    """Where images and settings are kept between test sessions; nothing else uses it."""
    return HOME


def settings(folder: Path | None = None) -> dict[str, str]:
    """Return the environment in which `podman` has the tests' own settings, images and networks."""
    folder = folder or home()
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (
        ("containers.conf", CONTAINERS_CONF.format(folder=folder)),
        ("storage.conf", STORAGE_CONF.format(folder=folder)),
    ):
        if not (folder / name).exists() or (folder / name).read_text() != content:
            write_whole(folder / name, content)  # another podman may be reading it
    return {
        "CONTAINERS_CONF": str(folder / "containers.conf"),
        "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf"),
    }


@contextmanager
def alone(folder: Path | None = None) -> Iterator[None]:
    """Use this Podman in one test session at a time, and remove what a killed one has left in it.

    Containers outlive the process that started them. So do the rules by which the kernel passes
    connections on to their ports.
    """
    folder = folder or home()
    env = {**os.environ, **settings(folder)}
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for words in (
            ["rm", "--all", "--force", "--time", "0"],
            ["network", "prune", "--force"],
            ["volume", "prune", "--force"],
        ):
            subprocess.run(
                ["podman", *words], env=env, stdout=subprocess.DEVNULL, check=True, timeout=120
            )
        yield


def podman(*words: str, timeout_s: float = 120, check: bool = True, **more: Any) -> str:
    """Run podman with the tests' settings; return what it prints."""
    done = subprocess.run(
        ["podman", *words],
        env={**os.environ, **settings()},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        **more,
    )
    assert done.returncode == 0 or not check, f"podman {shlex.join(words)}: {done.stderr}"
    return done.stdout


def base_image() -> str:
    """Make the image that `deploy/Dockerfile` begins with, if it is missing; return its name."""
    [named] = re.findall(r"^FROM (\S+)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    name = f"localhost/{named}"
    if not podman("images", "--quiet", name).strip():
        suite = named.rpartition("-")[2]
        folder = home() / "base"
        shutil.rmtree(folder, ignore_errors=True)
        try:
            _debian(folder, suite)
            _python(folder)
            _import(folder, name)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return name


def _debian(folder: Path, suite: str) -> None:
    found = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(REPO_URI)", f"Codename: {suite}"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    mirror = [found[0]] if found else []  # without one, debootstrap takes its own
    subprocess.run(
        [
            *("debootstrap", "--variant=minbase", f"--include={','.join(LIBRARIES)}"),
            *(suite, str(folder), *mirror),
        ],
        check=True,
        stdout=subprocess.DEVNULL,
        timeout=600,
    )


def _python(folder: Path) -> None:
    """Copy this Python to /usr/local, where the official image has it."""
    source, target = Path(sys.base_prefix), folder / "usr" / "local"
    left_out = shutil.ignore_patterns("__pycache__", "test", "site-packages", "*.a", "share")
    for part in ("bin", "lib", "include"):
        shutil.copytree(source / part, target / part, symlinks=True, dirs_exist_ok=True,
                        ignore=left_out)  # fmt: skip
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    (target / "lib" / version / "site-packages").mkdir(exist_ok=True)
    for name in ("python", "python3"):
        (target / "bin" / name).unlink(missing_ok=True)
        (target / "bin" / name).symlink_to(version)
    for script in (target / "bin").glob("pip*"):
        script.unlink()
    for inside in (["ldconfig"], ["/usr/local/bin/python", "-m", "ensurepip"]):
        command = ["chroot", str(folder), *inside]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=120)
    (target / "bin" / "pip").symlink_to("pip3")


def _import(folder: Path, name: str) -> None:
    with subprocess.Popen(["tar", "-C", str(folder), "-c", "."], stdout=subprocess.PIPE) as packed:
        podman("import", "--change", "CMD=python3", "-", name, stdin=packed.stdout, timeout_s=300)
    assert packed.returncode == 0


def build_options() -> str:
    """Options of `podman build` that give pip and apt inside the way out that they have here."""
    options = ["--network=host"]
    config = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    lines = ["[global]"]
    for key, value in re.findall(r"^(?:global|:env:)\.([\w-]+)='(.*)'$", config, re.MULTILINE):
        if key in ("index-url", "extra-index-url", "find-links", "trusted-host"):
            lines.append(f"{key} = {value}")
            local = [word.removeprefix("file://") for word in value.split()]
            options += [f"--volume={p}:{p}:ro" for p in _roots(local) if f"{p}:{p}" not in options]
    settings()  # makes the folder
    own = home() / "pip.conf"
    own.write_text("\n".join([*dict.fromkeys(lines), "cert = /etc/ssl/certs/ca-certificates.crt"]))
    options.append(f"--volume={own}:/etc/pip.conf:ro")
    authorities = ssl.get_default_verify_paths().cafile or "/etc/ssl/certs/ca-certificates.crt"
    authorities = os.environ.get("PIP_CERT", authorities)
    options.append(f"--volume={authorities}:/etc/ssl/certs/ca-certificates.crt:ro")
    return shlex.join(dict.fromkeys(options))


def _roots(paths: list[str]) -> Iterator[str]:
    """Yield the existing folders among the paths, with the folder that a simple index is in."""
    for path in paths:
        if path.startswith("/") and Path(path).exists():
            yield str(Path(path).parent if Path(path).name == "simple" else Path(path))


def stats(names: list[str]) -> dict[str, dict[str, float]]:
    """Return what `podman stats` says of containers, in bytes and seconds, by name."""
    fields = ("CPUNano", "NetInput", "NetOutput", "BlockInput", "BlockOutput", "MemUsage")
    form = "|".join(["{{.Name}}", *(f"{{{{.{field}}}}}" for field in fields)])
    found = {}
    for line in podman("stats", "--no-stream", "--format", form, *names).splitlines():
        name, cpu, *counted, memory = line.split("|")
        received, sent, read, written = map(float, counted)
        if swapped():
            received, sent = sent, received
        amount, unit = re.findall(r"^([\d.]+)([kMG]?B)", memory)[0]
        found[name] = {
            "cpu_s": float(cpu) / 1e9,
            "net_received_bytes": received,
            "net_sent_bytes": sent,
            "block_read_bytes": read,
            "block_write_bytes": written,
            "memory_with_cache_bytes": float(amount)
            * {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}[unit],
        }
    return found


def swapped() -> bool:
    """Whether this Podman shows what a container sends as its input: before 4.4 it did (#16618)."""
    version = [int(part) for part in podman("--version").split()[-1].split(".")[:2]]
    return version < [4, 4]


def nothing_is_left(mark: str | None = None) -> list[str]:
    """Return what is left of a cluster: containers, networks, processes of containers."""
    label = "label=paceline.cluster" + (f"={mark}" if mark else "")
    left = podman("ps", "--all", "--filter", label, "--format", "{{.Names}}").split()
    return left + podman("network", "ls", "--quiet", "--filter", label).split()
