"""One process at a time works in a run's folder: tests with real processes, some of them killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.commands import Popen, run
from tests.conftest import make_pairs, small_net

import paceline
from paceline.errors import BadRequest
from paceline.record.lock import LOCK, alone_in
from paceline.record.reader import read_run

ROOT = Path(__file__).parent.parent.parent
OPTIONS = {
    "model": small_net,
    "data": (make_pairs(60), None),
    "transport": "inproc",
    "memory_format": "contiguous",
}
BEGUN = {**OPTIONS, "batch_size": 8, "steps": 2, "checkpoint_every": "1", "progress": False}

# A run that says "ready" at its third step, and makes it when it is told to.
HELD_UP = """
    import sys
    import paceline
    from tests.small import make_pairs, small_net
    from paceline.data.base import Data, TensorSamples

    class Samples(TensorSamples):
        batches = 0
        def batch(self, indices):
            self.batches += 1
            if self.batches == 3:
                print("ready", flush=True)
                sys.stdin.readline()
            return super().batch(indices)

    data = Data("own", Samples(*make_pairs(60)), None, (6,), 3)
    paceline.train(data=data, model=small_net, progress=False, {options})
"""


@contextmanager
def process(script: str) -> Iterator[Popen]:
    """Start a script that prints `ready` and waits; let it go on when the body ends."""
    command = [sys.executable, "-c", textwrap.dedent(script)]
    where = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": where}
    with Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    ) as running:
        try:
            assert running.stdout is not None
            assert running.stdout.readline() == "ready\n"
            yield running
        finally:
            if running.poll() is None:
                running.communicate("\n", timeout=60)


@pytest.mark.parametrize("privacy", [None, pytest.param("noise=1.0", marks=pytest.mark.slow)])
def test_two_processes_cannot_go_on_with_one_run(tmp_path: Path, privacy: str | None) -> None:
    out = tmp_path / "run"
    paceline.train(**BEGUN, out=str(out), **({"privacy": privacy} if privacy else {}))
    before = (out / "run.json").read_text()
    with process(HELD_UP.format(options=f"resume={str(out)!r}, steps=6")) as first:
        with pytest.raises(BadRequest, match="run: this run is being continued by another process"):
            paceline.train(**OPTIONS, resume=str(out), steps=4, progress=False)
        assert (out / "run.json").read_text() == before
    assert first.returncode == 0
    more = paceline.train(**OPTIONS, resume=str(out), steps=7, progress=False)
    assert more.steps == 7
    if privacy:
        assert [line["steps"] for line in more.record["privacy"]["sessions"]] == [2, 4, 1]


def test_a_folder_in_which_a_run_begins_anew_is_not_taken_away(tmp_path: Path) -> None:
    """A request was refused in this folder, so a run may begin in it; the first one that does holds
    it.
    """
    out = tmp_path / "run"
    (out / "events").mkdir(parents=True)
    (out / "run.json").write_text(json.dumps({"schema": 1}))
    with process(
        HELD_UP.replace("== 3", "== 2").format(
            options=f"out={str(out)!r}, steps=3, transport='inproc'"
        )
    ) as first:
        assert (out / "events" / "worker-0.jsonl").is_file()
        with pytest.raises(BadRequest, match="is being continued by another process"):
            paceline.train(**BEGUN, out=str(out))
        assert (out / "events" / "worker-0.jsonl").is_file()
    assert first.returncode == 0
    assert read_run(out)["result"]["steps"] == 3


def test_a_child_that_outlives_its_killed_parent_does_not_keep_the_folder(tmp_path: Path) -> None:
    """Workers can outlive a killed launcher where the system cannot end them with it."""
    script = f"""
        import os, sys
        from pathlib import Path
        from paceline.record.lock import alone_in
        with alone_in(Path({str(tmp_path)!r}), "taken"):
            if os.fork() == 0:
                print("ready", flush=True)  # the fork has closed its copy of the lock
                sys.stdin.readline()
                os._exit(0)
            os.wait()
    """
    with process(script) as parent:
        with pytest.raises(BadRequest, match="taken"), alone_in(tmp_path, "taken"):
            pass
        parent.kill()
        parent.wait(30)
        # its child is alive: it reads from a pipe that we have not closed
        with alone_in(tmp_path, "taken"):
            pass
        assert parent.stdin is not None
        parent.stdin.close()


def test_one_process_cannot_hold_a_folder_twice(tmp_path: Path) -> None:
    with alone_in(tmp_path, "taken"):
        for _ in range(2):
            with pytest.raises(BadRequest, match="taken"), alone_in(tmp_path, "taken"):
                pass
        other = (
            "import pathlib, paceline.record.lock as lock\nwith lock.alone_in(pathlib.Path('.'),"
            " 'taken'): pass"
        )
        done = run(
            [sys.executable, "-c", other], capture_output=True, text=True, timeout=60, check=False
        )
        # the refusals above have not given the lock up
        assert "BadRequest: .: taken" in done.stderr
    with alone_in(tmp_path, "taken"):
        pass


def test_a_file_system_without_locks_is_used_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno
    import fcntl

    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", no_locks)
    with alone_in(tmp_path, "taken"):
        assert (tmp_path / LOCK).exists()
