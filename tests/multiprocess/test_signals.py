"""A run that signals ask to end, once or often and at any moment, says one sentence, writes one
record and leaves no process.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from tests.commands import PACELINE, Popen
from tests.commands import run as run_command

from paceline.errors import Interrupted
from paceline.launch.signals import delayed, ending

API = """
import sys, torch, paceline
from torch import nn
data = (torch.randn(64, 6), torch.arange(64) % 3)
paceline.train(model=lambda: nn.Linear(6, 3), data=data, workers=int(sys.argv[1]),
               transport=sys.argv[2], epochs=10**6, batch_size=4, threads=1, progress=False,
               out="run")
"""


def ended(
    command: list[str],
    how: list[signal.Signals],
    tmp_path: Path,
) -> tuple[int, str]:
    """Start an endless run, signal it after a few steps; return its exit code and its output."""
    with open(tmp_path / "said", "w") as said:
        process = Popen(command, stdout=said, stderr=said, start_new_session=True)
    events = tmp_path / "run" / "events" / "worker-0.jsonl"
    until = time.monotonic() + 60
    try:
        while not (events.exists() and events.read_text().count('"step"') > 12):
            assert process.poll() is None, (tmp_path / "said").read_text()
            assert time.monotonic() < until
            time.sleep(0.02)
        family = psutil.Process(process.pid).children(recursive=True)
        for number in how:
            process.send_signal(number)
            time.sleep(0.01)
        code = process.wait(60)
        assert psutil.wait_procs(family, timeout=20)[1] == [], "no process is left"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return code, (tmp_path / "said").read_text()


def record(tmp_path: Path) -> dict:
    return json.loads((tmp_path / "run" / "run.json").read_text())


@pytest.mark.parametrize(
    ("how", "workers", "transport"),
    [
        ([signal.SIGTERM], "2", "shm"),
        ([signal.SIGHUP], "2", "inproc"),
        ([signal.SIGINT] * 5, "2", "gloo"),
        pytest.param(
            [signal.SIGHUP, signal.SIGINT, signal.SIGTERM], "2", "shm", marks=pytest.mark.slow
        ),
        pytest.param([signal.SIGTERM] * 5, "2", "mpi", marks=pytest.mark.slow),
    ],
)
def test_14_a_signal_leaves_a_record_in_the_api(
    tmp_path: Path, how: list[signal.Signals], workers: str, transport: str
) -> None:
    (tmp_path / "program.py").write_text(API)
    code, said = ended([sys.executable, "program.py", workers, transport], how, tmp_path)
    assert code != 0
    # With several signals, a later one may end the program before it prints the error.
    assert "Interrupted" in said or len(how) > 1
    found = record(tmp_path)
    assert found["status"] == "interrupted"
    assert found["result"]["steps"] > 5
    expected = "interrupted" if how[0] is signal.SIGINT else f"interrupted by {how[0].name}"
    # The first SIGTERM asks the workers to leave with a checkpoint, a second one ends them at once.
    left = how == [signal.SIGTERM]
    assert found["error"].partition(" after a checkpoint at step ")[:2] == (
        expected,
        " after a checkpoint at step " if left else "",
    )


TRAIN = ["train", "--data", "synthetic:samples=200,shape=6", "--model", "mlp:hidden=4"]
TRAIN += ["--epochs", "1000000", "--out", "run"]
OWN_LOOP = """
import time, torch, paceline
from torch import nn
pace = paceline.join("allreduce", out="run")
model = nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer, _ = pace.prepare(model, optimizer)
while True:
    loss = nn.functional.cross_entropy(model(torch.randn(4, 6)), torch.arange(4) % 3)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def one_sentence(said: str, how: signal.Signals) -> None:
    last = said.strip().splitlines()[-1]
    assert last.startswith(
        "paceline: interrupted" + ("" if how is signal.SIGINT else f" by {how.name}")
    )
    assert said.count("paceline: ") == 1
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("how", "more"),
    [
        ([signal.SIGHUP], ["--workers", "2"]),
        ([signal.SIGTERM] * 5, ["--transport", "inproc"]),  # its one thread sends nothing
        pytest.param([signal.SIGTERM], ["--workers", "2"], marks=pytest.mark.slow),
        pytest.param([signal.SIGINT] * 5, ["--workers", "2"], marks=pytest.mark.slow),
        pytest.param(
            [signal.SIGTERM], ["--workers", "2", "--transport", "mpi"], marks=pytest.mark.slow
        ),
    ],
)
def test_a_signal_leaves_a_record_of_the_command(
    tmp_path: Path, how: list[signal.Signals], more: list[str]
) -> None:
    code, said = ended([str(PACELINE), *TRAIN, "--quiet", *more], how, tmp_path)
    assert code == 128 + how[0]
    one_sentence(said, how[0])
    assert record(tmp_path)["status"] == "interrupted"


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_ranks_of_a_script(tmp_path: Path, how: signal.Signals) -> None:
    (tmp_path / "own.py").write_text(OWN_LOOP)
    code, said = ended([str(PACELINE), "launch", "-n", "2", "own.py"], [how] * 5, tmp_path)
    assert code == 128 + how
    one_sentence(said, how)
    found = record(tmp_path)
    assert (found["status"], found["error"]) == ("interrupted", "interrupted by SIGTERM")


# The command as it is installed, in an interpreter of its own, so that its imports count.
AT_AN_IMPORT = """
import os, signal, sys
class AtImport:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            for _ in range({times}):
                os.kill(os.getpid(), {number})
sys.meta_path.insert(0, AtImport())
from paceline.cli.entry import main
main()
"""


@pytest.mark.parametrize(
    ("module", "how", "times"),
    [
        ("click", signal.SIGINT, 1),  # the first import of the command
        ("torch.autograd", signal.SIGTERM, 5),
        pytest.param("torch.autograd", signal.SIGINT, 1, marks=pytest.mark.slow),
        pytest.param("torch", signal.SIGHUP, 2, marks=pytest.mark.slow),
        pytest.param("torch._dynamo", signal.SIGINT, 5, marks=pytest.mark.slow),
        pytest.param("paceline.strategies.gossip", signal.SIGTERM, 1, marks=pytest.mark.slow),
    ],
)
@pytest.mark.sampled(2)
def test_a_signal_during_an_import(
    tmp_path: Path, module: str, how: signal.Signals, times: int
) -> None:
    code = AT_AN_IMPORT.format(module=module, times=times, number=int(how))
    done = subprocess.run(
        [sys.executable, "-c", code, *TRAIN, "--quiet"],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 128 + how, done.stderr
    one_sentence(done.stderr, how)
    assert Path("run").exists() is Path("run/run.json").exists()


def test_a_folder_that_exists_has_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal comes while the folder is being made."""
    import paceline
    from paceline.launch import folder

    original = folder._next_session

    def signalled(out: Path) -> int:
        signal.raise_signal(signal.SIGTERM)
        return original(out)

    monkeypatch.setattr(folder, "_next_session", signalled)
    with pytest.raises(Interrupted) as stop:
        paceline.train(data="synthetic:samples=40,shape=6", model="mlp:hidden=4", out="run")
    assert stop.value.exit_code == 143
    found = json.loads(Path("run/run.json").read_text())
    assert (found["status"], found["error"]) == ("interrupted", "interrupted by SIGTERM")


def test_after_sigkill_of_the_launcher_a_run_can_be_resumed(tmp_path: Path) -> None:
    said = open(tmp_path / "said", "w")  # noqa: SIM115
    command = [str(PACELINE), *TRAIN, "--workers", "2", "--checkpoint-every", "5", "--quiet"]
    with said:
        process = Popen(command, stdout=said, stderr=said, start_new_session=True)
    until = time.monotonic() + 60
    try:
        while not any(Path("run/checkpoints").glob("step-*")):
            assert process.poll() is None, Path("said").read_text()
            assert time.monotonic() < until
            time.sleep(0.02)
        family = psutil.Process(process.pid).children(recursive=True)
    finally:
        process.kill()
        process.wait()
    assert psutil.wait_procs(family, timeout=20)[1] == [], "no process is left"
    assert not Path("run/run.json").exists()
    left = [Path(f"run/.config.json.{'0' * 16}.part"), Path("run/checkpoints/.step-00000099.part")]
    left[0].write_text("{")
    left[1].mkdir()
    step = 5 + max(int(path.name[5:]) for path in Path("run/checkpoints").glob("step-*"))
    done = run_command(
        [str(PACELINE), "train", "--resume", "run", "--steps", str(step), "--quiet"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert record(tmp_path)["status"] == "completed"
    assert not [path for path in Path("run").rglob(".*") if path.name != ".lock"]


def test_14_only_the_first_signal_interrupts_and_none_while_the_record_is_written() -> None:
    heard: list[str] = []
    with ending() as end:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGHUP)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.raise_signal(number)
            heard.append(end.reason)
    assert heard == ["interrupted by SIGHUP"] * 3
    with ending() as end:
        end.settling = True
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_14_a_programs_own_handler_stays() -> None:
    mine: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: mine.append(number))
    ignored = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ending() as end:
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGHUP)
        assert mine == [signal.SIGTERM]
        assert end.heard is None
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGHUP, ignored)


@pytest.fixture
def alarm_clock() -> Iterator[None]:
    """Take the alarm clock from pytest-timeout, which has it as a user's program might."""
    handler = signal.signal(signal.SIGALRM, signal.SIG_DFL)
    left = signal.setitimer(signal.ITIMER_REAL, 0.0)
    yield
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, *left)


@pytest.mark.usefixtures("alarm_clock")
def test_a_signal_during_an_import_waits_for_its_end(tmp_path: Path) -> None:
    module = "import signal\nsignal.raise_signal(signal.SIGHUP)\nend = True\n"
    (tmp_path / "interrupts_itself.py").write_text(module)
    sys.path.insert(0, str(tmp_path))
    with ending() as end:
        with pytest.raises(KeyboardInterrupt):
            _import_and_wait()
        assert sys.modules.pop("interrupts_itself").end
        assert end.heard is signal.SIGHUP
    sys.path.remove(str(tmp_path))
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL


def _import_and_wait() -> None:
    __import__("interrupts_itself")
    until = time.monotonic() + 20
    while time.monotonic() < until:
        pass


class Dropped:
    def __del__(self) -> None:
        signal.raise_signal(signal.SIGTERM)


def _drop_and_wait() -> None:
    Dropped()
    until = time.monotonic() + 20
    while time.monotonic() < until:
        pass


@pytest.mark.usefixtures("alarm_clock")
def test_an_interruption_that_python_drops_comes_again() -> None:
    with ending() as end:
        with pytest.raises(KeyboardInterrupt):
            _drop_and_wait()
        assert end.raised


def test_delayed_waits_for_the_end_of_the_block() -> None:
    done: list[str] = []

    def signalled() -> None:
        with delayed():
            signal.raise_signal(signal.SIGINT)
            done.append("in the block")
        done.append("after the block")

    with ending(), pytest.raises(KeyboardInterrupt):
        signalled()
    assert done == ["in the block"]
    with delayed(), suppress(KeyboardInterrupt):  # outside `ending` it changes nothing
        signal.raise_signal(signal.SIGINT)


def _a_run(fails: bool) -> None:
    with ending() as end:
        end.settling = True
        signal.raise_signal(signal.SIGINT)  # not now: the record is being written
        assert end.heard is signal.SIGINT
        if fails:
            raise ValueError("the run failed, and its study would go on")


@pytest.mark.parametrize("fails", [False, True])
def test_a_signal_while_a_runs_record_is_written_ends_the_study(fails: bool) -> None:
    """A study is around its runs: what one of them held back must not be lost."""
    with ending(), pytest.raises(KeyboardInterrupt):
        _a_run(fails)
