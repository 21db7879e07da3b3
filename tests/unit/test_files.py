"""Files are whole or not there; caches and locks are where they should be."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.common import files
from paceline.common.files import rename_whole, sync_folder, write_whole
from paceline.common.locks import try_lock
from paceline.common.places import cache_folder, find, places
from paceline.errors import DataUnavailable


@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize(
    "content", ["é\n", "é\n".encode(), lambda aside: aside.write_bytes("é\n".encode())]
)
def test_the_content_replaces_the_old_one_and_nothing_is_left(
    tmp_path: Path, content: files.Content, durable: bool
) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    write_whole(path, content, durable)
    assert path.read_bytes() == b"\xc3\xa9\n"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left"), KeyboardInterrupt()])
def test_after_a_failure_the_old_file_is_there_and_nothing_else(
    tmp_path: Path, error: BaseException
) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def fail(aside: Path) -> None:
        assert aside.parent == tmp_path  # a rename to another file system would be a copy
        aside.write_text("ha")
        raise error

    with pytest.raises(type(error)):
        write_whole(path, fail)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_a_rename_that_fails_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "folder" / "inside").mkdir(parents=True)
    with pytest.raises(OSError, match="directory"):
        write_whole(tmp_path / "folder", "text")
    assert os.listdir(tmp_path) == ["folder"]


def test_permissions_are_those_of_new_files_or_those_asked_for(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    usual = (tmp_path / "plain").stat().st_mode
    write_whole(tmp_path / "text", "text")
    assert (tmp_path / "text").stat().st_mode == usual
    write_whole(tmp_path / "secret", "text", mode=0o600)
    write_whole(tmp_path / "command", "text", mode=0o755)
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "command").stat().st_mode & 0o777 == 0o755


def test_a_secret_is_never_readable_by_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    real = os.open

    def watched(path: Path, flags: int, mode: int = 0o777) -> int:
        handle = real(path, flags, mode)
        seen.append(os.fstat(handle).st_mode & 0o777)
        return handle

    monkeypatch.setattr(os, "open", watched)
    write_whole(tmp_path / "secret", "text", mode=0o600)
    assert seen == [0o600]


def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is synced and renamed, in order."""
    done: list[str] = []
    sync, replace = files.sync, os.replace
    monkeypatch.setattr(files, "sync", lambda p: (done.append(f"sync {kind(p)}"), sync(p)))
    monkeypatch.setattr(os, "replace", lambda a, b: (done.append("rename"), replace(a, b)))
    return done


def kind(path: Path) -> str:
    if path.name.endswith(".part"):
        return "aside"
    return path.name


def test_durable_is_content_before_name_before_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = synced(monkeypatch)
    folder = tmp_path / "folder"
    folder.mkdir()
    write_whole(folder / "file", "text")
    assert done == ["rename"]
    done.clear()
    write_whole(folder / "file", "text", durable=True)
    assert done == ["sync aside", "rename", "sync folder"]
    done.clear()
    (folder / "x.part").write_text("text")
    rename_whole(folder / "x.part", folder / "x")
    assert done == ["sync aside", "rename", "sync folder"]


def test_a_folder_replaces_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = synced(monkeypatch)
    for name in ("new.part", "old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"in {name}").touch()
    rename_whole(tmp_path / "new.part", tmp_path / "old")
    assert done == ["sync aside", "rename", f"sync {tmp_path.name}"]
    assert os.listdir(tmp_path) == ["old"]
    assert os.listdir(tmp_path / "old") == ["in new.part"]


@pytest.mark.parametrize(("number", "told"), [(errno.EINVAL, False), (errno.EIO, True)])
def test_a_folder_that_cannot_be_synced_is_no_failure_but_a_broken_disk_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, told: bool
) -> None:
    def fail(path: Path) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(files, "sync", fail)
    if told:
        with pytest.raises(OSError, match="Input/output"):
            sync_folder(tmp_path)
    else:
        sync_folder(tmp_path)


# --- caches


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have other cache folders")
def test_caches_follow_xdg_and_old_data_is_still_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tmp_path / ".cache" / "paceline"
    assert cache_folder("native") == old / "native"
    assert list(places(None)).count(old / "data") == 1
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    assert cache_folder("java-25") == tmp_path / "elsewhere" / "paceline" / "java-25"
    with pytest.raises(
        DataUnavailable, match=r"elsewhere/paceline/data/set, .*\.cache/paceline/data"
    ):
        find("set", None, ["set"], ["a"])
    (old / "data" / "set").mkdir(parents=True)
    (old / "data" / "set" / "a.gz").touch()
    assert find("set", None, ["set"], ["a"]) == old / "data" / "set"
    new = tmp_path / "elsewhere" / "paceline" / "data" / "set"
    new.mkdir(parents=True)
    (new / "a").touch()
    assert find("set", None, ["set"], ["a"]) == new


@pytest.mark.processes
def test_importing_paceline_imports_neither_library() -> None:
    script = (
        "import sys, paceline, paceline.common.places, paceline.record.lock, paceline.spark.java\n"
        "print(sorted({'platformdirs', 'filelock'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


# --- locks


def test_a_lock_has_one_holder_and_ends_with_release(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    lock = try_lock(path)
    assert lock is not None
    assert try_lock(path) is None
    lock.release()
    again = try_lock(path)
    assert again is not None
    again.release()


@pytest.mark.processes
def test_a_forked_child_neither_holds_nor_releases_its_parents_lock(tmp_path: Path) -> None:
    """In a fresh process: this one may have threads of other tests."""
    script = f"""
import os
from pathlib import Path
from paceline.common.locks import try_lock

path = Path({str(tmp_path / ".lock")!r})
lock = try_lock(path)
child = os.fork()
if child == 0:
    lock.release()  # as a worker does that leaves the launcher's `with`
    os._exit(0 if try_lock(path) is None else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert try_lock(path) is None
"""
    done = subprocess.run([sys.executable, "-c", script], check=False, stderr=subprocess.PIPE)
    assert done.returncode == 0, done.stderr.decode()
