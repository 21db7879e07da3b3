"""The watcher takes a testbed down when its launcher is killed, and never reads paths and names as
shell code.
"""

import os
import stat
import subprocess
from pathlib import Path

import pytest

from paceline.common.links import Links
from paceline.errors import BadRequest
from paceline.testbed import build, hosts

pytestmark = pytest.mark.processes

HOSTILE = [
    "my temp",
    "$(touch x)",
    "`touch x`",
    "a;touch x",
    "a'b",
    'a"b',
    "-rf",
    "a\nb",
    "*",
    "a&touch x",
    "\\",
]


def bed(folder: Path, name: str = "plnone") -> hosts.Testbed:
    return hosts.Testbed(name, 1, Links(), "10.213.7", str(folder))


def end(watcher: subprocess.Popen[bytes], *namespaces: str) -> None:
    assert watcher.stdin is not None
    for namespace in namespaces:
        watcher.stdin.write(f"{namespace}\n".encode())
    watcher.stdin.close()
    assert watcher.wait(20) == 0


@pytest.mark.parametrize("name", HOSTILE)
def test_the_watcher_removes_the_testbeds_folder_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    own, others = (
        tmp_path / name / "paceline-testbed-x",
        [tmp_path / "my", tmp_path / "a", tmp_path / "temp"],
    )
    for folder in (own, *others):
        folder.mkdir(parents=True)
        (folder / "thesis.txt").write_text("years of work")
    before = sorted(p.name for p in tmp_path.iterdir())
    end(build._watcher(bed(own)))
    assert not own.exists()
    assert all((folder / "thesis.txt").exists() for folder in others)
    # no command in the path was executed
    assert sorted(p.name for p in tmp_path.iterdir()) == before


def test_the_watcher_deletes_the_namespaces_it_was_told_of_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools, log = tmp_path / "tools", tmp_path / "log"
    tools.mkdir()
    ip = tools / "ip"
    ip.write_text(f'#!/bin/sh\nprintf "%s|" "$@" >> "{log}"\necho >> "{log}"\n')
    ip.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    (tmp_path / "bed").mkdir()
    end(build._watcher(bed(tmp_path / "bed")), "plnone-switch", "plnone-0")
    assert log.read_text().splitlines() == ["netns|del|plnone-switch|", "netns|del|plnone-0|"]
    log.unlink()
    end(build._watcher(bed(tmp_path / "bed")))
    assert not log.exists()  # none was made


def test_a_folder_for_temporary_files_with_a_space_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mpirun splits the path of the remote shell at spaces and colons, so the testbed's folder
    never has any.
    """
    for name in ("my temp", "a:b", "$(touch x)"):
        (tmp_path / name).mkdir()
        monkeypatch.setattr(build.tempfile, "gettempdir", lambda name=name: str(tmp_path / name))
        assert build._plain_place() in ("/tmp", "/var/tmp")
    monkeypatch.setattr(build.os, "access", lambda *_: False)
    with pytest.raises(BadRequest, match=r"set TMPDIR to another"):
        build._plain_place()


def test_the_remote_shell_is_one_word(tmp_path: Path) -> None:
    agent = Path(bed(tmp_path, "pl$(touch x)").remote_shell())
    assert stat.S_IMODE(agent.stat().st_mode) == 0o700
    assert "'pl$(touch x)'-\"$n\"" in agent.read_text()
