"""A checkpoint on disk is complete or absent, and a failed one removes no earlier one."""

import os
import resource
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline
from paceline.errors import BadRequest, DataCorrupt, RunFailed
from paceline.record import checkpoint
from paceline.record.lock import alone_in

ABOUT = {"train_s": 0.0, "optimizer": "SGD", "samples": 1}


def save(folder: Path, step: int, workers: int = 1, weights: int = 1, own: int = 1) -> Path:
    about = {"step": step, "workers": workers, **ABOUT}
    mine = {"optimizer": torch.zeros(own)}
    return checkpoint.save(folder, step, 0, {"w": torch.zeros(weights)}, mine, about, lambda: None)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_one_worker_rescues_does_not_replace_what_all_have_made(tmp_path: Path) -> None:
    for step, workers in ((50, 2), (100, 2), (150, 0), (160, 0), (170, 0)):
        save(tmp_path, step, workers)
    assert names(tmp_path) == ["step-00000100", "step-00000160", "step-00000170"]
    save(tmp_path, 180, 2)
    assert names(tmp_path) == ["step-00000170", "step-00000180"]


def test_a_run_that_is_killed_while_it_removes_a_checkpoint_leaves_no_part_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 10)
    save(tmp_path, 20)

    def killed(path: Path, **_: object) -> None:
        next(iter(sorted(Path(path).iterdir()))).unlink() if Path(path).exists() else None

    monkeypatch.setattr(checkpoint.shutil, "rmtree", killed)
    save(tmp_path, 30)
    assert [name for name in names(tmp_path) if not name.startswith(".")] == [
        "step-00000020",
        "step-00000030",
    ]
    monkeypatch.undo()
    checkpoint.sweep(tmp_path)
    assert names(tmp_path) == ["step-00000020", "step-00000030"]


def test_what_is_no_checkpoint_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    others = ["step-", "step-abc", "step-00000020-mine", "step--0000001"]
    for name in others:
        (folder / name).mkdir(parents=True)
        (folder / name / "checkpoint.json").write_text("{}")
    for step in (10, 20, 30):
        save(folder, step)
    newest = (folder / "step-00000030", None)
    assert checkpoint.latest(tmp_path) == checkpoint.latest(tmp_path, whole=True) == newest
    checkpoint.forget_after(folder, 20)
    assert checkpoint.latest(tmp_path) == (folder / "step-00000020", None)
    assert set(names(folder)) == {*others, "step-00000020"}


@pytest.mark.parametrize("content", ["{", "[]", "{}", "[" * 100_000, '{"step": "x", "workers": 1}'])
def test_a_damaged_description_is_one_sentence(tmp_path: Path, content: str) -> None:
    made = save(tmp_path / "checkpoints", 10)
    (made / "checkpoint.json").write_text(content)
    with pytest.raises(DataCorrupt, match=r"checkpoint\.json"):
        checkpoint.about(made)
    with pytest.raises(DataCorrupt, match=r"no checkpoint that can be used.*step-00000010"):
        checkpoint.latest(tmp_path)
    save(tmp_path / "checkpoints", 8)
    found, notice = checkpoint.latest(tmp_path)
    assert found.name == "step-00000008"
    assert notice is not None
    assert "step-00000010 is damaged" in notice


@contextmanager
def files_no_larger_than(size: int) -> Iterator[None]:
    """Limit the size of files, so that writing fails as on a full disk (with "File too large")."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("large", ["weights", "own"])
def test_a_checkpoint_that_cannot_be_written_is_one_sentence_and_leaves_no_file(
    tmp_path: Path, large: str
) -> None:
    save(tmp_path, 10)
    with (
        files_no_larger_than(20_000),
        pytest.raises(RunFailed, match=r"checkpoint at step 20 .*: File too large") as failed,
    ):
        save(tmp_path, 20, **{large: 100_000})
    assert "\n" not in str(failed.value)
    assert [path for path in tmp_path.rglob("*") if path.is_file() and ".part" in str(path)] == []
    checkpoint.sweep(tmp_path)
    assert names(tmp_path) == ["step-00000010"]


def test_weights_that_cannot_be_written_are_one_sentence_and_leave_no_file(tmp_path: Path) -> None:
    with (
        files_no_larger_than(20_000),
        pytest.raises(RunFailed, match=r"model\.safetensors cannot be written: File too large$"),
    ):
        checkpoint.save_weights(tmp_path / "model.safetensors", {"w": torch.zeros(100_000)})
    assert names(tmp_path) == []


def test_every_file_has_the_mode_that_the_umask_gives(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        made = save(tmp_path, 10)
        checkpoint.save_weights(tmp_path / "model.safetensors", {"w": torch.zeros(1)})
    finally:
        os.umask(before)
    files = [tmp_path / "model.safetensors", *made.iterdir()]
    assert {path.name: oct(stat.S_IMODE(path.stat().st_mode)) for path in files} == {
        path.name: "0o640" for path in files
    }


def test_a_checkpoint_is_on_the_disk_when_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    really = os.fsync

    def fsync(handle: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{handle}"))
        really(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    save(tmp_path / "checkpoints", 10)
    aside = tmp_path / "checkpoints" / ".step-00000010.part"
    assert {
        str(aside / name) for name in ("worker-0.pt", "model.safetensors", "checkpoint.json")
    } <= set(synced)
    assert synced[-2:] == [str(aside), str(tmp_path / "checkpoints")]


def test_a_resume_that_fails_keeps_the_later_checkpoints(
    run_inproc: Callable[..., paceline.Run], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    there = ["step-00000010", "step-00000020"]
    common: dict[str, Any] = {"workers": 2, "out": str(out)}
    run_inproc(strategy="local-sgd", steps=20, epochs=9, checkpoint_every=10, **common)
    early = {"resume": str(out / "checkpoints" / there[0]), "steps": 15, "epochs": 9, **common}
    with pytest.raises(BadRequest, match="made with local-sgd, and diloco cannot go on"):
        run_inproc(strategy="diloco", **early)
    assert names(out / "checkpoints") == there
    run_inproc(strategy="local-sgd", **early)  # and one that goes on from there undoes them
    assert names(out / "checkpoints") == ["step-00000010"]


@pytest.mark.parametrize("content", [[1, 2], {"optimizer": {}}, {}])
def test_a_file_with_something_else_is_no_workers_part(content: Any, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "worker-0.pt")
    with pytest.raises(DataCorrupt, match=r"worker-0\.pt is not a worker's part of a checkpoint"):
        checkpoint.load_own(tmp_path, 0)


def test_a_held_folder_is_refused_before_its_checkpoints_are_read(tmp_path: Path) -> None:
    """The holder may be replacing them."""
    (tmp_path / "config.json").write_text("{}")
    with (
        alone_in(tmp_path, "held"),
        pytest.raises(BadRequest, match="being continued by another process"),
    ):
        paceline.train(data="fashion-mini", resume=str(tmp_path))


def test_a_workers_part_with_nothing_more_than_is_needed(tmp_path: Path) -> None:
    """Checkpoints of 0.1.0 have just these; without one of them it is no worker's part."""
    needed = ("optimizer", "random", "generators", "strategy", "epoch_start", "batches")
    part = dict.fromkeys((*needed, "samples_seen"), 1)
    torch.save(part, tmp_path / "worker-0.pt")
    assert checkpoint.load_own(tmp_path, 0) == part
    for name in part:
        torch.save({k: v for k, v in part.items() if k != name}, tmp_path / "worker-0.pt")
        with pytest.raises(DataCorrupt, match="is not a worker's part"):
            checkpoint.load_own(tmp_path, 0)
