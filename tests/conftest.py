"""What tests share: small data, small models, and a run on the in-process transport."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

import paceline
from paceline.privacy import native
from paceline.registry import ALL
from tests.small import identical, make_pairs, small_net, weights_distance

__all__ = ["MNIST", "identical", "make_pairs", "small_net", "weights_distance"]

MNIST = Path(__file__).parent.parent / "data" / "MNIST" / "raw"
MULTIPROCESS = Path(__file__).parent / "multiprocess"

# Also while tests are collected: a process that has once used torch's threads cannot be forked
# safely.
torch.set_num_threads(1)

# A busy machine is no failure. The examples are few and the same every time, so that a change fails
# only for what it touches; `make test-slow` looks for new ones.
EXPLORE = "PACELINE_EXPLORE" in os.environ
hypothesis.settings.register_profile(
    "paceline", deadline=None, derandomize=not EXPLORE, max_examples=200 if EXPLORE else 50
)
hypothesis.settings.load_profile("paceline")

# A shell's background job ignores SIGINT, `nohup` ignores SIGHUP, and a child inherits what is
# ignored. Tests send these signals to processes that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGQUIT):
    signal.signal(number, signal.SIG_DFL)

for registry in ALL.values():
    registry.discover()

# Tests have an empty HOME. The compiled loops come from the user's cache, once; workers that a
# test forks inherit them.
native.loops()

# A JVM that runs for seconds spends most of them on compiling well.
os.environ.setdefault("JDK_JAVA_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")

XDIST = "PYTEST_XDIST_WORKER" in os.environ
STARTS = ("os.fork", "os.forkpty", "os.posix_spawn", "os.system", "os.exec", "subprocess.Popen")
started: list[str] = []


def _refuse_processes(
    event: str, arguments: tuple[Any, ...], starts: tuple[str, ...] = STARTS
) -> None:
    # `starts` is an argument because the hook outlives this module's names when Python ends.
    if event in starts and _refuse_processes.active:
        started.append(f"{event} {arguments[:2]}")
        raise RuntimeError(f"{event} in a test that runs under pytest-xdist: mark it `processes`")


_refuse_processes.active = False
if XDIST:
    sys.addaudithook(_refuse_processes)


@pytest.fixture(autouse=True)
def _no_process_under_xdist() -> Iterator[None]:
    """Fail a test that forks or starts a process in a worker of pytest-xdist, which has threads.

    Such tests are in tests/multiprocess or have the marker `processes`, and `make test` runs them
    one after the other, without xdist.
    """
    started.clear()
    _refuse_processes.active = True
    yield
    _refuse_processes.active = False
    assert not started, "mark this test `processes`"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if MULTIPROCESS in item.path.parents:
            item.add_marker(pytest.mark.processes)
    seen: Counter[str] = Counter()
    for item in items:
        if (sampled := item.get_closest_marker("sampled")) is not None:
            name = item.nodeid.partition("[")[0]
            if seen[name] % sampled.args[0] and item.get_closest_marker("slow") is None:
                item.add_marker(pytest.mark.slow)
            seen[name] += 1
    # Tests whose libraries start threads come last: no process is forked beside those threads.
    items.sort(key=lambda item: item.get_closest_marker("native_threads") is not None)


FOREIGN_THREADS = ("V8", "tokio", "polars", "java")  # they stay, and hold locks of their own


@pytest.fixture(autouse=True)
def _no_foreign_thread_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves threads of other libraries behind.

    A process that is forked beside them may hang. Tests that use such libraries in this process
    have the marker `native_threads` and come last.
    """
    before = _foreign_threads()
    yield
    if XDIST or request.node.get_closest_marker("native_threads"):
        return
    left = _foreign_threads() - before
    assert not left, f"mark this test `native_threads`: {left}"


def _foreign_threads() -> set[str]:
    names = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            names.add((task / "comm").read_text().strip())
    return {name for name in names if name.startswith(FOREIGN_THREADS)}


@pytest.fixture(autouse=True)
def _registries_as_they_were() -> Iterator[None]:
    """What a test registers (a plugin, say) is gone after it."""
    before = {name: dict(registry._entries) for name, registry in ALL.items()}
    yield
    for name, registry in ALL.items():
        registry._entries = before[name]


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test in a folder of its own, with a home of its own, one thread, and the same random
    numbers every time.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_thread_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a thread behind.

    Workers are forked from this process, which is safe (and quick) only while it has one thread.
    A worker of pytest-xdist, where nothing is forked, has threads of its own.
    """
    before = threading.active_count() if XDIST else 1
    yield
    if "/unit/" not in str(request.path):
        until = time.monotonic() + 30
        while (left := threading.active_count()) > before and time.monotonic() < until:
            time.sleep(0.01)
        assert left <= before, [thread.name for thread in threading.enumerate()]


@pytest.fixture(autouse=True)
def _no_board_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """End the boards that a test has started as rank 0 of a launcher. They last for a process."""
    module = sys.modules.get("paceline.launch.board")
    if module is None:
        yield
        return
    started: list[Any] = []
    begin = module.HostedApart.__init__

    def noted(self: Any, *given: Any) -> None:
        started.append(self)
        begin(self, *given)

    monkeypatch.setattr(module.HostedApart, "__init__", noted)
    yield
    for board in started:
        board.end()
    if started:
        sys.modules["paceline.launch.place"]._host.cache_clear()  # type: ignore[attr-defined]


@pytest.fixture
def run_inproc(tmp_path: Path) -> Callable[..., paceline.Run]:
    """`paceline.train` on the baton; every call gets a folder of its own."""
    count = iter(range(1000))

    def run(**options: Any) -> paceline.Run:
        defaults: dict[str, Any] = {
            "model": small_net,
            "data": (make_pairs(60), make_pairs(20, seed=1)),
            "transport": "inproc",
            "memory_format": "contiguous",
            "sample_every_s": 0,
            **({} if "global_batch_size" in options else {"batch_size": 8}),
            "out": str(tmp_path / f"run-{next(count)}"),
        }
        return paceline.train(**{**defaults, **options})

    return run
