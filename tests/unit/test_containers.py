"""Clusters in containers, as far as no container is needed: engines that are absent, wrong
requests, cgroups as a container sees them, tables. tests/engines/test_containers.py has the rest.
"""

import csv
import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.records import run, worker, write_study

from paceline.errors import BadRequest, UnknownName
from paceline.record import contained
from paceline.record.contained import FIRST_NAMESPACE, Contained, Groups
from paceline.report.containers import container_table
from paceline.report.document.tables import containers as document_table
from paceline.report.page.resources import resources_section
from paceline.report.reading import read_study
from paceline.report.workers_csv import write_workers
from paceline.spark import containers, driver, image, master
from paceline.spark.engine import Engine, find_engine
from paceline.studies.grid import StudySpec


@pytest.fixture(autouse=True)
def _home_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("PACELINE_SPARK_MASTER", raising=False)


def program(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


# --- engines


def test_without_an_engine_the_sentence_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(BadRequest, match=r"neither is on PATH: apt-get install podman"):
        find_engine()
    with pytest.raises(BadRequest, match="neither is on PATH"):
        containers.up(folder=tmp_path)
    assert not containers._state().exists()


@pytest.mark.processes
def test_an_engine_that_does_not_answer_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path / "bin", "docker", "echo 'Error: no daemon at the socket.' >&2; exit 1")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(BadRequest, match=r"docker does not answer \(no daemon at the socket\)"):
        find_engine()
    program(tmp_path / "bin", "podman", "exit 0")
    assert find_engine() == Engine("podman")


# --- wrong requests


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"workers": 0}, "0 workers: a cluster on one machine has 1 to 32"),
        ({"cores": 0}, "0 cores for each worker"),
        ({"memory": "lots"}, "is not an amount of memory"),
        ({"memory": "100m"}, "need 512m or more"),
        ({"page_port": 70000}, "page_port=70000"),
        ({"folder": "/"}, "would share / with this machine"),
        ({"folder": "/nowhere/at/all"}, "there is no such folder"),
    ],
)
def test_what_cannot_be_started_is_refused_before_anything_starts(
    given: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(BadRequest, match=said):
        containers.up(**{"folder": tmp_path, **given})


def test_a_port_in_use_is_refused(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(BadRequest, match=f"page_port={port} cannot be used: Address already"):
            containers.up(folder=tmp_path, page_port=port)


@pytest.mark.processes
def test_an_image_is_needed_where_there_is_no_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path / "bin", "podman", "exit 1")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(BadRequest, match=r"podman build -f deploy/Dockerfile -t paceline-spark"):
        image.ensure(Engine("podman"), "", lambda _: None, top=tmp_path)


def test_a_changed_source_changes_the_digest(tmp_path: Path) -> None:
    for name in ("constraints.txt", "pyproject.toml", "deploy/Dockerfile", "deploy/spark-node.sh"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("a")
    (tmp_path / "src" / "__pycache__").mkdir(parents=True)
    (tmp_path / "src" / "a.py").write_text("1")
    before = image.digest(tmp_path)
    (tmp_path / "src" / "__pycache__" / "a.pyc").write_text("x")
    assert image.digest(tmp_path) == before
    (tmp_path / "src" / "a.py").write_text("2")
    assert image.digest(tmp_path) != before


def test_a_cluster_that_is_not_up_is_not_waited_for() -> None:
    with pytest.raises(BadRequest, match="paceline cluster up --containers"):
        driver.wanted("containers")
    assert driver.wanted(None) is None
    assert driver.wanted("spark://other:7077") is None


def test_in_a_container_the_master_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_SPARK_MASTER", "spark://master:7077")
    assert driver.wanted("containers") is None
    assert master.usual_master("containers") == "spark://master:7077"
    assert master.usual_master() == "spark://master:7077"
    assert master.usual_master("spark://other:1") == "spark://other:1"


def test_a_program_outside_the_containers_is_told_where_to_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(containers, "standing", SimpleNamespace)
    with pytest.raises(BadRequest, match="paceline cluster run -- python PROGRAM"):
        master.usual_master("containers")


# --- what a container sees of its cgroups


def process(folder: Path, mounts: list[str], namespace: str = FIRST_NAMESPACE) -> Path:
    (folder / "ns").mkdir(parents=True)
    os.symlink(namespace, folder / "ns" / "cgroup")
    (folder / "mountinfo").write_text("\n".join(mounts))
    return folder


def group(folder: Path, files: dict[str, str]) -> Path:
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_text(content)
    return folder


def test_version_1_is_read_where_it_is_mounted(tmp_path: Path) -> None:
    cpu = group(tmp_path / "cpu", {"cpuacct.usage": "2500000000\n"})
    memory = group(
        tmp_path / "memory",
        {"memory.usage_in_bytes": "1000\n", "memory.stat": "cache 5\ntotal_inactive_file 300\n"},
    )
    block = group(
        tmp_path / "blkio",
        {
            "blkio.throttle.io_service_bytes_recursive": (
                "254:0 Read 10\n254:0 Write 20\n254:16 Read 1\n254:0 Total 30\nTotal 31\n"
            )
        },
    )
    mounts = [
        f"1 0 0:1 /libpod/a {folder} ro - cgroup cgroup rw,{names}"
        for folder, names in ((cpu, "cpu,cpuacct"), (memory, "memory"), (block, "blkio"))
    ]
    found = Groups.find(process(tmp_path / "self", mounts), marked=True)
    assert found is not None
    reading = found.read()
    assert (reading.source, reading.cpu_s) == ("cgroup v1", 2.5)
    assert (reading.memory_bytes, reading.memory_with_cache_bytes) == (700, 1000)
    assert (reading.block_read_bytes, reading.block_write_bytes) == (11, 20)


def version_2(tmp_path: Path) -> list[str]:
    own = group(
        tmp_path / "own",
        {
            "memory.current": "1000\n",
            "memory.stat": "inactive_file 400\n",
            "cpu.stat": "usage_usec 1500000\nuser_usec 1\n",
            "io.stat": "254:0 rbytes=7 wbytes=9 rios=1\n",
        },
    )
    return [f"1 0 0:1 / {own} ro - cgroup2 cgroup2 rw"]


def test_version_2_is_read_in_a_namespace_of_its_own(tmp_path: Path) -> None:
    mounts = version_2(tmp_path)
    found = Groups.find(process(tmp_path / "self", mounts, "cgroup:[4026532001]"), marked=True)
    assert found is not None
    reading = found.read()
    assert (reading.source, reading.cpu_s) == ("cgroup v2", 1.5)
    assert (reading.memory_bytes, reading.memory_with_cache_bytes) == (600, 1000)
    assert (reading.block_read_bytes, reading.block_write_bytes) == (7, 9)


def test_the_machines_own_groups_are_no_containers(tmp_path: Path) -> None:
    mounts = version_2(tmp_path)
    own = process(tmp_path / "self", mounts)
    assert Groups.find(own, marked=True) is None  # the first namespace, and the root of its tree
    assert Groups.find(process(tmp_path / "b", mounts, "cgroup:[1]"), marked=False) is None
    assert Groups.find(tmp_path / "nothing", marked=True) is None


def test_the_first_and_the_last_reading_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = version_2(tmp_path)
    found = Groups.find(process(tmp_path / "self", mounts, "cgroup:[1]"), marked=True)
    bytes_so_far = [(100, 10), (150, 30), (400, 40)]
    monkeypatch.setattr(contained, "network_bytes", lambda: bytes_so_far.pop(0))
    use = Contained()
    use.groups = found
    use.pause()  # before training: nothing is read
    assert use.described() is None
    use.begin()
    (tmp_path / "own" / "cpu.stat").write_text("usage_usec 2000000\n")
    use.pause()
    use.pause()
    use.begin()
    (tmp_path / "own" / "memory.current").write_text("3000\n")
    use.pause()
    described = use.described()
    assert described is not None
    assert described["cpu_s"] == 0.5
    assert (described["net_received_bytes"], described["net_sent_bytes"]) == (300, 30)
    assert (described["memory_bytes"], described["memory_peak_bytes"]) == (2600, 2600)
    assert described["block_read_bytes"] == 0
    assert described["from_s"] <= described["until_s"]


def test_outside_a_container_nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Groups, "find", classmethod(lambda cls: None))
    use = Contained()
    use.begin()
    use.sample()
    use.pause()
    assert use.described() is None


# --- [prepare]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"out": "a"}, "needs out, and one of images, what and recipe"),
        ({"images": "mnist"}, "needs out"),
        ({"images": "mnist", "what": "flights", "out": "a"}, "one of images, what and recipe"),
        ({"images": "mnist", "out": 3}, "write text"),
        ({"images": "mnist", "out": "a", "most": 0}, "write a whole number above 0"),
        ({"what": "flights", "out": "a", "most": 3}, "most belongs to images"),
    ],
)
def test_what_prepare_lacks_is_said(given: dict[str, Any], said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        StudySpec.make({"axes": {"workers": [1]}, "prepare": given})


def test_unknown_options_of_prepare_are_listed() -> None:
    with pytest.raises(UnknownName, match="shards"):
        StudySpec.make({"axes": {"workers": [1]}, "prepare": {"shard": 3}})


# --- tables


def test_every_rank_in_a_container_has_a_row(tmp_path: Path) -> None:
    used = {
        "source": "cgroup v1",
        "from_s": 1.0,
        "until_s": 3.0,
        "cpu_s": 2.0,
        "memory_bytes": 500_000_000,
        "memory_with_cache_bytes": 600_000_000,
        "memory_peak_bytes": 700_000_000,
        "net_received_bytes": 9_100_000,
        "net_sent_bytes": 8_200_000,
        "block_read_bytes": 0,
        "block_write_bytes": None,
    }
    more = {**used, "cpu_s": 4.0}
    runs = [run(target=0.8)]
    for each in (used, more):
        record = run("stepwise", 2, 2.0, 0.9, target=0.8)
        record["workers"] = [worker(n, host=f"worker-{n}", container=each) for n in (0, 1)]
        runs.append(record)
    study = read_study(write_study(tmp_path, runs))
    first, second = container_table(study)
    assert (first["rank"], first["host"], first["runs"], first["cpu_s"]) == (0, "worker-0", 2, 3.0)
    assert (second["rank"], second["net_sent_bytes"]) == (1, 8_200_000)
    assert second["block_write_bytes"] is None
    page = resources_section(study)
    assert "<td>worker 1</td><td>worker-1</td><td>3.00 s</td><td>500 MB</td>" in page
    table = document_table(study)
    assert table is not None
    assert len(table.rows) == 2
    write_workers(study, tmp_path / "workers.csv")
    with (tmp_path / "workers.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["container_cpu_s"] for row in rows] == ["", "2.0", "2.0", "4.0", "4.0"]
    assert rows[1]["container_net_sent_bytes"] == "8200000"


def test_without_containers_there_is_no_table(tmp_path: Path) -> None:
    study = read_study(write_study(tmp_path, [run(target=0.8)]))
    assert container_table(study) == []
    assert document_table(study) is None
    assert "Containers" not in resources_section(study)
