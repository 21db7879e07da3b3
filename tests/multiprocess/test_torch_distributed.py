"""PyTorch's own tests of torch.distributed on the CPU, over `paceline-mpi` under mpirun and over
gloo: whatever passes over gloo passes over `paceline-mpi`.
"""

import re
from functools import partial
from pathlib import Path

import pytest
from tests.torch_distributed_ranks import run_tests

from paceline.launch.mpi import on_mpi_ranks
from paceline.transport.mpi.transport import MpiTransport

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not MpiTransport.available(), reason=f"no MPI: {MpiTransport.missing()}"),
]

RANKS = 4  # the fewest with which no test is skipped for its number of ranks
# Names of tests that are not run, and why.
LEFT_OUT = {
    "sparse": "paceline-mpi refuses sparse tensors",
    "profil": "it looks for profiler events, of nccl, gloo, mpi and ucc only",
    "monitored_barrier": "torch.distributed.monitored_barrier refuses every backend except gloo",
}
# Why PyTorch itself skips others on this machine. A skip for another reason fails the test.
SKIPPED = {
    r"Need at least \d CUDA devices|CUDA is not available": "it trains on GPUs",
    r"(Only )?N(CCL|ccl) |.* one of \{'nccl'\}": "it tests NCCL",
    r"Coalescing manager currently tests with NCCL only": "it uses the GPU; see test_mpi.py",
    r"https://github.com/pytorch/pytorch/issues/\d+": "PyTorch has disabled it on Linux",
    r"Test is failing, see https://|Skipped due to flakiness": "PyTorch has disabled it",
    r"no torchvision": "it needs torchvision",
    r"Only MPI supports (CPU )?all_to_all": "gloo alone: PyTorch expects this of MPI",
}


def outcomes(backend: str, folder: Path) -> dict[str, str]:
    """What became of each test: "passed", "skipped: why" or "failed: why", the worst of all ranks.

    When a test hangs or kills a rank, mpirun ends; the tests after it run under a new mpirun.
    """
    found: dict[str, dict[int, str]] = {}
    begun: list[str] = []

    def hear(kind: str, content: dict[str, object]) -> None:
        name = str(content["test"])
        if kind == "begun" and name not in begun:
            begun.append(name)
        elif kind == "ended":
            found.setdefault(name, {})[content["rank"]] = content["outcome"]

    for number in range(20):  # that many hangs at most
        own = folder / f"{backend}-{number}"
        own.mkdir()
        results, failures = on_mpi_ranks(
            partial(run_tests, backend, tuple(LEFT_OUT), frozenset(begun), str(own)), RANKS, hear
        )
        if len(results) == RANKS:
            break
        assert begun, failures
        ended = found.setdefault(begun[-1], {})
        ended |= dict.fromkeys(set(range(RANKS)) - set(ended), "failed: it hung, or a rank died")
    return {name: max(ranks.values(), key=_badness) for name, ranks in found.items()}


def _badness(outcome: str) -> int:
    return ["passed", "skipped", "failed"].index(outcome.split(":")[0])


def test_what_passes_over_gloo_passes_over_mpi(tmp_path: Path) -> None:
    theirs, ours = outcomes("gloo", tmp_path), outcomes("paceline-mpi", tmp_path)
    assert set(ours) == set(theirs)
    passed = {name for name, outcome in theirs.items() if outcome == "passed"}
    assert len(passed) > 80, "with PyTorch 2.13 they are 101"
    assert {name: ours[name] for name in passed if ours[name] != "passed"} == {}
    failed = {name: outcome for name, outcome in ours.items() if outcome.startswith("failed")}
    assert {n: o for n, o in failed.items() if not theirs[n].startswith("failed")} == {}
    # PyTorch expects all_to_all on the CPU of MPI only.
    only_ours = {n for n, o in ours.items() if o == "passed"} - passed
    assert {n for n in only_ours if n.startswith("test_all_to_all")} == only_ours
    assert len(only_ours) == 12
    for found in (theirs, ours):
        whys = {o.removeprefix("skipped: ") for o in found.values() if o.startswith("skipped")}
        assert [w for w in whys if not any(re.match(reason, w) for reason in SKIPPED)] == []
