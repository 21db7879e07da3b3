"""Testbeds with real namespaces, shaped links, gloo and MPI; nothing is left behind."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.commands import Popen, run
from tests.conftest import make_pairs, small_net

import paceline
from paceline.common.links import Links
from paceline.errors import BadRequest
from paceline.testbed import build, standing
from paceline.testbed.shaping import can_delay, shaping
from paceline.transport.mpi.transport import MpiTransport

needs_root = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))


class Made:
    """What this test's testbeds are called, and where their folders are."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.tokens = folder, list[str]()

    def token(self, size: int | None = None) -> str:
        self.tokens.append(os.urandom(size or 8).hex())
        return self.tokens[-1]

    def left(self) -> list[str]:
        """Namespaces and folders; those of other tests on this machine are not looked at."""
        namespaces = os.listdir("/run/netns") if os.path.isdir("/run/netns") else []
        own = [name for name in namespaces if any(token in name for token in self.tokens)]
        return own + [path.name for path in self.folder.glob("paceline-testbed-*")]


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[Made]:
    """Nothing is left of what a test makes."""
    # sockets need short paths
    with tempfile.TemporaryDirectory(prefix="pl-", dir="/tmp") as folder:
        made = Made(Path(folder))
        monkeypatch.setattr(build.secrets, "token_hex", made.token)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        monkeypatch.setenv("TMPDIR", folder)
        yield made
        until = time.monotonic() + 60
        while (found := made.left()) and time.monotonic() < until:
            time.sleep(0.05)
        assert not found


# `paceline` with a given token in the names of its namespaces
NAMED = """
import secrets, sys
token = sys.argv.pop(1)
secrets.token_hex = lambda size=None: token
from paceline.cli.main import main
main()
"""


def train(tmp_path: Path, **options: object) -> paceline.Run:
    defaults = {
        "model": small_net, "data": (make_pairs(60), make_pairs(20, seed=1)), "workers": 2,
        "steps": 4, "batch_size": 8, "threads": 1,
        "memory_format": "contiguous", "out": str(tmp_path / "run"),
    }  # fmt: skip
    return paceline.train(**{**defaults, **options})


# --- what is asked for


def test_links_are_read() -> None:
    assert Links.read("100mbit") == Links(1e8)
    assert Links.read("rate=10mbit,latency=1ms") == Links(1e7, 1e-3)
    assert str(Links.read("1gbit,latency=500us")) == "1gbit,latency=0.5ms"
    assert Links.read(str(Links(2.5e6))) == Links(2.5e6)
    assert shaping(Links.read("unlimited"), "eth0") == []
    assert [c[-6] for c in shaping(Links(1e8), "eth0")] == ["rate"]
    assert len(shaping(Links(1e8, 0.01), "eth0")) == 2


@pytest.mark.parametrize(
    ("network", "sentence"),
    [
        ("fast", "not a number"),
        ("1bit", "must be 100kbit to 1000gbit"),
        ("100mbit,loss=3", "rate and latency, not loss"),
        ("100mbit,latency=1h", "not a number"),
    ],
)
def test_bad_networks_are_refused(tmp_path: Path, network: str, sentence: str) -> None:
    with pytest.raises(BadRequest, match=sentence):
        train(tmp_path, strategy="allreduce", network=network)


def test_without_root_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(build.shutil, "which", lambda tool: f"/sbin/{tool}")
    with pytest.raises(BadRequest, match="needs root"):
        train(tmp_path, strategy="allreduce", network="100mbit")
    with pytest.raises(BadRequest, match="needs root"):
        build.up(2, Links())
    monkeypatch.setattr(build.shutil, "which", lambda tool: None)
    assert "apt-get install iproute2" in str(build.missing())


@needs_root
def test_memory_is_not_shared_between_hosts(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="transport gloo or mpi, not shm"):
        train(tmp_path, strategy="allreduce", network="unlimited", transport="shm")
    with pytest.raises(BadRequest, match="needs memory that all workers share"):
        train(tmp_path, strategy="hogwild", network="unlimited")
    with pytest.raises(BadRequest, match="1 to 64"):
        build.up(0, Links())


# --- what happens


@needs_root
@pytest.mark.parametrize("strategy", ["allreduce", "ddp", "ps"])
def test_workers_run_on_hosts_of_their_own(tmp_path: Path, strategy: str) -> None:
    run = train(tmp_path, strategy=strategy, network="unlimited")
    assert run.record["status"] == "completed"
    assert [w["host"] for w in run.record["workers"]] == [
        f"host-{i}" for i in range(len(run.record["workers"]))
    ]
    assert run.record["config"]["transport"] == "gloo"
    if strategy == "allreduce":
        assert all(w["idle_s"] is not None for w in run.record["workers"])  # one machine, one clock


@needs_root
def test_a_link_is_no_faster_than_its_rate_and_the_interface_counts(tmp_path: Path) -> None:
    """A ring moves 1.6 MB at 20 Mbit/s: it takes at least the link's time, and the network counter
    shows the payload and little more.
    """
    data = (make_pairs(60), make_pairs(20, seed=1))
    wide = {
        "model": "mlp:hidden=600x600",
        "data": data,
        "strategy": "allreduce:collective=ring",
        "steps": 5,
    }
    run = train(tmp_path, **wide, network="20mbit")
    for worker in run.record["workers"]:
        seconds = worker["payload_sent_bytes"] * 8 / 20e6
        # a bucket's worth of tokens comes free
        assert worker["sync_s"] + worker["idle_s"] > 0.7 * seconds
        # the last of it may still be queued
        assert 0.95 < worker["net_sent_bytes"] / worker["payload_sent_bytes"] < 1.15


@pytest.mark.slow
@needs_root
@pytest.mark.skipif(MpiTransport.missing() is not None, reason=str(MpiTransport.missing()))
def test_mpi_talks_between_hosts(tmp_path: Path) -> None:
    run = train(
        tmp_path,
        strategy="allreduce:collective=ring",
        network="unlimited",
        transport="mpi",
        model="mlp:hidden=200x200",
    )
    assert [w["host"] for w in run.record["workers"]] == ["host-0", "host-1"]
    assert all(w["net_sent_bytes"] > w["payload_sent_bytes"] > 0 for w in run.record["workers"])


@pytest.mark.slow
@needs_root
def test_the_command_line_brings_it_up_runs_there_and_takes_it_down(
    tmp_path: Path, made: Made
) -> None:
    token = made.token()

    def call(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", NAMED, token, *words]
        return run(command, capture_output=True, text=True)

    if standing.standing() is not None:
        pytest.skip("a testbed is up on this machine")
    try:
        first = call("testbed", "up", "--hosts", "2", "--rate", "200mbit", "--latency", "1ms")
        assert first.returncode == 0, first.stderr
        assert "2 hosts, links 200mbit" in first.stdout
        assert can_delay() or "no netem" in first.stderr
        again = call("testbed", "up")
        assert again.returncode != 0
        assert "up already" in again.stderr
        ran = call(
            "testbed", "run", "--strategy", "allreduce", "--workers", "2",
            "--data", "fashion-mini", "--model", "mlp:hidden=16",
            "--steps", "3", "--json", "--out", str(tmp_path / "run"),
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr
        assert {w["host"] for w in json.loads(ran.stdout)["workers"]} == {"host-0", "host-1"}
    finally:
        down = call("testbed", "down")
    assert "is down" in down.stdout
    assert "no testbed is up" in call("testbed", "status").stdout
    assert "no testbed was up" in call("testbed", "down").stdout
    nowhere = call(
        "testbed",
        "run",
        "--strategy",
        "allreduce",
        "--workers",
        "2",
        "--data",
        "fashion-mini",
        "--steps",
        "1",
    )
    assert nowhere.returncode != 0
    assert "no testbed is up: paceline testbed up" in nowhere.stderr


# --- nothing of others is deleted


@pytest.fixture
def namespace() -> Iterator[Callable[[str], None]]:
    """Make namespaces as another process would, and delete them at the end."""
    made: list[str] = []

    def make(name: str) -> None:
        subprocess.run(["ip", "netns", "add", name], check=True)
        made.append(name)

    yield make
    for name in made:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def there(name: str) -> bool:
    return os.path.exists(f"/run/netns/{name}")


@needs_root
@pytest.mark.parametrize("taken", ["switch", "launcher", "1"])
def test_a_name_that_is_taken_costs_its_owner_nothing(
    monkeypatch: pytest.MonkeyPatch, namespace: Callable[[str], None], taken: str
) -> None:
    monkeypatch.setattr(build.secrets, "token_hex", lambda _=None: "00test")
    namespace(f"pl00test-{taken}")
    with pytest.raises(BadRequest, match=f"pl00test-{taken} exists already"):
        build.up(2, Links())
    with pytest.raises(BadRequest, match="exists already"), build.lasting(2, Links()):
        pass
    assert there(f"pl00test-{taken}")
    assert not [
        n
        for n in os.listdir("/run/netns")
        if n.startswith("pl00test-") and n != f"pl00test-{taken}"
    ]


@needs_root
@pytest.mark.parametrize(
    "make", [lambda: build.up(2, Links()), lambda: build.lasting(2, Links()).__enter__()]
)
def test_a_name_that_is_taken_at_the_last_moment_costs_its_owner_nothing(
    monkeypatch: pytest.MonkeyPatch, namespace: Callable[[str], None], make: Callable[[], object]
) -> None:
    """Another process makes the namespace after the check, so `ip netns add` fails."""
    monkeypatch.setattr(build.secrets, "token_hex", lambda _=None: "01test")
    run = build._run

    def late(*command: str) -> None:
        if command == ("ip", "netns", "add", "pl01test-0"):
            namespace("pl01test-0")
        run(*command)

    monkeypatch.setattr(build, "_run", late)
    with pytest.raises(BadRequest, match="cannot be built here: ip netns add pl01test-0"):
        make()
    assert [n for n in os.listdir("/run/netns") if n.startswith("pl01test")] == ["pl01test-0"]


@needs_root
def test_names_are_too_long_to_meet() -> None:
    with build.lasting(1, Links()) as one, build.lasting(1, Links()) as other:
        assert one.name != other.name
        assert len(one.name) == len("pl") + 16
        assert all(there(n) for n in (*one.namespaces, *other.namespaces))
    assert not any(there(n) for n in (*one.namespaces, *other.namespaces))


@needs_root
def test_the_standing_one_is_known_by_its_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, namespace: Callable[[str], None]
) -> None:
    record = tmp_path / "record.json"
    monkeypatch.setattr(standing, "STANDING", record)
    namespace("paceline-of-another-program")
    assert not standing.take_down()
    bed = standing.raise_standing(1, Links())
    try:
        assert standing.standing() == bed
        with pytest.raises(BadRequest, match="up already"):
            standing.raise_standing(1, Links())
        subprocess.run(["ip", "netns", "del", bed.namespace(0)], check=True)
        assert standing.standing() is None  # part of it is gone, and the rest of it is replaced
        again = standing.raise_standing(1, Links())
        assert not any(there(n) for n in bed.namespaces)
        assert all(there(n) for n in again.namespaces)
    finally:
        assert standing.take_down()
    assert not record.exists()
    assert not any(there(n) for n in again.namespaces)
    assert there("paceline-of-another-program")


@needs_root
def test_what_an_older_version_left_is_taken_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, namespace: Callable[[str], None]
) -> None:
    """A record of an older version has the same fields, and one name for all testbeds."""
    record, folder = tmp_path / "record.json", tmp_path / "paceline-testbed-x"
    monkeypatch.setattr(standing, "STANDING", record)
    folder.mkdir()
    fields = {
        "name": "paceline",
        "hosts": 1,
        "links": "unlimited",
        "subnet": "10.213.7",
        "folder": str(folder),
        "notices": [],
    }
    record.write_text(json.dumps(fields))
    for name in ("paceline-switch", "paceline-launcher", "paceline-0", "paceline-7"):
        namespace(name)
    assert standing.take_down()
    # there was no such host
    assert [n for n in ("switch", "launcher", "0", "7") if there(f"paceline-{n}")] == ["7"]
    assert not record.exists()
    assert not folder.exists()


@needs_root
@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"name": "x"}',
        '{"name": "x", "hosts": 1, "links": "unlimited", "subnet": "10.213.7", "folder": "/home"}',
    ],
)
def test_a_record_of_another_kind_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(standing, "STANDING", tmp_path / "record.json")
    standing.STANDING.write_text(text)
    for ask in (standing.standing, standing.take_down, lambda: standing.raise_standing(1, Links())):
        with pytest.raises(BadRequest, match="ip netns list"):
            ask()
    assert standing.STANDING.read_text() == text


@needs_root
def test_a_run_with_a_space_in_tmpdir_deletes_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build.tempfile, "tempdir", str(tmp_path / "x y"))
    for folder in ("x", "x y"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "precious.txt").write_text("precious")
    run = train(tmp_path, strategy="allreduce", network="unlimited")
    assert run.record["status"] == "completed"
    assert all((tmp_path / folder / "precious.txt").exists() for folder in ("x", "x y"))


@pytest.mark.slow
@needs_root
@pytest.mark.skipif(MpiTransport.missing() is not None, reason=str(MpiTransport.missing()))
def test_mpi_starts_on_hosts_with_a_space_in_tmpdir(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build.tempfile, "tempdir", str(tmp_path / "x y"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "x y"))
    (tmp_path / "x y").mkdir()
    run = train(
        tmp_path, strategy="allreduce", network="unlimited", transport="mpi", model="mlp:hidden=8"
    )
    assert [w["host"] for w in run.record["workers"]] == ["host-0", "host-1"]


@needs_root
@pytest.mark.parametrize(
    "how", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_nothing_is_left_when_the_launcher_is_ended(
    tmp_path: Path, how: signal.Signals, made: Made
) -> None:
    words = [
        "train", "--network", "1mbit", "--strategy", "allreduce", "--workers", "2",
        "--data", "fashion-mini", "--model", "mlp:hidden=256x128",
        "--steps", "500", "--out", str(tmp_path / "run"),
    ]  # fmt: skip
    command = [sys.executable, "-c", NAMED, made.token(), *words]
    process = Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    until = time.monotonic() + 60
    events = tmp_path / "run" / "events" / "worker-1.jsonl"
    while not events.is_file() and process.poll() is None and time.monotonic() < until:
        time.sleep(0.05)
    assert len(made.left()) > 1  # it is up; the fixture sees to the rest
    process.send_signal(how)
    assert process.wait(60) != 0
