"""The ranks' lines, their stacks, and the picture that is made of them."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from paceline.cli.main import cli
from paceline.errors import BadRequest
from paceline.results.status import newest, read_status
from paceline.transport.activity import Activity
from paceline.transport.patience import Patience
from paceline.transport.status import stacks
from paceline.transport.status.line import NOW, NOW_AT, SIZE, Line, read_line, read_lines
from paceline.transport.status.picture import (
    STOPPED,
    describe,
    keep_last,
    last_picture,
    lines,
    sentence,
    take_picture,
)
from paceline.transport.status.process import machine_id, start_of, state_of
from paceline.transport.status.stacks import Frame, ask_stacks, frames_in, users_frame


def write(folder: Path, rank: int, step: int = 5, ranks: int = 3, role: str = "worker") -> Line:
    line = Line(folder, rank, ranks)
    line.describe(role)
    line.enter("compute", step)
    return line


def test_a_line_says_what_its_rank_does(tmp_path: Path) -> None:
    activity = Activity(1)
    activity.line = Line(tmp_path / "status", 1, 3)
    activity.line.describe("worker")
    for step in range(1, 4):
        activity.enter("compute", step)
        activity.enter("exchange")
    activity.line.wait("a message", [0, 2], time.time() - 40, False)
    seen = read_line(tmp_path / "status" / "rank-1")
    assert seen is not None
    assert (seen.rank, seen.ranks, seen.pid, seen.role) == (1, 3, os.getpid(), "worker")
    assert (seen.point, seen.step, seen.computed) == ("exchange", 3, 3)
    assert (seen.what, seen.waits_for, seen.idle) == ("a message", (0, 2), False)
    assert seen.waits_since is not None
    assert seen.start == start_of(os.getpid())
    assert seen.steps_per_s is not None
    activity.end()
    seen = read_line(tmp_path / "status" / "rank-1")
    assert seen is not None
    assert (seen.point, seen.waits_since) == (None, None)


def test_damaged_files_are_left_out(tmp_path: Path) -> None:
    assert read_lines(tmp_path / "nothing") == []
    write(tmp_path, 0)
    good = (tmp_path / "rank-0").read_bytes()
    (tmp_path / "rank-1").write_bytes(b"")
    (tmp_path / "rank-2").write_bytes(good[:100])
    (tmp_path / "rank-3").write_bytes(os.urandom(SIZE))
    (tmp_path / "rank-4").mkdir()
    torn = bytearray(good)
    struct.pack_into("<I", torn, NOW_AT + NOW.size - 4, 77)  # the rank was killed as it wrote
    (tmp_path / "rank-5").write_bytes(bytes(torn))
    strange = bytearray(good)
    strange[NOW_AT + 4] = 200  # no such point
    (tmp_path / "rank-6").write_bytes(bytes(strange))
    found = read_lines(tmp_path)
    assert [seen.pid for seen in found] == [os.getpid()] * 2, "the good one and the torn one"
    assert take_picture(tmp_path)[0].doing == "computing step 5"


def test_a_folder_that_cannot_be_written_costs_the_status_only(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    patience = Patience(0, 2, 30.0)
    patience.open_status(tmp_path / "file" / "status")
    patience.activity.enter("compute", 1)
    assert patience.activity.line is None


def test_the_folder_has_the_mode_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    Line(tmp_path / "run" / "status", 0, 1)
    assert (tmp_path / "run" / "status").stat().st_mode & 0o777 == 0o700


def test_writing_costs_about_a_microsecond(tmp_path: Path) -> None:
    """Asserts no seconds: that it writes and allocates nothing is in the code. For `-s` to show."""
    activity = Activity(0)
    activity.line = Line(tmp_path, 0, 1)
    began = time.perf_counter()
    for step in range(1000):
        activity.enter("compute", step)
    print(f"{(time.perf_counter() - began) * 1e3:.2f} microseconds per point")
    seen = read_line(tmp_path / "rank-0")
    assert seen is not None
    assert seen.step == 999


def test_who_waits_for_whom(tmp_path: Path) -> None:
    for rank in (0, 2):
        write(tmp_path, rank).wait("an all-reduce", [r for r in range(3) if r != rank], 1.0, False)
    write(tmp_path, 1, 4)
    picture = take_picture(tmp_path, stacks=False)
    assert sentence(picture).startswith("workers 0 and 2 have waited ")
    assert sentence(picture).endswith("for worker 1 (an all-reduce): computing step 4")
    text = "\n".join(lines(picture))
    assert "waits for ranks 0, 1 (an all-reduce)" in text
    assert "computing step 4" in text
    assert sentence([]) == "no rank has left a line about itself"
    assert sentence(picture[1:2]) == "no rank has waited for another for long"


def test_an_idle_server_is_not_slow_and_does_not_wait(tmp_path: Path) -> None:
    write(tmp_path, 0, 3)
    write(tmp_path, 2, 0, role="server").wait("gradients", [0], 1.0, True)
    picture = take_picture(tmp_path, stacks=False)
    assert sentence(picture) == "no rank has waited for another for long"
    assert "waits for requests" in lines(picture)[-1]


DUMP = f"""Current thread 0x00007f0 (most recent call first):
  File "{os.path.dirname(os.__file__)}/site-packages/torch/nn/functional.py", line 2 in linear
  File "/home/me/model.py", line 41 in forward
  File "{Path(sys.modules["paceline"].__file__).parent}/run/worker.py", line 5 in train
  File "{Path(sys.modules["paceline"].__file__).parent}/launch/forks.py", line 9 in _child
  File "/home/me/train.py", line 3 in <module>
"""


def test_the_users_own_line_is_shown() -> None:
    frames = frames_in('Current thread 0x1 (most recent call first):\n  File "x"\n' + DUMP)
    assert len(frames) == 4, "what has started the ranks is not what they do"
    frame = users_frame(frames)
    assert frame is not None
    assert frame.place == "model.py:41"
    own = users_frame(frames[2:])
    assert own is not None
    assert own.place == "worker.py:5"
    assert users_frame([]) is None
    assert str(frames[1]) == "/home/me/model.py:41 in forward"
    assert frames[1] == Frame("/home/me/model.py", 41, "forward")


CHILD = """
import sys, time
from pathlib import Path
from paceline.transport.patience import Patience
patience = Patience(int(sys.argv[2]), 2, 30.0)
patience.open_status(Path(sys.argv[1]))
patience.activity.line.describe("worker")
patience.activity.enter("compute", 7)
print("ready", flush=True)
def forward():
    {body}
forward()
"""
SLEEPS = "time.sleep(600)"
# A signal ends C's sleep, which then says how many seconds are left.
HOLDS_THE_GIL = "while __import__('ctypes').PyDLL(None).sleep(600): pass"


@pytest.fixture
def child(tmp_path: Path):
    started = []

    def start(body: str, rank: int = 1) -> subprocess.Popen[str]:
        script = tmp_path / "model.py"
        script.write_text(CHILD.format(body=body))
        process = subprocess.Popen(
            [sys.executable, str(script), str(tmp_path / "run" / "status"), str(rank)],
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def eventually(found, wanted: str) -> str:
    until = time.monotonic() + 30
    while wanted not in (said := str(found())) and time.monotonic() < until:
        time.sleep(0.02)
    assert wanted in said
    return said


@pytest.mark.processes
@pytest.mark.parametrize("body", [SLEEPS, HOLDS_THE_GIL])
def test_a_slow_process_gives_its_stack_also_while_the_gil_is_held(
    child, tmp_path: Path, body: str
) -> None:
    process, folder = child(body), tmp_path / "run" / "status"
    eventually(lambda: describe(folder, [0, 1]), "computing step 7, model.py:11")
    seen = read_lines(folder)
    frames = ask_stacks(folder, seen)[1]
    assert frames[0].function == "forward"
    assert process.poll() is None, "the signal ends nothing"
    os.kill(process.pid, signal.SIGSTOP)
    assert eventually(lambda: describe(folder, [1]), STOPPED) == str({1: STOPPED})
    os.kill(process.pid, signal.SIGCONT)
    eventually(lambda: describe(folder, [1]), "computing step 7, model.py:11")
    process.kill()
    process.wait()
    assert describe(folder, [1]) == {1: "ended while computing step 7"}


@pytest.mark.processes
def test_no_signal_goes_to_another_process_of_the_same_number(child, tmp_path: Path) -> None:
    """The number of a rank that has ended may be that of somebody else's process by now."""
    process, folder = child(SLEEPS), tmp_path / "run" / "status"
    pid, start = process.pid, start_of(process.pid)
    assert start is not None
    assert state_of(pid, start, machine_id()) == "running"
    assert state_of(pid, start + 1, machine_id()) == "ended"
    assert state_of(pid, start, b"another machine") == "elsewhere"
    assert state_of(pid, start, b"") == "elsewhere"
    (seen,) = read_lines(folder)
    line = Line(folder, 0, 2)  # of this process, which has registered no handler
    line.enter("compute", 1)
    assert ask_stacks(folder, read_lines(folder)).keys() == {seen.rank}


@pytest.mark.processes
def test_a_program_that_uses_the_signal_itself_keeps_it(child, tmp_path: Path) -> None:
    heard = "import signal; signal.signal(signal.SIGUSR2, lambda *_: print('mine', flush=True))"
    again = "; from paceline.transport.status.stacks import check_signal"
    body = f"{heard}{again}; check_signal(patience.activity.line); print('x', flush=True); {SLEEPS}"
    process = child(body)
    assert process.stdout.readline() == "x\n"
    folder = tmp_path / "run" / "status"
    assert describe(folder, [1]) == {1: "computing step 7"}
    assert [seen.gives_stack for seen in read_lines(folder)] == [False]


def test_a_programs_own_faulthandler_keeps_the_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python does not show handlers that were set in C; the kernel does."""
    monkeypatch.setattr(stacks, "_files", [])
    with (tmp_path / "mine").open("w") as file:
        faulthandler.register(signal.SIGUSR2, file=file)
        try:
            line = Line(tmp_path / "status", 0, 1)
            stacks.give_stack(line, tmp_path)
            assert not line.gives_stack
            os.kill(os.getpid(), signal.SIGUSR2)
        finally:
            faulthandler.unregister(signal.SIGUSR2)
    assert "test_a_programs_own_faulthandler" in (tmp_path / "mine").read_text()


# --- the command


def status_of(*arguments: str) -> str:
    done = CliRunner().invoke(cli, ["status", *arguments])
    assert done.exception is None, done.output
    return done.output


def make_run(folder: Path, **record: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text('{"model": "mlp"}')
    return folder


@pytest.mark.processes
def test_status_of_a_run_under_way_and_of_one_that_was_killed(child, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    process = child(SLEEPS, 0)
    eventually(lambda: status_of(str(run)), "model.py:11")
    assert "no rank has waited for another for long" in status_of(str(run))
    assert "in forward" in status_of(str(run), "--stacks")
    told = json.loads(status_of(str(run), "--json"))
    assert told["status"] == "running"
    assert told["ranks"][0]["step"] == 7
    keep_last(run / "status")
    process.kill()
    process.wait()
    said = status_of(str(run))
    assert "it has ended without a record" in said
    assert "ended while computing step 7" in said
    (kept,) = last_picture(run, keep=True)
    assert (kept["stack"], kept["state"], kept["doing"]) == (
        "model.py:11",
        "running",
        "computing step 7",
    )
    assert not (run / "status").exists()


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"last": 3}', "\0"])
def test_status_of_damaged_folders_is_one_sentence(tmp_path: Path, content: str) -> None:
    run = make_run(tmp_path / "run")
    (run / "run.json").write_text(content)
    (run / "status").mkdir()
    (run / "status" / "rank-0").write_bytes(os.urandom(50))
    with pytest.raises(BadRequest):
        read_status(run)
    (run / "run.json").unlink()
    assert "it has ended without a record" in status_of(str(run))
    with pytest.raises(BadRequest, match="not the folder of a run"):
        read_status(tmp_path / "nothing")
    with pytest.raises(BadRequest, match=r"no config\.json"):
        read_status(tmp_path)
    with pytest.raises(BadRequest, match="paceline status RUN"):
        newest()


def test_status_of_a_finished_run_says_so_and_the_newest_is_the_default(run_inproc) -> None:
    run = run_inproc(workers=2, strategy="allreduce", steps=2, out="runs/a")
    assert not (run.out / "status").exists()
    said = status_of()
    assert said.startswith("runs/a: completed")
    assert "paceline show runs/a" in said
