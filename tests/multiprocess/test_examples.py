"""Every example runs, as its first lines say; and a person's own loop keeps its promises."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from tests.commands import PACELINE, run

from paceline.launch.messages import Hear
from paceline.launch.mpi import on_mpi_ranks
from paceline.transport.base import Rendezvous
from paceline.transport.mpi.transport import MpiTransport, mpirun

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


def output(*command: str | Path, code: int = 0) -> str:
    start = run if command[0] in (PACELINE, sys.executable) else subprocess.run
    done = start(
        [str(c) for c in command],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


def accuracy(text: str) -> float:
    found = re.search(r"accuracy ([\d.]+)%", text)
    assert found is not None, text
    return float(found[1])


@pytest.mark.parametrize(
    ("ranks", "strategy"),
    [
        pytest.param(2, "allreduce", marks=pytest.mark.slow),
        pytest.param(3, "ps:consistency=ssp", marks=pytest.mark.slow),
        *(
            pytest.param(2, s, marks=pytest.mark.slow)
            for s in ("ddp", "local-sgd", "gossip", "stepwise", "hogwild", "diloco")
        ),
        pytest.param(1, "allreduce", marks=pytest.mark.slow),
    ],
)
def test_own_loop(ranks: int, strategy: str) -> None:
    said = output(PACELINE, "launch", "-n", str(ranks), EXAMPLES / "own_loop.py", strategy)
    assert accuracy(said) > 70
    assert "Warning" not in said


@pytest.mark.slow
@pytest.mark.skipif(not MpiTransport.available(), reason="no MPI here")
def test_psgd_under_mpirun() -> None:
    """One rank prints, also the sentence about MNIST where MNIST is not on this machine."""
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    said = output(
        str(mpirun()), *root, "--oversubscribe", "-n", "3", sys.executable, EXAMPLES / "psgd.py",
        "--epochs", "3", "--steps", "32",
    )  # fmt: skip
    assert "P = 3" in said
    assert "96 steps per rank" in said
    assert said.count("MNIST is not here") <= 1
    assert accuracy(said) > 40


def psgd() -> ModuleType:
    spec = importlib.util.spec_from_file_location("psgd_example", EXAMPLES / "psgd.py")
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_network_of_the_psgd_example_is_the_built_in_cnn() -> None:
    import torch

    from paceline.registry import models

    written, built_in = psgd().Net(), models.build("cnn", input_shape=(1, 28, 28), classes=10)
    written.load_state_dict(
        dict(zip(written.state_dict(), built_in.state_dict().values(), strict=True))
    )
    x = torch.randn(3, 1, 28, 28)
    torch.testing.assert_close(written.eval()(x), built_in.eval()(x))
    written.train(), built_in.train()
    outputs = []
    for model in (written, built_in):
        torch.manual_seed(5)  # the same dropout
        outputs.append(model(x))
    torch.testing.assert_close(*outputs)


@pytest.mark.slow
@pytest.mark.skipif(not MpiTransport.available(), reason="no MPI here")
def test_the_psgd_example_averages_by_shares() -> None:
    results, failures = on_mpi_ranks(averaged, 3)
    assert failures == {}
    assert results == {rank: pytest.approx(1 * 0.5 + 2 * 0.25 + 3 * 0.25) for rank in range(3)}


def averaged(rendezvous: Rendezvous, say: Hear) -> float:
    """Rank r has weights r + 1; ranks 0, 1 and 2 have a half and two quarters of the samples."""
    import torch
    from mpi4py import MPI

    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, rendezvous.rank + 1.0)
    psgd().average(model, MPI.COMM_WORLD, (0.5, 0.25, 0.25)[rendezvous.rank])
    return float(model.weight)


@pytest.mark.slow
def test_hogwild() -> None:
    said = output(sys.executable, EXAMPLES / "hogwild.py")
    assert accuracy(said) > 70
    assert said.count("of its own overlapped") == 4


@pytest.mark.slow
@pytest.mark.slow
def test_language_model() -> None:
    said = output(PACELINE, "launch", "-n", "2", EXAMPLES / "language_model.py")
    last = re.findall(r"([\d.]+) nats per letter", said)[-1]
    assert float(last) < 1.0


@pytest.mark.slow
def test_custom_strategy() -> None:
    """It touches no file of src, and its options and records are there."""
    plugin = ["--plugin", str(EXAMPLES / "custom_strategy.py")]
    assert "growth=1.5" in output(PACELINE, "list", "strategies", *plugin)
    said = output(
        PACELINE, "train", *plugin, "--strategy", "patient:growth=2", "--workers", "2",
        "--data", "fashion-mini", "--model", "mlp:hidden=32", "--epochs", "2",
        "--quiet", "--json", "--out", "run",
    )  # fmt: skip
    assert float(re.search(r'"test_accuracy": ([\d.]+)', said)[1]) > 0.7


LOOP = """
import sys, torch, paceline
from torch import nn
torch.manual_seed(0)
inputs = torch.randn(48, 6, generator=torch.Generator().manual_seed(1))
targets = torch.arange(48) % 3
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
names = [n for n, _ in model.named_parameters()]
groups = [{"params": model[0].parameters(), "lr": 0.2}, {"params": model[2].parameters()}]
optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
how = sys.argv[1]
with paceline.join(sys.argv[2], check_every=3) as pace:
    data, size = (inputs, targets), int(sys.argv[3])
    model, optimizer, batches = pace.prepare(model, optimizer, data, batch_size=size)
    assert [n for n, _ in model.named_parameters()] == names
    for epoch in range(2):
        for number, (x, y) in enumerate(batches):
            loss = nn.functional.cross_entropy(model(x), y)
            if how == "whole":
                pace.step(loss, clip_norm=0.5)
            else:
                pace.backward(loss / 2)
                if number % 2:
                    pace.step(clip_norm=0.5)
            model.eval(); model(inputs[:2]); model.train()
        scheduler.step()
        if pace.any(epoch == 1 and pace.leads):
            break
state = pace.state_dict()
if pace.leads:
    torch.save(state, sys.argv[4])
"""


@pytest.mark.slow
def test_accumulation_clipping_schedulers_groups(tmp_path: Path) -> None:
    """Two workers; two workers that accumulate; a server: all the same as one worker with the whole
    batch.
    """
    import torch

    script = tmp_path / "loop.py"
    script.write_text(LOOP)
    runs = {
        "one": (1, "whole", "serial", 16),
        "two": (2, "whole", "allreduce", 8),
        "accumulated": (2, "parts", "allreduce", 4),
        "server": (3, "whole", "ps", 8),
    }
    weights = {}
    for name, (ranks, how, strategy, size) in runs.items():
        file = tmp_path / f"{name}.pt"
        output(PACELINE, "launch", "-n", str(ranks), script, how, strategy, str(size), file)
        weights[name] = torch.load(file, weights_only=True)
    for name in runs:
        for key, value in weights["one"].items():
            torch.testing.assert_close(weights[name][key], value, rtol=1e-4, atol=1e-5)


def test_a_loop_that_fails_is_named(tmp_path: Path) -> None:
    script = tmp_path / "bad.py"
    script.write_text(
        "import os, sys\nif os.environ['RANK'] == '1': sys.exit(3)\nimport time; time.sleep(60)\n"
    )
    assert "rank 1 of" in output(PACELINE, "launch", "-n", "2", script, code=1)
    assert "is not a file" in output(PACELINE, "launch", "-n", "2", tmp_path / "nosuch.py", code=2)
