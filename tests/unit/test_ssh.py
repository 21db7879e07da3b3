"""`paceline launch --hosts` without a server: what is read, what ssh is called with, what its words
mean; and the launcher with its supervisors, where a stand-in for ssh starts them here.
tests/engines/test_ssh.py has the real ssh.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cli.launch import launch
from paceline.errors import BadRequest, Interrupted, RunFailed, on_the_command_line
from paceline.launch.seat import find
from paceline.launch.slurm_job import engine
from paceline.launch.ssh import crew, start
from paceline.launch.ssh.checks import address_of, own_address, unreached
from paceline.launch.ssh.command import command_line, explain, first_line, quoted, ssh_words
from paceline.launch.ssh.hosts import Host, deal, read_hosts, read_hosts_file, written
from paceline.launch.ssh.output import Lines
from paceline.launch.ssh.request import check, lost_after_s, shared_folder
from paceline.launch.ssh.start import Wanted, launch_on_hosts


@pytest.fixture(autouse=True)
def _flags() -> Iterator[None]:
    """The hosts are named on a command line, so errors speak of flags."""
    with on_the_command_line():
        yield


# --- hosts


def test_hosts_are_read() -> None:
    assert read_hosts("a") == [Host("a")]
    assert read_hosts("a, b:2,me@c.example:3") == [
        Host("a"),
        Host("b", 2),
        Host("c.example", 3, "me"),
    ]
    assert read_hosts("10.0.0.7:2,[fe80::1]:2,::1") == [
        Host("10.0.0.7", 2),
        Host("fe80::1", 2),
        Host("::1"),
    ]
    assert read_hosts("a,b,a:2") == [Host("a", 3), Host("b")]  # as mpirun counts them
    assert [host.destination for host in read_hosts("me@a,a")] == ["me@a", "a"]


@settings(max_examples=20)
@given(
    st.lists(st.tuples(st.from_regex(r"[a-z][a-z0-9-]{0,5}", fullmatch=True), st.integers(1, 9)))
)
def test_hosts_are_read_as_they_are_written(named: list[tuple[str, int]]) -> None:
    hosts = [Host(name, slots) for name, slots in dict(named).items()]
    if hosts:
        assert read_hosts(",".join(written(host) for host in hosts)) == hosts


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "has no name"),
        ("a,,b", "has no name"),
        ("-oProxyCommand=x", "is not a host"),
        ("a b", "is not a host"),
        ("a;reboot", "is not a host"),
        ("$(x)", "is not a host"),
        ("-l@a", "is not the name of a user"),
        ("a:0", "1 or more"),
        ("a:two", "1 or more"),
        ("a:", "1 or more"),
        ("a:2222", "--ssh 'ssh -p 2222'"),
        ("ssh://a", "1 or more"),
    ],
)
def test_what_is_no_host_is_refused(text: str, part: str) -> None:
    with pytest.raises(BadRequest) as refused:
        read_hosts(text)
    assert part in str(refused.value)


def test_a_file_of_hosts(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# ours\na\n\nme@b:2  # two cores\nc slots=4\n")
    assert read_hosts_file(str(file)) == [Host("a"), Host("b", 2, "me"), Host("c", 4)]
    for content, part in (
        ("a\nb two", "line 2: 'b two' is not a host"),
        ("a slots=x", "line 1: 'a:x': after the colon"),
        ("# none", "names no host"),
    ):
        file.write_text(content)
        with pytest.raises(BadRequest, match=part):
            read_hosts_file(str(file))
    with pytest.raises(BadRequest, match="cannot be read: No such file"):
        read_hosts_file(str(tmp_path / "nothing"))


def test_ranks_are_dealt_out_host_by_host() -> None:
    hosts = read_hosts("a,b:2,c:3")
    assert [host.ranks for host in deal(hosts)] == [(0,), (1, 2), (3, 4, 5)]
    assert [host.ranks for host in deal(hosts, 2)] == [(0,), (1,)]
    with pytest.raises(
        BadRequest, match=r"8 ranks need 8 slots, and a, b, c have 6: .*a:3,b:2,c:3"
    ):
        deal(hosts, 8)


# --- ssh


def test_the_command_of_ssh() -> None:
    line = command_line(["ssh", "-p", "22"], Host("a", 1, "me"), "/opt/my env/python", 60.0)
    assert line[:3] == ["ssh", "-p", "22"]  # with ssh the first of two options counts
    assert "BatchMode=yes" in line
    assert line[line.index("ServerAliveInterval=15") + 2] == "ServerAliveCountMax=3"
    assert line[-3:-1] == ["--", "me@a"]
    assert line[-1].startswith("'/opt/my env/python' -u -c '")
    assert quoted("~/my env/python") == "~/'my env/python'"
    assert ssh_words("ssh -i 'a key'") == ["ssh", "-i", "a key"]
    for wrong in ("ssh 'x", ""):
        with pytest.raises(BadRequest, match="--ssh"):
            ssh_words(wrong)


def test_the_program_for_a_host_is_one_line() -> None:
    line = first_line("mark:")
    assert line.count(b"\n") == 1
    source = eval(line)
    assert "def begin" in source
    compile(source, "boot", "exec")


@pytest.mark.parametrize(
    ("said", "code", "part"),
    [
        ("ssh: Could not resolve hostname a: Name or service not known", 255, "has no address"),
        ("ssh: connect to host a port 22: Connection refused", 255, "refuses the connection"),
        ("ssh: connect to host a port 22: No route to host", 255, "does not answer"),
        ("me@a: Permission denied (publickey,password).", 255, "refuses your key"),
        ("No ED25519 host key is known\nHost key verification failed.", 255, "does not know"),
        ("@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key ver", 255, "another host"),
        ("bash: /x/python: No such file or directory", 127, "has no Python"),
        ("something new", 255, "cannot be reached: something new (try: ssh -v a)"),
        ("", None, "no answer"),
        ("SyntaxError: invalid syntax", 1, "is too old"),
    ],
)
def test_what_ssh_says_becomes_a_sentence(said: str, code: int | None, part: str) -> None:
    sentence = explain(Host("a"), said, code, "/x/python", ["ssh", "-v"])
    assert part in sentence
    assert "\n" not in sentence


def test_lines_of_a_rank() -> None:
    lines = Lines()
    assert list(lines.add(b"one\ntw")) == ["one"]
    assert list(lines.add(b"o\r\n10%\r20%\n\xff")) == ["two", "20%"]
    assert list(lines.rest()) == ["\ufffd"]
    assert list(lines.rest()) == []
    assert [len(text) for text in Lines().add(b"x" * 70_000)] == [70_000]
    assert list(Lines(whole=True).add(b"x" * 70_000)) == []


def test_the_address_that_other_hosts_reach() -> None:
    assert own_address("10.1.2.3", ["10.9.9.9"], "") == "10.1.2.3"
    assert own_address(None, ["127.0.0.1", "::1"], "10.0.0.5") == "10.0.0.5"
    assert own_address(None, [], "::1") == os.uname().nodename
    assert own_address("lo", [], "") == address_of("lo") == "127.0.0.1"
    with pytest.raises(BadRequest, match=r"--interface none7 has no IPv4 address .*are .*lo"):
        address_of("none7")
    assert unreached("tcp:127.0.0.1:1", b"x", 0) == "Connection refused"


# --- what is asked for


def call(*words: str) -> Wanted:
    """What `paceline launch WORDS` would start."""
    seen: list[Wanted] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(start, "launch_on_hosts", seen.append)
        CliRunner().invoke(launch, list(words), catch_exceptions=False, standalone_mode=False)
    return seen[0]


def test_the_command_line(tmp_path: Path) -> None:
    wanted = call("--hosts", "a,b:2", "--", "train", "--steps", "3", "--out", "r", "--lost-s", "9")
    assert wanted.words[2:] == ["train", "--steps", "3", "--out", "r", "--lost-s", "9"]
    assert (wanted.folder, wanted.lost_s, wanted.size) == ("r", 9.0, 3)
    assert (wanted.python, wanted.cd) == (sys.executable, str(tmp_path))
    (tmp_path / "hosts").write_text("c:2")
    asked = [
        "--ssh",
        "ssh -p 7",
        "--python",
        "p",
        "--cd",
        "d",
        "--interface",
        "e",
        "--threads",
        "2",
    ]
    wanted = call("--hosts-file", "hosts", *asked, "mine.py", "--lr", "1")
    assert wanted.words == ["mine.py", "--lr", "1"]
    assert (wanted.folder, wanted.lost_s, wanted.threads) == (None, 60.0, 2)
    assert (wanted.ssh, wanted.python, wanted.cd) == (["ssh", "-p", "7"], "p", "d")
    assert wanted.interface == "e"
    assert call("--hosts", "a,b", "-n", "1", "mine.py").size == 1
    assert call("--hosts", "a:2", "--threads", "3", "paceline", "train").words[2:] == [
        "train",
        "--threads",
        "3",
    ]


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--hosts", "a", "--slurm", "-", "x.py"], "cannot be used together"),
        (["--hosts", "a", "--hosts-file", "f", "x.py"], "cannot be used together"),
        (["--python", "p", "x.py"], "--python is for other machines: add --hosts"),
        (["--hosts", "a,b", "--nodes", "2", "x.py"], "--nodes is for a batch script"),
        (["--hosts", "a", "--", "train", "--workers", "3"], "--workers 3, but a takes 1 rank:"),
        (["--hosts", "a", "--", "train", "--strategy", "ps"], "start 2 or more"),
        (["--hosts", "a,b", "--", "train", "--strategy", "serial"], "serial runs 1 worker"),
        (["--hosts", "a,b", "--", "train", "--lost-s", "x"], "lost_s"),
    ],
)
def test_what_cannot_be_asked_for(words: list[str], part: str) -> None:
    with pytest.raises(BadRequest) as refused:
        call(*words)
    assert part in str(refused.value)


def test_options_of_train() -> None:
    assert shared_folder({}) == shared_folder({"resume": "auto"}) == "runs"
    assert shared_folder({"resume": "r/checkpoints/step-1"}) == "r/checkpoints/step-1"
    assert lost_after_s({"lost_s": "7", "steps": 3}) == 7.0
    check({"resume": "elsewhere", "workers": 9}, deal(read_hosts("a")))  # the ranks read it


def test_the_seat_of_a_rank() -> None:
    env = {
        "RANK": "2",
        "WORLD_SIZE": "3",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "1",
        "PACELINE_SECRET": "00" * 32,
        "PACELINE_BOARD": "tcp:10.0.0.1:7",
        "PACELINE_LAUNCHER": "ssh",
        "PACELINE_HOSTS": "a,b",
    }
    seat = find(env)
    assert seat is not None
    assert (seat.launcher, seat.board, seat.one_host) == ("ssh", "tcp:10.0.0.1:7", False)
    assert engine(env) == {"ssh": {"hosts": ["a", "b"]}}
    assert engine({}) == {}


# --- the launcher and its supervisors; a stand-in for ssh starts them on this machine

STAND_IN = """#!/bin/sh
for last; do :; done
echo "Welcome to this machine"
exec sh -c "$last"
"""


@pytest.fixture
def on_here(tmp_path: Path) -> Callable[..., None]:
    """`launch_on_hosts` of a script, with a stand-in for ssh."""
    ssh = tmp_path / "ssh"
    ssh.write_text(STAND_IN)
    ssh.chmod(0o755)

    def go(script: str, hosts: str = "a,b:2", **more: Any) -> None:
        (tmp_path / "script.py").write_text(script)
        wanted = Wanted(
            deal(read_hosts(hosts)),
            ("script.py", "x"),
            [str(ssh)],
            sys.executable,
            str(tmp_path),
            interface="127.0.0.1",
        )
        launch_on_hosts(Wanted(**{**vars(wanted), **more}))

    return go


@pytest.mark.processes
def test_ranks_and_what_they_print(
    on_here: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    on_here(
        "import os, sys\n"
        "print(os.environ['RANK'], os.environ['LOCAL_RANK'], os.environ['LOCAL_WORLD_SIZE'],\n"
        "      os.environ['WORLD_SIZE'], sys.argv[1], os.environ['OMP_NUM_THREADS'])\n"
        "print('oh', file=sys.stderr)\n",
        threads=5,
    )
    out, err = capsys.readouterr()
    assert sorted(out.splitlines()) == [
        "[a rank 0] 0 0 1 3 x 5",
        "[b rank 1] 1 0 2 3 x 5",
        "[b rank 2] 2 1 2 3 x 5",
    ]
    assert sorted(err.splitlines()) == ["[a rank 0] oh", "[b rank 1] oh", "[b rank 2] oh"]


@pytest.mark.processes
def test_a_rank_that_fails_ends_the_others_and_what_they_have_started(
    on_here: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "GRACE_S", 0.1)
    with pytest.raises(RunFailed, match=r"rank 2 on host b: .*exit code 3; the others were ended"):
        on_here(
            "import os, subprocess, sys, time\n"
            "if os.environ['RANK'] == '2':\n"
            "    while not (os.path.exists('0') and os.path.exists('1')): time.sleep(0.01)\n"
            "    sys.exit(3)\n"
            "child = subprocess.Popen(['sleep', '100'])\n"
            "open(os.environ['RANK'] + '.new', 'w').write(f'{os.getpid()} {child.pid}')\n"
            "os.rename(os.environ['RANK'] + '.new', os.environ['RANK'])\n"
            "time.sleep(100)\n"
        )
    pids = [int(pid) for rank in "01" for pid in (tmp_path / rank).read_text().split()]
    assert len(pids) == 4
    assert not [pid for pid in pids if alive(pid)]


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended may wait for its parent to notice."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.processes
def test_a_second_signal_does_not_wait_for_a_checkpoint(
    on_here: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []

    def show(host: Host, message: dict[str, Any]) -> None:
        shown.append(message["text"])
        if len(shown) < 3:  # it is ready; then it has heard the first signal
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(crew, "print_line", show)
    with pytest.raises(Interrupted) as ended:
        on_here(
            "import signal, time\n"
            "signal.signal(signal.SIGINT, lambda *_: print('not yet'))\n"
            "print('ready')\n"
            "while True: time.sleep(0.1)\n",
            hosts="a",
        )
    assert ended.value.number == signal.SIGINT
    assert shown == ["ready", "not yet"]


@pytest.mark.slow
@pytest.mark.processes
def test_a_stopped_terminal_is_no_lost_launcher(
    on_here: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []

    def show(host: Host, message: dict[str, Any]) -> None:
        shown.append(message["text"])
        time.sleep(1.5)  # longer than `lost_s`

    monkeypatch.setattr(crew, "print_line", show)
    monkeypatch.setattr(crew, "BEAT_S", 0.05)
    on_here("import time; print('one'); time.sleep(2); print('two')", hosts="a", lost_s=1.0)
    assert shown == ["one", "two"]


STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "


class Supervised:
    """A supervisor at the end of two pipes, with one rank that sleeps."""

    def __init__(self, folder: Path, lost_s: float = 60.0, before: str = "") -> None:
        code = (
            "import sys; from paceline.launch.ssh.supervisor import Supervisor;"
            "sys.exit(Supervisor().run(sys.argv[1].encode() + b'\\n'))"
        )
        first = {"do": "look", "cd": str(folder), "script": None, "token": None, "ranks": [0]}
        more = {"board": "tcp:127.0.0.1:1", "secret": "00", "lost_s": lost_s}
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, json.dumps({**first, **more})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        order = {
            "do": "start",
            "ranks": [4],
            "environment": {"PYTHONUNBUFFERED": "1"},
            "command": ["-c", f"{before}import os, time; print(os.getpid()); time.sleep(100)"],
            "set_threads": False,
            "threads": None,
        }
        assert "answer" in json.loads(self.process.stdout.readline())
        self.process.stdin.write(json.dumps(order).encode() + b"\n")
        self.process.stdin.flush()
        self.rank = int(json.loads(self.process.stdout.readline())["text"])

    def ended(self) -> bool:
        """Whether supervisor and rank end; also closes the pipes."""
        try:
            self.process.wait(30)
            until = time.monotonic() + 30
            while alive(self.rank) and time.monotonic() < until:
                time.sleep(0.01)
            return not alive(self.rank)
        finally:
            self.process.kill()
            for stream in (self.process.stdin, self.process.stdout):
                assert stream is not None
                stream.close()


@pytest.mark.processes
@pytest.mark.parametrize("how", ["closed", "silent", "killed", "asked", "stubborn"])
def test_no_rank_outlives_its_launcher(tmp_path: Path, how: str) -> None:
    lost_s = 0.3 if how == "silent" else 60.0
    one = Supervised(tmp_path, lost_s, STUBBORN if how == "stubborn" else "")
    assert one.process.stdin is not None
    if how == "closed":
        one.process.stdin.close()
    elif how == "killed":
        one.process.kill()
    elif how == "asked":
        one.process.terminate()
    elif how == "stubborn":  # it ignores SIGTERM
        one.process.stdin.write(b'{"do": "end", "grace_s": 0.1}\n')
        one.process.stdin.flush()
    assert one.ended()
