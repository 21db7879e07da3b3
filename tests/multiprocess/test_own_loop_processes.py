"""A loop of the user's own on real processes: ddp, servers, GradScaler, a rank that ends early."""

import sys
from pathlib import Path

import pytest
from tests.commands import PACELINE, run

pytestmark = pytest.mark.processes

HEAD = """
import sys, torch, paceline
from torch import nn
torch.manual_seed(3)
x = torch.randn(40, 6, dtype=torch.float64)
y = torch.randint(0, 3, (40,))
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
pace = paceline.join(sys.argv[1], transport=(sys.argv + ["auto"])[2])
"""
LOOP = """
model, optimizer, batches = pace.prepare(model, optimizer, (x, y), batch_size=12 // pace.workers)
for epoch in range(2):
    for inputs, targets in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
loss = pace.mean(nn.functional.cross_entropy(model(x), y).item())
pace.finish()
pace.print(f"loss {loss:.12f}")
"""
UNEQUAL = """
model, optimizer, _ = pace.prepare(model, optimizer)
for _ in range(3 + pace.rank):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
pace.finish()
"""


ONE_SAVES = """
model, optimizer, _ = pace.prepare(model, optimizer)
for _ in range(3):
    pace.step(nn.functional.cross_entropy(model(x), y))
    if pace.leads:
        pace.save("out")
pace.finish()
"""


def output(path: Path, script: str, *command: str, code: int = 0) -> str:
    path = path / "script.py"
    path.write_text(HEAD + script)
    done = run(
        [str(c) if c != "SCRIPT" else str(path) for c in command],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ("ranks", "strategy"),
    [
        pytest.param("2", "ddp", marks=pytest.mark.slow),
        pytest.param("2", "allreduce", marks=pytest.mark.slow),
        pytest.param("3", "ps", marks=pytest.mark.slow),
    ],
)
def test_an_unchanged_loop_is_that_of_one_process(
    ranks: str, strategy: str, tmp_path: Path
) -> None:
    """40 rows in steps of 12: the last step's shares are uneven, where DDP weighs all equally."""
    several = output(tmp_path, LOOP, PACELINE, "launch", "-n", ranks, "SCRIPT", strategy)
    alone = output(tmp_path, LOOP, sys.executable, "SCRIPT", "serial")
    expected = float(alone.split("loss")[1])
    assert float(several.split("loss")[1]) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("transport", ["shm", pytest.param("gloo", marks=pytest.mark.slow)])
def test_a_rank_that_finishes_while_another_steps_does_not_hang(
    transport: str, tmp_path: Path
) -> None:
    launch = (PACELINE, "launch", "-n", "2", "SCRIPT", "allreduce", transport)
    said = output(tmp_path, UNEQUAL, *launch, code=1)
    assert "worker 0 has finished after 3, and worker 1 waits in step 4" in said


@pytest.mark.slow
def test_a_checkpoint_that_one_worker_saves_alone_does_not_hang(tmp_path: Path) -> None:
    launch = (PACELINE, "launch", "-n", "2", "SCRIPT", "allreduce")
    said = output(tmp_path, ONE_SAVES, *launch, code=1)
    assert "worker 0 called pace.save after step 1, and worker 1 did not" in said
