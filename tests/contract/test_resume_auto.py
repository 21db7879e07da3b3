"""`--resume auto`: one command line for the first start and for all further ones, in every state of
the run's folder.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import identical, make_pairs, small_net

import paceline
from paceline.data.base import Data, TensorSamples
from paceline.errors import BadRequest
from paceline.launch.again import Again, look
from paceline.record.lock import HELD, alone_in

STEPS = 8


class Fragile(TensorSamples):
    """Samples that fail once, when so many batches were read."""

    left = 10**9

    def batch(self, indices: torch.Tensor) -> Any:
        self.left -= 1
        if self.left < 0:
            raise OSError("the disk is gone")
        return super().batch(indices)


def train(out: Path, fails_after: int = 10**9, **more: Any) -> paceline.Run:
    data = Fragile(*make_pairs(60))
    data.left = fails_after
    options: dict[str, Any] = {
        "model": small_net,
        "data": Data("own", data, None, (6,), 3),
        "transport": "inproc",
        "memory_format": "contiguous",
        "batch_size": 8,
        "steps": STEPS,
        "checkpoint_every": "2",
        "progress": False,
        "resume": "auto",
    }
    return paceline.train(out=str(out), **{**options, **more})


def fail(out: Path, after: int = 5, **more: Any) -> None:
    with pytest.raises(paceline.errors.RunFailed, match="the disk is gone"):
        train(out, after, **more)


def notices(out: Path) -> list[str]:
    lines = (out / "events" / "notices.jsonl").read_text().splitlines()
    return [json.loads(line)["text"] for line in lines]


def sessions(run: paceline.Run) -> list[int]:
    """The first step of every session, as worker 0 tells it."""
    lines = (run.out / "events" / "worker-0.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    return [event["from_step"] for event in events if event["kind"] == "start"]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    return train(tmp_path_factory.mktemp("unbroken") / "run").model.state_dict()


def test_it_begins_where_there_is_nothing(
    tmp_path: Path, unbroken: dict[str, torch.Tensor]
) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("absent", "empty"):
        run = train(tmp_path / name)
        assert sessions(run) == [0]
        assert identical(run.model.state_dict(), unbroken)


def test_it_goes_on_from_the_last_checkpoint(
    tmp_path: Path, unbroken: dict[str, torch.Tensor]
) -> None:
    out = tmp_path / "run"
    fail(out)
    run = train(out)
    assert sessions(run) == [0, 4]
    assert f"going on from step 4 of {out}" in notices(out)
    assert run.record["status"] == "completed"
    assert identical(run.model.state_dict(), unbroken)


def test_it_begins_again_without_a_checkpoint(
    tmp_path: Path, unbroken: dict[str, torch.Tensor]
) -> None:
    out = tmp_path / "run"
    fail(out, checkpoint_every=None)
    run = train(out)
    assert sessions(run) == [0, 0]
    assert any(text.endswith("the run begins again") for text in notices(out))
    assert identical(run.model.state_dict(), unbroken)


def damage(out: Path) -> None:
    newest = max((out / "checkpoints").glob("step-*"))
    (newest / "worker-0.pt").write_bytes(b"not what was written")


def test_a_damaged_checkpoint_is_passed_over(
    tmp_path: Path, unbroken: dict[str, torch.Tensor]
) -> None:
    out = tmp_path / "run"
    fail(out, keep="all")
    damage(out)
    run = train(out)
    assert sessions(run) == [0, 2]
    assert any("step-00000004 is damaged" in t and "from step 2" in t for t in notices(out))
    assert identical(run.model.state_dict(), unbroken)


def test_it_begins_again_where_no_checkpoint_is_whole(tmp_path: Path) -> None:
    out = tmp_path / "run"
    fail(out, after=3)
    damage(out)
    run = train(out)
    assert sessions(run) == [0, 0]
    assert run.record["status"] == "completed"


def test_a_folder_that_a_killed_run_left_behind(tmp_path: Path) -> None:
    """Neither run.json nor config.json: the process was killed before it wrote them."""
    out = tmp_path / "run"
    fail(out, after=1)
    (out / "run.json").unlink()
    (out / "config.json").unlink()
    assert train(out).record["status"] == "completed"


def test_a_complete_run_is_not_trained_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    first = train(out)
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    capsys.readouterr()
    again = train(out, progress=None)
    said = capsys.readouterr().err
    assert f"the run in {out} is complete already ({STEPS} steps)" in said
    assert again.record == first.record
    assert identical(again.model.state_dict(), first.model.state_dict())
    assert before == {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}


def test_more_steps_are_asked_for_by_name(tmp_path: Path) -> None:
    out = tmp_path / "run"
    train(out)
    run = train(out, resume=str(out), steps=STEPS + 2)
    assert sessions(run) == [0, STEPS]


def a_file(out: Path) -> None:
    out.write_text("mine")


def own_loop(out: Path) -> None:
    (out / "events").mkdir(parents=True)
    (out / "config.json").write_text(json.dumps({"own_loop": True}))


@pytest.mark.parametrize(
    ("there", "sentence"),
    [(a_file, "run is a file: name a folder"), (own_loop, "is the run of a loop of your own")],
)
def test_what_is_no_run_of_train_is_refused(
    tmp_path: Path, there: Callable[[Path], None], sentence: str
) -> None:
    there(tmp_path / "run")
    with pytest.raises(BadRequest, match=sentence):
        train(tmp_path / "run")


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "run"
    fail(out)
    with alone_in(out, HELD), pytest.raises(BadRequest, match="continued by another process"):
        train(out)


def test_it_needs_a_folder() -> None:
    with pytest.raises(BadRequest, match=r'resume="auto" goes on .* say which with out=DIR'):
        paceline.train(model=small_net, data=make_pairs(60), resume="auto", progress=False)


@pytest.mark.slow
def test_a_private_run_does_not_spend_twice(tmp_path: Path) -> None:
    """Its steps are spent, and without a checkpoint it cannot go on from them."""
    out, private = tmp_path / "run", {"privacy": "noise=1.0", "checkpoint_every": None}
    with pytest.raises(paceline.errors.RunFailed):
        train(out, faults=("die:rank=0,step=4",), **private)
    with pytest.raises(BadRequest, match="cannot be recovered"):
        train(out, **private)


def test_what_rank_0_found_is_what_the_others_read(tmp_path: Path) -> None:
    out = tmp_path / "run"
    fail(out)
    found = look({"out": str(out), "resume": "auto"})
    assert Again.read(json.loads(json.dumps(vars(found)))) == found
    options = {"out": str(out), "resume": "auto", "lr": 0.1}
    assert found.applied(options) == {**options, "resume": found.resume}
    shutil.rmtree(out)
    assert look(options) == Again()
    assert Again().applied(options) == {"out": str(out), "lr": 0.1}
    assert Again().applied({"resume": "runs/a"}) == {"resume": "runs/a"}
