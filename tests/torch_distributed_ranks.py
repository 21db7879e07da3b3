"""What ranks do under mpirun in test_torch_distributed.py: PyTorch's own tests of
torch.distributed, one after the other in the same processes.

The ranks import this file, and so need no pytest.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import sys
import traceback
import unittest
from collections.abc import Callable, Collection
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from paceline.transport.base import Rendezvous
from paceline.transport.c10d.store import connect_store

DEADLINE_S = 60.0  # for one test; faulthandler then ends the rank, and mpirun the others
TOGETHER_S = 10.0  # for the other ranks to end a test that failed on this one
MODULE = "torch.testing._internal.distributed.distributed_test"
Tell = Callable[[str, dict[str, Any]], None]


class LikeMpi(str):
    """The name of a backend, equal to "mpi" too: bodies ask for it before they train on the CPU."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return other == "mpi" or str.__eq__(self, other)  # type: ignore[arg-type]

    def __ne__(self, other: object) -> bool:
        return not self == other


def run_tests(
    backend: str,
    left_out: Collection[str],
    begun: Collection[str],
    folder: str,
    rendezvous: Rendezvous,
    say: Tell,
) -> None:
    """Run every test whose name has no word of `left_out`, except those that have begun before.

    Says of each what became of it on this rank.
    """
    theirs, case, skips = load_tests(backend, rendezvous.size, folder)
    store = connect_store(rendezvous)
    names = (n for n in sorted(dir(case)) if n.startswith("test_") and n not in begun)
    for name in (n for n in names if not any(word in n for word in left_out)):
        faulthandler.dump_traceback_later(DEADLINE_S, exit=True)
        say("begun", {"test": name})
        own = dist.PrefixStore(name, store)
        dist.init_process_group(
            backend,
            store=own,
            rank=rendezvous.rank,
            world_size=rendezvous.size,
            timeout=timedelta(seconds=theirs.CUSTOM_PG_TIMEOUT.get(name, DEADLINE_S / 2)),
        )
        if rendezvous.rank == 0:
            theirs.Barrier.init()
        theirs.Barrier.barrier_id = 0
        _meet(own, "begin", rendezvous, DEADLINE_S)
        outcome = _outcome_of(case, name, rendezvous.rank, skips)
        say("ended", {"test": name, "rank": rendezvous.rank, "outcome": outcome})
        _meet(own, "end", rendezvous, DEADLINE_S if outcome == "passed" else TOGETHER_S)
        if dist.is_initialized():
            dist.destroy_process_group()
        faulthandler.cancel_dump_traceback_later()


def load_tests(backend: str, size: int, folder: str) -> tuple[Any, Any, dict[int, str]]:
    """Import PyTorch's tests: the module, the test case, and its exit codes that mean "skipped".

    The decorators read the backend on import: there it is gloo, so that all that gloo is asked is
    asked of `backend`. The bodies read it when they run. "mpi" in the environment lets those tests
    run that want eight ranks of any other backend.
    """
    os.environ.update(
        BACKEND="gloo",
        WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        TEMP_DIR=folder,
        INIT_METHOD=f"file://{folder}/meeting",
        GLOO_SOCKET_IFNAME="lo",
    )
    for name in ("barrier", "test_dir"):
        Path(folder, name).mkdir(exist_ok=True)
    theirs = importlib.import_module(MODULE)
    common = importlib.import_module("torch.testing._internal.common_distributed")
    if backend != "gloo":
        importlib.import_module("paceline.transport.mpi.torch_backend")
    os.environ["BACKEND"] = "mpi"
    theirs.BACKEND = backend if backend == "gloo" else LikeMpi(backend)
    case = type("Case", (theirs.TestDistBackend, theirs.DistributedTest._DistTestBase), {})
    return theirs, case, {s.exit_code: s.message for s in common.TEST_SKIPS.values()}


def _outcome_of(case: Any, name: str, rank: int, skips: dict[int, str]) -> str:
    test = case(name)
    test.rank = rank
    why = getattr(getattr(case, name), "__unittest_skip_why__", "")
    if why and not (why.startswith("Only MPI supports") and dist.get_backend() != "gloo"):
        return f"skipped: {why}"
    torch.manual_seed(1234)
    try:
        getattr(test, name)()
    except unittest.SkipTest as skip:
        return f"skipped: {skip}"
    except SystemExit as end:
        if end.code not in skips:
            return f"failed: exit {end.code}"
        return f"skipped: {skips[int(end.code)]}"
    except Exception:
        return f"failed: {traceback.format_exc()}"
    return "passed"


def _meet(store: Any, label: str, rendezvous: Rendezvous, deadline_s: float) -> None:
    """Wait for all ranks; end this process, and so all of them, when one does not come."""
    store.set(f"{label}/{rendezvous.rank}", "here")
    try:
        store.wait(
            [f"{label}/{rank}" for rank in range(rendezvous.size)], timedelta(seconds=deadline_s)
        )
    except dist.DistStoreError:
        sys.stderr.flush()
        os._exit(1)
