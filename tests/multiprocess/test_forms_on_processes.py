"""Split models on real processes: the same weights, a worker that dies, PyTorch's own pipelines."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.commands import PACELINE, Popen, run
from torch import Tensor, nn

import paceline
from paceline.errors import WorkerFailed

pytestmark = pytest.mark.processes


def net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 6, 3),
        nn.Dropout(0.2),
        nn.Flatten(),
        nn.Linear(6 * 4 * 4, 8),
        nn.Tanh(),
        nn.Linear(8, 3),
    ).double()


def samples() -> Any:
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(48, 1, 12, 12, generator=generator, dtype=torch.float64)
    return (inputs, torch.randint(0, 3, (48,), generator=generator))


def train(out: Path, **options: Any) -> paceline.Run:
    given = {
        "model": net, "data": (samples(), samples()), "steps": 10, "batch_size": 12, "lr": 0.05,
        "threads": 1, "deadline_s": 20, "out": str(out), "progress": False,
    }  # fmt: skip
    return paceline.train(**{**given, **options})


def until(holds: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


def apart(one: paceline.Run, other: paceline.Run) -> float:
    first, second = one.model.state_dict(), other.model.state_dict()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


@pytest.mark.parametrize(
    ("form", "transport"),
    [
        ("pipeline:micro=3,schedule=zero-bubble", "shm"),
        ("pipeline:micro=4", "gloo"),
        pytest.param("pipeline:micro=4,engine=torch", "gloo", marks=pytest.mark.slow),
        pytest.param("pipeline:micro=4,engine=torch,schedule=gpipe", "shm", marks=pytest.mark.slow),
        pytest.param(
            "pipeline:micro=4,engine=torch,schedule=interleaved", "gloo", marks=pytest.mark.slow
        ),
        ("tensor", "shm"),
        pytest.param("tensor", "gloo", marks=pytest.mark.slow),
        ("domain", "gloo"),
        pytest.param("domain", "shm", marks=pytest.mark.slow),
        pytest.param("layers", "mpi", marks=pytest.mark.slow),
        pytest.param("domain", "mpi", marks=pytest.mark.slow),
        pytest.param("tensor", "mpi", marks=pytest.mark.slow),
        pytest.param("pipeline:micro=4,schedule=interleaved", "mpi", marks=pytest.mark.slow),
    ],
)
def test_processes_train_like_one_piece(tmp_path: Path, form: str, transport: str) -> None:
    whole = train(tmp_path / "whole", parallel="layers:stages=1")
    split = train(tmp_path / "split", parallel=form, workers=2, transport=transport)
    assert apart(whole, split) < 1e-12
    assert all(w["activation_sent_bytes"] > 0 for w in split.record["workers"])
    if "engine=torch" in form:
        cut = ";".join(split.record["workers"][0]["split"]["cut"])
        same = form.replace("engine=torch", f"cut={cut}")
        ours = train(tmp_path / "ours", parallel=same, workers=2)
        for name in ("activation_sent_bytes", "messages_sent"):
            assert [w[name] for w in split.record["workers"]] == [
                w[name] for w in ours.record["workers"]
            ]


@pytest.mark.parametrize(
    "form", ["pipeline:micro=3", "tensor", pytest.param("domain", marks=pytest.mark.slow)]
)
def test_a_killed_worker_is_named_and_the_run_goes_on_from_its_checkpoint(
    tmp_path: Path, form: str
) -> None:
    options = {"parallel": form, "workers": 2, "checkpoint_every": 4}
    whole = train(tmp_path / "whole", **options)
    with pytest.raises(WorkerFailed, match="worker 1 failed: its process was killed by SIGKILL"):
        train(tmp_path / "killed", faults=("die:rank=1,step=7",), **options)
    record = paceline.load(tmp_path / "killed").record
    assert record["status"] == "failed"
    again = train(tmp_path / "again", resume=str(tmp_path / "killed"), faults=(), **options)
    assert again.record["result"]["steps"] == 10
    assert apart(whole, again) < 1e-12


@pytest.mark.slow
def test_a_grid_on_processes(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", parallel="layers:stages=1")
    for form in ("pipeline", "tensor", "domain"):
        split = train(tmp_path / form, grid=f"data=2,{form}=2", batch_size=6)
        assert apart(whole, split) < 1e-12


@pytest.mark.slow
def test_a_run_that_leaves_is_gone_on_with(tmp_path: Path) -> None:
    """SIGTERM after some steps: a checkpoint, exit code 143; the same command goes on."""
    words = [
        PACELINE, "train", "--model", "cnn", "--data", "synthetic:shape=1x20x20,samples=400",
        "--parallel", "pipeline:stages=2,micro=4", "--cut", "4", "--steps", "60", "--threads", "1",
        "--checkpoint-every", "1000", "--evaluate-every", "1000", "--resume", "auto",
    ]  # fmt: skip
    options: dict[str, Any] = {"cwd": tmp_path, "capture_output": True, "text": True}
    slowly = [*words, "--faults", "slow:rank=1,factor=20", "--out", "left"]
    with Popen(slowly, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as left:
        events = tmp_path / "left" / "events" / "worker-0.jsonl"
        until(lambda: events.exists() and '"step"' in events.read_text(), 60)
        left.terminate()
        _, said = left.communicate(timeout=60)
    assert left.returncode == 143, said
    again = run([*words, "--out", "left"], timeout=120, **options)
    assert again.returncode == 0, again.stderr
    assert "going on from step" in again.stderr
    unbroken = run([*words, "--out", "whole"], timeout=120, **options)
    assert unbroken.returncode == 0, unbroken.stderr
    one, other = (paceline.load(tmp_path / name) for name in ("left", "whole"))
    assert one.record["result"]["steps"] == 60
    assert apart(one, other) == 0.0


LOOP = """
    import torch, paceline
    from torch import nn
    torch.manual_seed(4)
    first = (nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 12))
    model = nn.Sequential(*first, nn.Tanh(), nn.Linear(12, 3))
    x, y = torch.randn(32, 6), torch.randint(0, 3, (32,))
    part = paceline.split(model, FORM, example=x)
    optimizer = torch.optim.SGD(part.parameters(), lr=0.2, momentum=0.9)
    for _ in range(5):
        optimizer.zero_grad()
        loss = part.backward(nn.functional.cross_entropy, x, y)
        part.clip_grad_norm(0.5)
        optimizer.step()
    out = part(x)
    state = part.state_dict()
    assert (state is None) == (part.rank > 0)
    if state is not None:
        torch.save((loss, out, state), "split.pt")
        print("held", sum(p.numel() for p in part.parameters()))
"""


def plain() -> tuple[float, Tensor, dict[str, Tensor]]:
    torch.manual_seed(4)
    model = nn.Sequential(
        nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 3)
    )
    x, y = torch.randn(32, 6), torch.randint(0, 3, (32,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    for _ in range(5):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return float(loss.detach()), model(x).detach(), model.state_dict()


@pytest.mark.parametrize(
    "form", ["pipeline:micro=4", pytest.param("tensor", marks=pytest.mark.slow)]
)
def test_a_loop_of_ones_own(tmp_path: Path, form: str) -> None:
    script = textwrap.dedent(LOOP).replace("FORM", repr(form))
    (tmp_path / "loop.py").write_text(script)
    done = run(
        [PACELINE, "launch", "-n", "2", "loop.py"],
        cwd=tmp_path, timeout=120, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "held" in done.stdout
    loss, outputs, state = torch.load(tmp_path / "split.pt", weights_only=False)
    expected = plain()
    assert loss == pytest.approx(expected[0], abs=1e-5)
    assert torch.allclose(outputs, expected[1], atol=1e-5)
    for name, tensor in expected[2].items():
        assert torch.allclose(state[name], tensor, atol=1e-5)


THEIRS = """
    import os, sys, torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
    rank = int(sys.argv[1])
    meet = f"file://{os.getcwd()}/meet"
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=2)
    torch.manual_seed(4)
    first = (nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 12))
    model = nn.Sequential(*first, nn.Tanh(), nn.Linear(12, 3))
    x, y = torch.randn(32, 6), torch.randint(0, 3, (32,))
    own = model[:2] if rank == 0 else model[2:]
    stage = PipelineStage(own, rank, 2, torch.device("cpu"))
    schedule = KIND(stage, 8, loss_fn=nn.functional.cross_entropy)
    schedule.step(x) if rank == 0 else schedule.step(target=y)
    torch.save([p.grad for p in own.parameters()], f"theirs-{rank}.pt")
    dist.destroy_process_group()
"""
OURS = """
    import torch, paceline
    from torch import nn
    torch.manual_seed(4)
    first = (nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 12))
    model = nn.Sequential(*first, nn.Tanh(), nn.Linear(12, 3))
    x, y = torch.randn(32, 6), torch.randint(0, 3, (32,))
    part = paceline.split(model, FORM, example=x, cut="2")
    part.backward(nn.functional.cross_entropy, x, y)
    torch.save([p.grad for p in part.parameters()], f"ours-{part.rank}.pt")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), [("ScheduleGPipe", "gpipe"), ("Schedule1F1B", "1f1b")])
def test_gradients_are_those_of_pytorchs_pipelines(tmp_path: Path, kind: str, name: str) -> None:
    (tmp_path / "theirs.py").write_text(textwrap.dedent(THEIRS).replace("KIND", kind))
    form = repr(f"pipeline:micro=8,schedule={name}")
    (tmp_path / "ours.py").write_text(textwrap.dedent(OURS).replace("FORM", form))
    ranks = [
        subprocess.Popen([sys.executable, "theirs.py", str(rank)], cwd=tmp_path)
        for rank in range(2)
    ]
    assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
    done = run(
        [PACELINE, "launch", "-n", "2", "ours.py"],
        cwd=tmp_path, timeout=120, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        ours, theirs = (torch.load(tmp_path / f"{who}-{rank}.pt") for who in ("ours", "theirs"))
        for mine, other in zip(ours, theirs, strict=True):
            assert torch.allclose(mine, other, atol=1e-7)
