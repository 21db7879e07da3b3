"""How many cores a process may use, and how ranks share them: made-up cgroups, and a real one."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from paceline.common import cores as counting
from paceline.common.cores import Quota, Usable, as_ranges, from_ranges, usable
from paceline.common.sharing import Room, Sharing
from paceline.doctor import machine
from paceline.launch.present import Present
from paceline.launch.seat import Seat
from paceline.request.config import Config
from paceline.request.prepare import prepare

ROOM_4 = frozenset(range(4))


@pytest.fixture(autouse=True)
def _four_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(4)))


class Machine:
    """Files as the kernel shows them to one process."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.process = folder, folder / "proc"
        self.process.mkdir()
        self.cgroups: list[str] = []
        self.mounts: list[str] = ["22 1 0:20 / /proc rw - proc proc rw", "garbage", ""]

    def mount(self, version: int, name: str, root: str = "/", options: str = "rw") -> Path:
        """Mount a hierarchy; return its folder."""
        place = self.folder / name
        place.mkdir(parents=True, exist_ok=True)
        kind = "cgroup2" if version == 2 else "cgroup"
        escaped = str(place).replace(" ", "\\040")
        self.mounts.append(
            f"31 23 0:28 {root} {escaped} rw,relatime shared:9 - {kind} none {options}"
        )
        return place

    def usable(self) -> Usable:
        (self.process / "cgroup").write_text("\n".join(self.cgroups) + "\n")
        (self.process / "mountinfo").write_text("\n".join(self.mounts) + "\n")
        return usable(self.process)


@pytest.fixture
def made_up(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def group(place: Path, below: str, quota: str, period: str | None = None) -> Path:
    """Make a group with a quota: version 1 has a file for the period, version 2 has not."""
    folder = place / below
    folder.mkdir(parents=True, exist_ok=True)
    if period is None:
        (folder / "cpu.max").write_text(f"{quota}\n")
    else:
        (folder / "cpu.cfs_quota_us").write_text(f"{quota}\n")
        (folder / "cpu.cfs_period_us").write_text(f"{period}\n")
    return folder


def test_version_2_the_smallest_quota_on_the_path_counts(made_up: Machine) -> None:
    place = made_up.mount(2, "cgroup with a space")
    made_up.cgroups = ["0::/kubepods/pod1/c"]
    group(place, "", "max 100000")
    group(place, "kubepods", "300000 100000")
    group(place, "kubepods/pod1", "200000 100000")
    group(place, "kubepods/pod1/c", "max 100000")
    group(place, "kubepods/pod2", "50000 100000")  # another pod's
    found = made_up.usable()
    assert found.count == 2
    assert str(found) == "2 cores: affinity mask 4, cgroup v2 quota 2 of /kubepods/pod1"
    assert [quota.cores for quota in found.quotas] == [2.0, 3.0]


def test_version_1_has_its_controllers_apart(made_up: Machine) -> None:
    place = made_up.mount(1, "cpu", options="rw,cpu,cpuacct")
    made_up.mount(1, "memory", options="rw,memory")
    made_up.cgroups = ["5:memory:/elsewhere", "4:cpu,cpuacct:/a/b", "3:cpuset:/"]
    group(place, "a", "150000", "50000")
    group(place, "a/b", "-1", "100000")
    found = made_up.usable()
    assert (found.count, found.source) == (3, "affinity mask 4, cgroup v1 quota 3 of /a")


def test_on_a_hybrid_machine_both_versions_count(made_up: Machine) -> None:
    group(made_up.mount(1, "cpu", options="rw,cpu"), "a", "300000", "100000")
    group(made_up.mount(2, "unified"), "b", "250000 100000")
    made_up.cgroups = ["1:cpu:/a", "0::/b"]
    found = made_up.usable()
    assert (found.count, [quota.version for quota in found.quotas]) == (2, [1, 2])
    assert found.source.endswith("cgroup v2 quota 2.5 of /b")


def test_in_a_container_the_mount_is_its_own_group(made_up: Machine) -> None:
    """With a cgroup namespace the group is `/`; without one the mount's root is the group."""
    group(made_up.mount(2, "unified"), "", "100000 100000")
    made_up.cgroups = ["0::/"]
    assert made_up.usable().source == "affinity mask 4, cgroup v2 quota 1 of /"
    group(made_up.mount(1, "cpu", "/docker/abc", "rw,cpu"), "", "50000", "100000")
    made_up.cgroups = ["4:cpu:/docker/abc"]
    assert made_up.usable().source == "affinity mask 4, cgroup v1 quota 0.5 of /docker/abc"
    assert made_up.usable().count == 1


@pytest.mark.parametrize(
    ("root", "own", "cores"),
    [
        ("/docker/abc", "/docker/other", []),
        ("/docker/abc", "/", []),
        ("/", "/../x", []),
        ("/", "", []),
        ("/", "/gone", [1.0]),  # the folder is not visible, those above it are
        ("/..", "/", [1.0]),  # mounted before the namespace was made: a group above
        ("/../x", "/", []),
    ],
)
def test_groups_of_other_processes_do_not_count(
    made_up: Machine, root: str, own: str, cores: list[float]
) -> None:
    group(made_up.mount(2, "cgroup", root), "", "100000 100000")
    made_up.cgroups = [f"0::{own}"]
    assert [quota.cores for quota in made_up.usable().quotas] == cores


@pytest.mark.parametrize(
    "content",
    ["", "max", "max 100000", "x y", "1 0", "0 0", "-1 100000", "1 2 3", "9" * 400 + " 1"],
)
def test_what_cannot_be_read_is_no_quota(made_up: Machine, content: str) -> None:
    group(made_up.mount(2, "cgroup"), "", content)
    made_up.cgroups = ["0::/", "garbage", "::::"]
    assert str(made_up.usable()) == "4 cores: affinity mask 4, no cgroup quota"


def test_without_any_file_the_mask_counts(tmp_path: Path, made_up: Machine) -> None:
    assert usable(tmp_path / "nothing").count == 4
    made_up.mount(2, "cgroup").rmdir()
    made_up.cgroups = ["0::/a/b"]
    assert made_up.usable().count == 4


def test_a_group_that_is_mounted_twice_is_one_quota(made_up: Machine) -> None:
    place = made_up.mount(2, "cgroup")
    made_up.mount(2, "cgroup")
    group(place, "", "100000 100000")
    made_up.cgroups = ["0::/"]
    assert len(made_up.usable().quotas) == 1


def test_a_system_without_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(counting, "_quotas", lambda process: iter(()))
    assert str(usable()) == "8 cores: processors 8, no cgroup quota"


def test_the_doctor_says_where_the_number_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    quota = Quota(1.5, 2, "/kubepods/pod1", "v2:7")
    monkeypatch.setattr(machine, "usable", lambda: Usable(ROOM_4, (quota,)))
    found = machine._cores()
    assert (found.name, found.detail) == (
        "cores",
        "1 core: affinity mask 4, cgroup v2 quota 1.5 of /kubepods/pod1",
    )


@pytest.mark.parametrize("cpus", [{0}, {0, 1, 2, 3}, {0, 2, 3, 9}, set(range(5, 200, 3))])
def test_ranges(cpus: set[int]) -> None:
    assert from_ranges(as_ranges(cpus)) == cpus
    assert as_ranges({0, 1, 2, 3, 8}) == "0-3,8"


# --- ranks that share


def room(machine: str = "m", cpus: str = "0-3", **quotas: float) -> Room:
    return Room(machine, from_ranges(cpus), quotas)


def test_containers_of_one_machine_divide_its_cores() -> None:
    """Three containers on two cores: each took two threads before."""
    three = Sharing((room(cpus="0-1"),) * 3)
    assert [three.threads(rank) for rank in range(3)] == [1, 1, 1]
    assert (three.cores, three.machines, three.fits(3)) == (2, 1, False)
    two = Sharing((room(), room(), room("other"), room("third", "0-1")))
    assert [two.threads(rank) for rank in range(4)] == [2, 2, 4, 2]
    assert (two.cores, two.machines, two.fits(4)) == (10, 3, True)


def test_masks_that_do_not_overlap_are_not_divided() -> None:
    """As a launcher that pins its ranks does."""
    pinned = Sharing((room(cpus="0-1"), room(cpus="2-3"), room(cpus="0-3")))
    assert [pinned.share(rank) for rank in range(3)] == [1.0, 1.0, 2.0]


def test_a_quota_is_divided_by_the_ranks_that_share_it() -> None:
    pod = Sharing((room(a=3.0, pod=4.0), room(b=1.0, pod=4.0), room("other", a=3.0)))
    assert [pod.share(rank) for rank in range(3)] == [2.0, 1.0, 3.0]
    crowded = pod.with_threads(3)
    assert not crowded.fits(3)
    assert not Sharing((room(a=1.5),) * 2).fits(2)
    assert Sharing((room(a=0.5),)).fits(1), "one thread is never one too many"


def test_a_server_needs_one_core() -> None:
    sharing = Sharing((room(),) * 2, each=3)
    assert (sharing.fits(1), sharing.fits(2), sharing.fits(1, more=1)) == (True, False, False)


def test_a_rank_tells_the_others_what_it_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    quota = Quota(1.5, 2, "/", "v2:7")
    monkeypatch.setattr("paceline.launch.present.usable", lambda: Usable(ROOM_4, (quota,)))
    monkeypatch.setattr("paceline.launch.present.boot_id", lambda: "b00t")
    told = Present.of(1, Seat("torchrun", 0, 1, 0, 1), None)
    assert told.room == Room("b00t", ROOM_4, {"v2:7": 1.5})
    assert Present.read(told.__dict__) == told
    for wrong in ({"cpus": ""}, {"cpus": [1]}, {"quotas": [1]}, {"quotas": {"a": "b"}}):
        with pytest.raises((TypeError, ValueError)):
            Present.read({**told.__dict__, **wrong})
    monkeypatch.setattr("paceline.launch.present.boot_id", lambda: None)
    assert Present.of(1, Seat("torchrun", 0, 1, 0, 1), None).machine == told.host


@pytest.mark.parametrize(
    ("threads", "found", "overlap", "crowded"),
    [("auto", 2, "off", False), ("1", 1, "on", False), ("3", 3, "off", True)],
)
def test_a_job_takes_its_share(threads: str, found: int, overlap: str, crowded: bool) -> None:
    options = {"strategy": "allreduce", "transport": "gloo", "workers": 3, "threads": threads}
    config = Config.make({"data": "fashion-mini", "model": "linear", **options})
    sharing = Sharing((room("other"), room(), room()), rank=1)
    job = prepare(config, lambda _: Path("out"), sharing=sharing)
    assert (job.threads, job.config.threads) == (found, found)
    assert (job.config.overlap, job.oversubscribed) == (overlap, crowded)
    said = [n for n in job.notices if n.startswith("oversubscribed")]
    assert [n.partition(";")[0] for n in said] == (
        ["oversubscribed: 3 workers x 3 thread(s) on 8 cores of 2 machines"] if crowded else []
    )


# --- the real thing


@pytest.fixture
def real_group() -> Iterator[Path]:
    """A group of our own in this machine's cgroups, removed afterwards."""
    for version, mount, root in counting._mounts(Path("/proc/self/mountinfo")):
        folder = mount / f"paceline-test-{uuid4().hex[:8]}"
        name = "cpu.max" if version == 2 else "cpu.cfs_quota_us"
        if str(root) != "/":
            continue
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            if (folder / name).is_file():
                (folder / name).write_text("100000 100000" if version == 2 else "100000")
                yield folder
                return
        except OSError:
            pass
        finally:
            folder.rmdir()
    pytest.skip("no cgroup with a CPU quota can be made here: mount -t cgroup -o cpu, as root")


@pytest.mark.slow
@pytest.mark.processes
def test_a_real_cgroup(real_group: Path) -> None:
    code = (
        f"import os; open('{real_group}/cgroup.procs', 'w').write(str(os.getpid()))\n"
        "from paceline.common.cores import usable; print(usable())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("1 core: affinity mask ")
    assert done.stdout.endswith(f"quota 1 of /{real_group.name}\n")
