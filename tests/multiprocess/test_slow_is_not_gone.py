"""A worker that is slow is waited for, and one notice says who waits for whom. Number 12 of issue
15.
"""

import time
from pathlib import Path
from typing import Any

import pytest
from tests.commands import PACELINE, run
from tests.conftest import make_pairs
from torch import Tensor, nn
from torch.utils.data import Dataset

from paceline.api import make_job, start

SLOW_S, DEADLINE_S = 1.0, 0.4


MORE = [
    ("allreduce", "shm"),
    ("stepwise", "gloo"),
    ("ps", "gloo"),
    ("local-sgd:every=2", "shm"),
    ("gossip", "shm"),
    ("gossip", "gloo"),
]


def once(where: Path) -> bool:
    """Whether this is the first time, over all processes that have forked from this one."""
    try:
        where.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


class Slow(nn.Module):
    """One worker takes long, once, at a place: workers are told apart by their batch sizes."""

    def __init__(self, where: str, mark: Path, size: int) -> None:
        super().__init__()
        self.inner, self.where, self.mark, self.size, self.calls = (
            nn.Linear(6, 3),
            where,
            mark,
            size,
            0,
        )

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        # of 19 test samples, worker 2 has 7, the others 6
        slow = len(x) == self.size if self.training else self.calls and len(x) == 7
        if (
            slow
            and self.where == ("train" if self.training else "evaluation")
            and self.calls > 2
            and once(self.mark)
        ):
            time.sleep(SLOW_S)
        return self.inner(x)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        if self.where == "checkpoint" and self.calls > 3 and once(self.mark):
            time.sleep(SLOW_S)
        return super().state_dict(*args, **kwargs)


def notices_of(
    tmp_path: Path, where: str = "train", **options: Any
) -> tuple[dict[str, Any], list[str]]:
    said: list[str] = []
    mark = tmp_path / "slow-once"
    defaults: dict[str, Any] = {
        "model": lambda: Slow(where, mark, 5),
        "data": (make_pairs(78), make_pairs(19, seed=1)),
        "workers": 3,
        "batch_size": "4,5,4",
        "threads": 1,
        "epochs": 2,
        "deadline_s": DEADLINE_S,
        "out": str(tmp_path / "run"),
        "memory_format": "contiguous",
        "checkpoint_every": "epoch",
    }
    job = make_job({**defaults, **options})
    run = start(
        job, lambda kind, content: said.append(content["text"]) if kind == "notice" else None
    )
    assert mark.exists(), "somebody was slow"
    return run.record, [text for text in said if "waited" in text]


def naming(slow: str, waits: list[str]) -> list[str]:
    """The notices that name this one alone. On a busy machine others may be slow, too, at other
    moments.
    """
    found = [text for text in waits if f" for {slow} (" in text]
    assert found, waits
    return found


@pytest.mark.parametrize(
    ("strategy", "transport"),
    [
        ("allreduce", "gloo"),
        ("allreduce:collective=ring", "shm"),
        ("ps", "shm"),
        ("ddp", "gloo"),
        *(pytest.param(*more, marks=pytest.mark.slow) for more in MORE),
    ],
)
def test_12_a_slow_worker_is_waited_for_and_told_by_name(
    tmp_path: Path, strategy: str, transport: str
) -> None:
    record, waits = notices_of(tmp_path, strategy=strategy, transport=transport)
    assert record["status"] == "completed"
    assert "lost" not in record
    assert record["result"]["steps"] == 12
    told = naming("worker 1", waits)
    assert told, "the slow one is named, in a ring, behind a server and inside DDP's backward pass"
    # On a busy machine the slow worker's stack may be too late for one of the notices.
    assert any("computing step" in text and "test_slow_is_not_gone.py:" in text for text in told), (
        f"what it does, and where, in the user's own code: {told}"
    )
    assert all("the run waits on" in text for text in told)


APART = [
    "psgd",
    *(
        pytest.param(s, marks=pytest.mark.slow)
        for s in ("hogwild", "ps:consistency=async", "gossip:mode=async")
    ),
]


@pytest.mark.parametrize("strategy", APART)
def test_12_workers_that_run_apart_are_told_of_at_the_end(tmp_path: Path, strategy: str) -> None:
    """They used to wait without a word. The slow one is slow in its last epoch; the others have
    come to the end.
    """
    record, waits = notices_of(
        tmp_path, strategy=strategy, transport="shm", epochs=1, evaluate_every="1000"
    )
    assert record["status"] == "completed"
    assert any("(all to come together)" in text for text in naming("worker 1", waits)), waits


@pytest.mark.parametrize("where", ["evaluation", "checkpoint"])
def test_12_a_slow_evaluation_or_disk_ends_no_run(tmp_path: Path, where: str) -> None:
    record, waits = notices_of(tmp_path, where, strategy="allreduce", transport="shm")
    assert record["status"] == "completed"
    assert naming({"evaluation": "worker 2", "checkpoint": "worker 0"}[where], waits)


def test_12_a_slow_constructor_and_loader_end_no_run(tmp_path: Path) -> None:
    mark = tmp_path / "slow-once"

    class Loading(Dataset):
        def __len__(self) -> int:
            return 60

        def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
            if i == 37 and once(tmp_path / "slow-loader"):
                time.sleep(SLOW_S)
            inputs, targets = make_pairs(60)
            return inputs[i], targets[i]

    def make() -> nn.Module:
        # in a worker, not when the request is looked at
        if (tmp_path / "run" / "events").exists() and once(mark):
            time.sleep(SLOW_S)
        return nn.Linear(6, 3)

    record, waits = notices_of(
        tmp_path,
        model=make,
        data=(Loading(), None),
        batch_size=4,
        strategy="allreduce",
        transport="gloo",
    )
    assert record["status"] == "completed"
    assert waits


def test_12_gossip_meets_a_slow_partner_again(tmp_path: Path) -> None:
    record, _ = notices_of(
        tmp_path,
        strategy="gossip:topology=ring",
        transport="shm",
        workers=2,
        batch_size="4,5",
        epochs=3,
    )
    sent = {worker["messages_sent"] for worker in record["workers"]}
    assert sent == {record["result"]["steps"]}, "one meeting a step, also after the slow one"
    waited = [worker["sync_s"] + worker["idle_s"] for worker in record["workers"]]
    assert max(waited) > DEADLINE_S, "waiting is booked as waiting"


OWN = """
import sys, time, torch, paceline
from torch import nn
pace = paceline.join("allreduce", deadline_s=0.4)
model = nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = (torch.randn(32, 6), torch.arange(32) % 3)
model, optimizer, batches = pace.prepare(model, optimizer, data, batch_size=4)
for number, (x, y) in enumerate(batches):
    if pace.leads and number == 2:
        time.sleep(1.6)                  # worker 0 evaluates alone
    pace.step(nn.functional.cross_entropy(model(x), y))
pace.finish()
"""


@pytest.mark.slow
def test_12_worker_0_may_evaluate_alone_in_a_loop_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    done = run(
        [PACELINE, "launch", "-n", "2", "own.py"],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert "worker 1 has waited" in done.stderr
    assert "for worker 0 (" in done.stderr
