"""`paceline launch --hosts` for real: OpenSSH servers on two hosts of a testbed, trained on, broken
and resumed on. sshd.py starts them.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.commands import PACELINE, run
from tests.engines import sshd
from tests.engines.engine import same_weights, until, used
from tests.engines.sshd import Machines, finish, machines, words

pytestmark = [pytest.mark.engines, pytest.mark.timeout(420)]

HOSTS = "host-0,host-1:2"
NAMES = ["host-0", "host-1", "host-1"]  # of the three ranks
OPTIONS = {
    "data": "synthetic:shape=1x8x8,samples=600",
    "model": "mlp:hidden=16",
    "strategy": "allreduce:collective=ring",  # the same bits, whoever starts the ranks
    "batch_size": 8,
    "steps": 12,
    "threads": 1,
    "memory_format": "contiguous",
    "sample_every_s": 0,
}
# Long enough to be struck in the middle: worker 0 sleeps after each step.
LONG = {"steps": 240, "checkpoint_every": 10, "faults": "slow:rank=0,factor=150"}
LOOP = """
import sys, torch
import paceline
pace = paceline.join("allreduce:collective=ring", out=sys.argv[1])
torch.manual_seed(0)
model = torch.nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(96, 6)
data = (x, x[:, :3].argmax(1))
model, optimizer, batches = pace.prepare(model, optimizer, data, batch_size=4)
for inputs, targets in batches:
    pace.step(torch.nn.functional.cross_entropy(model(inputs), targets))
pace.finish()
print(f"this is {pace.rank}")
"""
# Ends when it has heard the signal that the launcher was sent.
HEARS = """
import os, signal, sys, time
heard = []
signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
print("ready")
until = time.monotonic() + 100
while not heard and time.monotonic() < until:
    time.sleep(0.05)
print("heard", heard)
sys.exit(75)
"""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    if (reason := sshd.missing()) is not None:
        pytest.skip(reason)
    version = subprocess.run(["ssh", "-V"], capture_output=True, text=True, check=True).stderr
    used("ssh", version)
    with machines(tmp_path_factory.mktemp("sshd"), 2) as made:
        yield made


@pytest.fixture(autouse=True)
def _nothing_is_left(hosts: Machines) -> Iterator[None]:
    """After each test no process is left on any host, but for the servers."""
    yield
    hosts.nothing_is_left()


def train(**options: Any) -> list[str]:
    return ["--hosts", HOSTS, "--", "train", *words({**OPTIONS, **options})]


def locally(out: Path, **options: Any) -> Path:
    """The same run by `paceline train --workers 3`."""
    given = words({**OPTIONS, "workers": 3, "transport": "gloo", **options, "out": out})
    done = run([PACELINE, "train", *given], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out


def record_of(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "run.json").read_text())
    return found


def in_the_middle(out: Path) -> None:
    until("a checkpoint is written", lambda: list(out.glob("checkpoints/*/checkpoint.json")), 120)


def sentences(text: str) -> list[str]:
    """What the launcher itself says; a rank's lines begin with its host."""
    return [line for line in text.splitlines() if line.startswith("paceline: ")]


def expect_refusal(process: "subprocess.Popen[str]", *parts: str) -> None:
    """The launcher has refused the request in one sentence, and no rank was started."""
    code, out, err = finish(process)
    assert (code, out) == (2, ""), err
    assert len(sentences(err)) == len(err.splitlines()) == 1, err
    assert all(part in err for part in parts), err


# --- training


def test_all_reduce_on_two_hosts(hosts: Machines, tmp_path: Path) -> None:
    out = tmp_path / "run"
    code, said, err = finish(hosts.launch(*train(out=out)))
    assert code == 0, err
    record = record_of(out)
    assert (record["status"], record["config"]["launcher"]) == ("completed", "ssh")
    assert [worker["host"] for worker in record["workers"]] == NAMES
    assert record["environment"]["ssh"] == {"hosts": ["host-0", "host-1"]}
    assert all(line.startswith("[host-0 rank 0] ") for line in (said + err).splitlines())
    assert f"record: {out / 'run.json'}" in said
    assert same_weights(out, locally(tmp_path / "local"))
    assert not list(tmp_path.rglob(".paceline-*"))


def test_ranks_on_one_host_open_no_port(hosts: Machines, tmp_path: Path) -> None:
    script = tmp_path / "ports.py"
    script.write_text(
        "import os, subprocess, paceline\n"
        "pace = paceline.join('allreduce')\n"
        "print('board', os.environ['PACELINE_BOARD'][:5])\n"
        "print(subprocess.check_output(['ss', '-Hltn'], text=True))\n"
    )
    code, said, err = finish(hosts.launch("--hosts", "host-1:2", "-n", "2", "ports.py"))
    assert code == 0, err
    assert said.count("board unix:") == 2
    listening = {line.split()[-2] for line in said.splitlines() if "LISTEN" in line}
    others = {one for one in listening if not one.startswith("127.0.0.1:")}
    assert others == {f"{hosts.bed.address(1)}:22"}


def test_a_parameter_server(hosts: Machines, tmp_path: Path) -> None:
    out = tmp_path / "run"
    code, _, err = finish(hosts.launch(*train(out=out, strategy="ps:consistency=async")))
    assert code == 0, err
    assert [one["role"] for one in record_of(out)["workers"]] == ["worker", "worker", "server"]


def test_a_loop_of_ones_own(hosts: Machines, tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    (tmp_path / "hosts").write_text("# two machines\nhost-0\nroot@host-1 slots=2\n")
    code, said, err = finish(hosts.launch("--hosts-file", "hosts", "loop.py", "run"))
    assert code == 0, err
    lines = [f"[{name} rank {rank}] this is {rank}" for rank, name in enumerate(NAMES)]
    assert sorted(said.splitlines()) == lines
    record = record_of(tmp_path / "run")
    assert (record["status"], record["result"]["steps"]) == ("completed", 8)
    assert [worker["host"] for worker in record["workers"]] == NAMES
    assert record["environment"]["ssh"]["hosts"] == ["host-0", "host-1"]


def test_the_folder_and_the_interface_that_were_asked_for(hosts: Machines, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "where.py").write_text(
        "import os, paceline\n"
        "pace = paceline.join('allreduce')\n"
        "print(os.getcwd(), os.environ['PACELINE_BOARD'])\n"
    )
    asked = ["--interface", "eth0", "--cd", str(tmp_path / "there"), "--python", sys.executable]
    code, said, err = finish(hosts.launch("--hosts", "host-1,host-0", *asked, "where.py"))
    assert code == 0, err
    begin = f"{tmp_path / 'there'} tcp:{hosts.bed.address(1)}:"
    assert [begin in line for line in said.splitlines()] == [True, True]


def goes_on(hosts: Machines, out: Path) -> None:
    """The run goes on from its last checkpoint, to the weights of an unbroken one."""
    again = ["--hosts", HOSTS, "--", "train", f"--resume={out}", "--faults=slow:rank=0"]
    code, _, err = finish(hosts.launch(*again))
    assert code == 0, err
    assert record_of(out)["status"] == "completed"
    whole = out.with_name("local")
    assert same_weights(out, locally(whole, **{**LONG, "faults": "slow:rank=0"}))


# --- what goes wrong


def test_a_rank_is_killed_and_the_run_resumed(hosts: Machines, tmp_path: Path) -> None:
    out = tmp_path / "run"
    launcher = hosts.launch(*train(**LONG, out=out))
    in_the_middle(out)
    hosts.ranks(1)[2].kill()
    code, _, err = finish(launcher)
    assert code == 1
    [said] = sentences(err)
    assert said.startswith("paceline: rank 2 on host host-1: its process was killed by SIGKILL")
    assert "the others were ended" in said
    assert "rank 2 is gone" in record_of(out)["error"]
    hosts.nothing_is_left()
    goes_on(hosts, out)


def test_a_rank_raises(hosts: Machines, tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text(
        "import os, sys, time\n"
        "sys.exit('no luck') if os.environ['RANK'] == '1' else time.sleep(100)\n"
    )
    code, _, err = finish(hosts.launch("--hosts", HOSTS, "fails.py"))
    assert code == 1
    assert "[host-1 rank 1] no luck" in err
    assert sentences(err) == [
        "paceline: rank 1 on host host-1: its process ended with exit code 1; the others were ended"
    ]


def test_a_wrong_request_is_refused_once(hosts: Machines, tmp_path: Path) -> None:
    """The ranks find out, and rank 0 says it; the exit code is that of a wrong request."""
    code, _, err = finish(hosts.launch(*train(out=tmp_path / "run", data="imagefolder:nowhere")))
    assert code == 2, err
    assert err.count("paceline: ") == 1
    assert "[host-0 rank 0] paceline: " in err


def test_the_session_of_a_host_is_killed(hosts: Machines, tmp_path: Path) -> None:
    out = tmp_path / "run"
    launcher = hosts.launch(*train(**LONG, out=out))
    in_the_middle(out)
    sessions = hosts.named(1, "sshd: root@notty")
    assert sessions
    for session in sessions:
        session.kill()
    code, _, err = finish(launcher)
    assert code == 1
    [said] = sentences(err)
    assert said.startswith("paceline: the connection to host host-1 (ranks 1, 2) was lost")


def test_a_host_is_cut_off(hosts: Machines, tmp_path: Path) -> None:
    """No packet comes through, so that only silence tells both ends that the other is gone."""
    out = tmp_path / "run"
    launcher = hosts.launch(*train(**LONG, out=out, lost_s=8))
    in_the_middle(out)
    switch = ["ip", "netns", "exec", hosts.bed.namespace("switch"), "ip", "link", "set", "port1"]
    subprocess.run([*switch, "down"], check=True)
    try:
        code, _, err = finish(launcher)
        until("the ranks on the other side end", lambda: not hosts.ranks(1), 60)
    finally:
        subprocess.run([*switch, "up"], check=True)
    assert code == 1
    [said] = sentences(err)
    assert said.startswith("paceline: the connection to host host-1 (ranks 1, 2) was lost")
    # The session's sshd does not know yet that its client is gone.
    for session in hosts.named(1, "sshd: root"):
        session.kill()
    hosts.nothing_is_left()
    goes_on(hosts, out)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_all(hosts: Machines, tmp_path: Path, number: signal.Signals) -> None:
    out = tmp_path / "run"
    launcher = hosts.launch(*train(**LONG, out=out))
    in_the_middle(out)
    launcher.send_signal(number)
    code, _, err = finish(launcher)
    assert code == 128 + number, err
    by = "" if number == signal.SIGINT else f" by {number.name}"
    said = f"paceline: interrupted{by}; the ranks on host-0, host-1 were ended"
    assert sentences(err) == [said]
    assert record_of(out)["status"] == "interrupted"
    assert "Traceback" not in err


def test_ctrl_c_while_it_connects(hosts: Machines, tmp_path: Path) -> None:
    wait = f"sh -c 'echo $$ > {tmp_path}/begun; exec sleep 60' sh"
    launcher = hosts.launch(*train(out=tmp_path / "run"), ssh=wait)
    until("ssh is started", (tmp_path / "begun").exists, 60)
    launcher.send_signal(signal.SIGINT)
    code, _, err = finish(launcher)
    assert (code, err.strip()) == (130, "paceline: interrupted")
    started = int((tmp_path / "begun").read_text())
    until("ssh is ended", lambda: not Path(f"/proc/{started}").exists(), 30)


def test_a_signal_that_asks_for_a_checkpoint_is_passed_on(hosts: Machines, tmp_path: Path) -> None:
    (tmp_path / "hears.py").write_text(HEARS)
    with (tmp_path / "said").open("w") as said:
        launcher = hosts.launch("--hosts", HOSTS, "hears.py", stdout=said)
        until("all are ready", lambda: (tmp_path / "said").read_text().count("ready") == 3, 60)
        launcher.send_signal(signal.SIGUSR1)
        code, _, err = finish(launcher)
    assert (tmp_path / "said").read_text().count(f"heard [{int(signal.SIGUSR1)}]") == 3
    assert code == 75
    assert "its process ended with exit code 75" in sentences(err)[0]


def test_training_leaves_with_a_checkpoint_and_goes_on(hosts: Machines, tmp_path: Path) -> None:
    """SIGUSR1: every rank leaves after a checkpoint. The same command goes on from it."""
    out = tmp_path / "run"
    command = train(**LONG, out=out, resume="auto")
    launcher = hosts.launch(*command)
    in_the_middle(out)
    launcher.send_signal(signal.SIGUSR1)
    code, _, err = finish(launcher)
    assert code == 75, err
    assert sentences(err) == []  # rank 0 has said it
    assert "[host-0 rank 0] paceline: " in err
    steps = record_of(out)["result"]["steps"]
    last = sorted(out.glob("checkpoints/step-*/checkpoint.json"))[-1]
    assert json.loads(last.read_text())["step"] == steps < LONG["steps"]
    again = [word for word in command if not word.startswith("--faults")]
    code, _, err = finish(hosts.launch(*again, "--faults=slow:rank=0"))
    assert code == 0, err
    assert record_of(out)["status"] == "completed"
    assert same_weights(out, locally(tmp_path / "local", **{**LONG, "faults": "slow:rank=0"}))


def test_the_launcher_is_killed(hosts: Machines, tmp_path: Path) -> None:
    out = tmp_path / "run"
    launcher = hosts.launch(*train(**LONG, out=out))
    in_the_middle(out)
    assert sorted([*hosts.ranks(0), *hosts.ranks(1)]) == [0, 1, 2]
    launcher.kill()
    finish(launcher)
    hosts.nothing_is_left()
    assert record_of(out)["status"] == "interrupted"
    goes_on(hosts, out)


def test_the_supervisor_is_killed(hosts: Machines, tmp_path: Path) -> None:
    out = tmp_path / "run"
    launcher = hosts.launch(*train(**LONG, out=out))
    in_the_middle(out)
    supervisor = hosts.ranks(1)[1].parent()
    assert supervisor is not None
    supervisor.kill()
    code, _, err = finish(launcher)
    assert code == 1
    assert "the connection to host host-1 (ranks 1, 2) was lost" in sentences(err)[0]


# --- secrets and strangers


def test_a_stranger_is_no_rank_and_nobody_reads_the_secret(hosts: Machines, tmp_path: Path) -> None:
    out = tmp_path / "run"
    launcher = hosts.launch(*train(**{**LONG, "steps": 60}, out=out))
    in_the_middle(out)
    own = hosts.ranks(1)[1].environ()
    address, secret = own["PACELINE_BOARD"], own["PACELINE_SECRET"]
    assert address.startswith(f"tcp:{hosts.bed.address(0)}:")  # not on all interfaces
    lines = [" ".join(one.cmdline()) for host in range(2) for one in hosts.processes(host)]
    at_home = ["ip", "netns", "pids", hosts.bed.namespace("launcher")]
    there = subprocess.run(at_home, check=True, capture_output=True, text=True).stdout
    for pid in there.split():
        lines.append(Path(f"/proc/{pid}/cmdline").read_text())
        lines.append(Path(f"/proc/{pid}/environ").read_text())
    assert len(lines) > 6
    assert not [line for line in lines if secret in line]
    code = (
        "import sys; from paceline.transport.board.client import Board;"
        "Board(sys.argv[1], b'x' * 32, 2).set('paceline/1/here/2', '{}')"
    )
    stranger = subprocess.run(
        [sys.executable, "-c", code, address],
        preexec_fn=lambda: hosts.bed.enter(1),
        env={**os.environ, "PYTHONPATH": str(sshd.ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert stranger.returncode != 0
    assert "TransportError" in stranger.stderr
    ended, _, err = finish(launcher)
    assert ended == 0, err
    assert f"[host-0] paceline: something at {hosts.bed.address(1)}:" in err
    assert "was turned away" in err
    assert [worker["host"] for worker in record_of(out)["workers"]] == NAMES


# --- bad input


def test_a_name_that_does_not_resolve(hosts: Machines, tmp_path: Path) -> None:
    launcher = hosts.launch("--hosts", "host-0,host-7", "--", "train", f"--out={tmp_path / 'run'}")
    expect_refusal(launcher, "host host-7 has no address here", "~/.ssh/config")
    assert not (tmp_path / "run").exists()


def test_no_server_listens(hosts: Machines) -> None:
    launcher = hosts.launch(*train(), ssh=f"{hosts.ssh} -p 2222")
    expect_refusal(launcher, "refuses the connection", "--ssh 'ssh -p PORT'", "port 2222")


def test_a_key_that_is_refused(hosts: Machines) -> None:
    launcher = hosts.launch(*train(), ssh=hosts.ssh_with("strangers-key", "known_hosts"))
    expect_refusal(launcher, " refuses your key", "ssh-copy-id", "publickey")


def test_a_host_key_that_is_unknown(hosts: Machines) -> None:
    launcher = hosts.launch(*train(), ssh=hosts.ssh_with("user-key", "known_to_nobody"))
    expect_refusal(launcher, " has a host key that ssh does not know", "accept-new")


def test_a_host_key_that_has_changed(hosts: Machines) -> None:
    other = (hosts.folder / "known_hosts").read_text().splitlines()
    keys = [line.partition(" ")[2] for line in other]
    names = [line.partition(" ")[0] for line in other]
    changed = "".join(f"{a} {b}\n" for a, b in zip(names, reversed(keys), strict=True))
    (hosts.folder / "changed").write_text(changed)
    launcher = hosts.launch(*train(), ssh=hosts.ssh_with("user-key", "changed"))
    expect_refusal(launcher, "shows another host key than the one in known_hosts", "ssh-keygen -R")


def test_a_host_that_does_not_answer(hosts: Machines) -> None:
    nowhere = f"{hosts.bed.subnet}.77"
    launcher = hosts.launch("--hosts", f"host-0,{nowhere}", "--", "train")
    expect_refusal(launcher, f"host {nowhere} does not answer", "is it up")


def test_a_server_that_says_nothing(hosts: Machines) -> None:
    code = "import socket, time; s = socket.create_server(('', 2200)); print(1, flush=True);"
    mute = subprocess.Popen(
        [sys.executable, "-c", f"{code} time.sleep(100)"],
        stdout=subprocess.PIPE,
        preexec_fn=lambda: hosts.bed.enter(1),  # noqa: PLW1509 (one thread here)
    )
    assert mute.stdout is not None
    with mute:
        mute.stdout.readline()
        launcher = hosts.launch("--hosts", "host-1", "--", "train", ssh=f"{hosts.ssh} -p 2200")
        try:
            expect_refusal(launcher, "host host-1 does not answer", "timed out")
        finally:
            mute.kill()


def test_no_paceline_and_another_version(hosts: Machines, tmp_path: Path) -> None:
    from paceline import __version__

    none = tmp_path / "none"
    none.write_text(f'#!/bin/sh\nunset PYTHONPATH\nexec {sys.executable} -I -S "$@"\n')
    none.chmod(0o755)
    launcher = hosts.launch("--python", str(none), *train())
    expect_refusal(launcher, "host host-0 has no Paceline in", f"install paceline=={__version__}")
    (tmp_path / "old" / "paceline").mkdir(parents=True)
    (tmp_path / "old" / "paceline" / "__init__.py").write_text("__version__ = '0.0.7'\n")
    other = tmp_path / "other"
    path = f"PYTHONPATH={tmp_path / 'old'}"
    here = f'test "$(hostname)" = host-1 && export {path}'
    other.write_text(f'#!/bin/sh\n{here}\nexec {sys.executable} "$@"\n')
    other.chmod(0o755)
    launcher = hosts.launch("--python", str(other), *train())
    expect_refusal(launcher, "host host-1 has Paceline 0.0.7", f"has Paceline {__version__}")


def test_no_python(hosts: Machines) -> None:
    launcher = hosts.launch("--python", "/nowhere/python", *train())
    expect_refusal(launcher, "host host-0 has no Python", "/nowhere/python", "--python PATH")


def test_a_folder_that_is_not_shared(hosts: Machines) -> None:
    launcher = hosts.launch(*train(out=hosts.folder / "own" / "run"))
    expect_refusal(launcher, f"--out {hosts.folder / 'own' / 'run'} is not shared", "on host-1")


def test_too_few_hosts(hosts: Machines) -> None:
    launcher = hosts.launch("-n", "4", "--hosts", "host-0,host-1:2", "--", "train")
    expect_refusal(launcher, "4 ranks need 4 slots", "have 3", "--hosts host-0:2,host-1:2")
    launcher = hosts.launch(*train(workers=5))
    expect_refusal(launcher, "--workers 5, but host-0, host-1 take 3 ranks")


def test_what_is_not_on_the_hosts(hosts: Machines, tmp_path: Path) -> None:
    launcher = hosts.launch("--hosts", HOSTS, "nothing.py")
    expect_refusal(launcher, "host host-0: there is no file nothing.py in", "--cd DIR")
    launcher = hosts.launch("--cd", "/nowhere", *train())
    expect_refusal(launcher, "host host-0: the folder /nowhere cannot be entered")
    launcher = hosts.launch("--interface", "ib7", *train())
    expect_refusal(launcher, "host host-0: --interface ib7 has no IPv4 address there", "eth0")
    launcher = hosts.launch("--interface", "127.0.0.1", *train(out=tmp_path / "run"))
    expect_refusal(launcher, "host host-1 does not reach host host-0 at 127.0.0.1:", "--interface")
