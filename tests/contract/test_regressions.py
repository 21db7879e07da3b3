"""Things that went wrong once."""

import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.conftest import identical, make_pairs, small_net
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import paceline
from paceline import Run
from paceline.errors import BadRequest, WorkerFailed
from paceline.registry import sources, transports
from paceline.strategies.base import Strategy
from paceline.transport.base import Transport
from paceline.transport.inproc import Hub, InprocTransport

RunInproc = Callable[..., Run]


def test_a_lossy_codec_does_not_hide_a_gradient(run_inproc: RunInproc) -> None:
    """A first element that rounds to -0 is not a parameter that nobody touched."""

    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.weight).sum(1)

    data = torch.tensor([[-1e-9, -1.0, -1.0, -1.0]] * 8), torch.zeros(8)
    options = {
        "model": One,
        "data": data,
        "loss": lambda out, y: out.mean(),
        "strategy": "allreduce",
        "workers": 2,
        "steps": 1,
    }
    assert float(run_inproc(**options, codec="fp16").weights["weight"][1]) > 0


class ShuffleBuffer(IterableDataset):
    """Draws its order from torch, Python and numpy while it goes."""

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        waiting = list(range(64))
        while waiting:
            pick = int(torch.randint(len(waiting), (1,)))
            pick = (pick + random.randrange(len(waiting)) + np.random.randint(len(waiting))) % len(
                waiting
            )
            number = waiting.pop(pick)
            yield torch.full((6,), float(number)), number % 3


class Notes(nn.Module):
    """Writes down what it sees, and draws random numbers in between, as dropout does."""

    seen: list[float] = []  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.drop = nn.Linear(6, 3), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen.extend(x[:, 0].tolist())
        return self.inner(self.drop(x))


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_random_streams_are_the_same_for_all_workers(run_inproc: RunInproc, workers: int) -> None:
    Notes.seen.clear()
    strategy = "serial" if workers == 1 else "allreduce"
    run_inproc(
        model=Notes,
        data=ShuffleBuffer(),
        strategy=strategy,
        workers=workers,
        batch_size=4,
        epochs=1,
        lr=1e-6,
    )
    assert sorted(Notes.seen) == [float(i) for i in range(64)]


def test_buffers_that_are_no_statistics_stay_bit_for_bit(run_inproc: RunInproc) -> None:
    table = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    table[:2] = torch.tensor([float("-inf"), float("inf")])

    class WithTable(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.norm = nn.Linear(6, 3), nn.BatchNorm1d(6)
            self.register_buffer("table", table.clone())

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(self.norm(x))

    run = run_inproc(model=WithTable, strategy="allreduce", workers=3, batch_size="5,0,3", epochs=2)
    assert torch.equal(run.weights["table"], table)
    assert torch.isfinite(run.weights["norm.running_mean"]).all()


def test_regression_with_ones_own_loss_has_no_accuracy(run_inproc: RunInproc) -> None:
    data = torch.randn(32, 4), torch.randn(32, 1)
    options = {"model": lambda: nn.Linear(4, 1), "data": (data, data), "steps": 3}
    run = run_inproc(**options, loss=nn.functional.mse_loss)
    assert run.test_accuracy is None
    assert run.metric is None
    assert run_inproc(**options).metric["name"] == "mse"


def test_per_position_targets(run_inproc: RunInproc) -> None:
    data = torch.randn(16, 2, 4, 4), torch.randint(0, 3, (16, 4, 4))
    run = run_inproc(
        model=lambda: nn.Conv2d(2, 3, 1),
        data=(data, data),
        loss="cross-entropy",
        metric="accuracy",
        steps=2,
    )
    assert 0 <= run.test_accuracy <= 1


def test_what_does_not_fit_is_refused_before_the_first_step(
    run_inproc: RunInproc, tmp_path: Path
) -> None:
    for options in ({"loss": "mse"}, {"metric": "auc"}):
        out = tmp_path / str(options)
        with pytest.raises(BadRequest, match=r"fit|needs"):
            run_inproc(**options, out=str(out), steps=50)
        assert Run.open(out).steps == 0
    with pytest.raises(BadRequest, match="empty test set"):
        run_inproc(data=(make_pairs(20), make_pairs(0)))


def test_extra_state_is_no_reason_to_lose_the_weights(run_inproc: RunInproc) -> None:
    class Extra(nn.Linear):
        def __init__(self) -> None:
            super().__init__(6, 3)

        def get_extra_state(self) -> dict:
            return {"version": 2}

        def set_extra_state(self, state: dict) -> None:
            assert state is not None

    assert set(run_inproc(model=Extra, steps=1).weights) == {"weight", "bias"}


class Augmented(Dataset):
    """Python's and numpy's random numbers in every sample."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return (
            torch.full((6,), i / 40 + random.random() + np.random.random(), dtype=torch.float32),
            i % 3,
        )


def test_resuming_restores_every_random_state(run_inproc: RunInproc, tmp_path: Path) -> None:
    options = {"data": Augmented(), "strategy": "allreduce", "workers": 2, "batch_size": 4}
    whole = run_inproc(**options, steps=9)
    out = str(tmp_path / "part")
    run_inproc(**options, steps=4, checkpoint_every=4, out=out)
    assert identical(run_inproc(**options, steps=9, resume=out, out=out).weights, whole.weights)


def test_resume_by_another_name_and_from_another_place(
    run_inproc: RunInproc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_inproc(out="a/run", steps=4, checkpoint_every=2)
    plain = {"model": small_net, "data": (make_pairs(60), make_pairs(20, seed=1))}
    assert paceline.train(**plain, resume=str(tmp_path / "a" / "run"), steps=6).steps == 6
    (tmp_path / "b").mkdir()
    monkeypatch.chdir(tmp_path / "b")
    assert paceline.train(**plain, resume="../a/run", steps=8).steps == 8
    assert list((tmp_path / "b").iterdir()) == []
    elsewhere = paceline.train(**plain, resume="../a/run", out="copy", steps=10)
    assert elsewhere.steps == 10
    assert elsewhere.samples == sum(min(8, 60 - 8 * (i % 8)) for i in range(10))


def test_a_resume_that_cannot_start_leaves_the_run_as_it_was(
    run_inproc: RunInproc, tmp_path: Path
) -> None:
    out = tmp_path / "good"
    run_inproc(out=str(out), steps=4, checkpoint_every=4)
    before = {f: (out / f).read_bytes() for f in ("run.json", "config.json")}
    wider = lambda: nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))  # noqa: E731
    for change, message in (
        ({"model": wider}, "another model"),
        ({"optimizer": "adam"}, "another optimizer"),
        ({"data": make_pairs(50)}, "another number of training samples"),
    ):
        with pytest.raises(BadRequest, match=message):
            run_inproc(**change, momentum=0.0, resume=str(out), out=str(out), steps=8)
    assert {f: (out / f).read_bytes() for f in before} == before


def test_options_given_on_resume_are_used(run_inproc: RunInproc, tmp_path: Path) -> None:
    results = []
    for decay in (0.0, 0.5):
        out = str(tmp_path / str(decay))
        run_inproc(out=out, steps=4, checkpoint_every=4)
        results.append(run_inproc(out=out, resume=out, steps=8, weight_decay=decay).weights)
    assert not identical(*results)


def test_going_back_undoes_later_checkpoints(run_inproc: RunInproc, tmp_path: Path) -> None:
    out = tmp_path / "back"
    run_inproc(out=str(out), steps=8, checkpoint_every=4)
    run_inproc(
        out=str(out), resume=str(out / "checkpoints" / "step-00000004"), steps=6, checkpoint_every=6
    )
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == [
        "step-00000004",
        "step-00000006",
    ]
    assert Run.open(out).steps == 6


@pytest.mark.parametrize("strategy", ["allreduce", "ps"])
def test_payload_covers_all_sessions(run_inproc: RunInproc, tmp_path: Path, strategy: str) -> None:
    """Of workers and of servers (truth.md F7). The steps after the checkpoint were undone."""
    options = {"strategy": strategy, "workers": 2}
    whole = run_inproc(**options, steps=10)
    out = str(tmp_path / "parts")
    run_inproc(**options, steps=7, checkpoint_every=5, out=out)
    parts = run_inproc(**options, steps=10, out=out, resume=out)
    for key in ("payload_sent_bytes", "payload_received_bytes", "messages_sent"):
        counts = [[w[key] for w in r.record["workers"]] for r in (whole, parts)]
        assert counts[0] == counts[1]


def test_runs_of_the_same_second_get_folders_of_their_own() -> None:
    runs = [
        paceline.train(
            data=make_pairs(20), model=small_net, steps=1, transport="inproc", progress=False
        )
        for _ in range(3)
    ]
    assert len({r.out for r in runs}) == 3


class Stream(IterableDataset):
    def __iter__(self):
        return iter((torch.full((6,), float(i)), i % 3) for i in range(24))


@pytest.mark.processes
def test_a_loader_with_processes_of_its_own(tmp_path: Path) -> None:
    loader = DataLoader(Stream(), batch_size=4, num_workers=1)
    run = paceline.train(
        data=loader,
        model=small_net,
        strategy="allreduce",
        workers=2,
        threads=1,
        loss="cross-entropy",
        out=str(tmp_path / "r"),
        lr=1e-4,
    )
    assert run.samples == 24


@pytest.mark.processes
def test_an_error_that_speaks_of_closing_is_not_a_lost_peer(tmp_path: Path) -> None:
    class Closed(nn.Linear):
        def __init__(self) -> None:
            super().__init__(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("the feature cache is closed")

    with pytest.raises(WorkerFailed, match="feature cache is closed"):
        paceline.train(data=make_pairs(20), model=Closed, threads=1, out=str(tmp_path / "r"))


def test_a_path_ends_where_an_option_begins() -> None:
    assert sources.resolve("imagefolder:a,b/c,size=32").options == {"path": "a,b/c", "size": 32}


def test_a_transport_needs_no_collectives_of_its_own(run_inproc: RunInproc) -> None:
    """Only the abstract methods: everything else has a default."""

    class Bare(InprocTransport):
        native = frozenset()
        all_reduce, broadcast = Transport.all_reduce, Transport.broadcast

    def body(transport: InprocTransport) -> list[float]:
        bare = Bare(transport._hub, transport.rank, transport._members)
        total, sent = torch.tensor([float(transport.rank)]), torch.tensor([float(transport.rank)])
        bare.all_reduce(total)
        bare.broadcast(sent, root=2)
        return [float(total), float(sent)]

    assert Hub(3).run(body) == [[3.0, 2.0]] * 3


@pytest.mark.processes
def test_interrupting_threads_ends_them() -> None:
    hub = Hub(2)

    def body(transport: InprocTransport) -> None:
        for step in range(10**6):
            if step == 50 and transport.rank == 0:
                os.kill(os.getpid(), signal.SIGINT)
            transport.barrier()

    with pytest.raises(KeyboardInterrupt):
        hub.run(body)
    assert hub.gone == {0, 1}, "both have ended"


def test_every_process_transport_says_whether_it_is_available() -> None:
    assert all(isinstance(e.make.available(), bool) for e in transports)


@pytest.mark.processes
def test_a_workers_traceback_reaches_a_python_caller(tmp_path: Path) -> None:
    class Buggy(nn.Linear):
        def __init__(self) -> None:
            super().__init__(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.missing_part(x)

    with pytest.raises(WorkerFailed) as caught:
        paceline.train(data=make_pairs(20), model=Buggy, threads=1, out=str(tmp_path / "r"))
    assert "return self.missing_part(x)" in "".join(caught.value.__notes__)


def test_what_is_evaluated_is_what_is_saved(run_inproc: RunInproc) -> None:
    """Replicas that differ are averaged for both, also when a strategy says nothing about it."""

    class Alone(Strategy):
        name = "alone"
        exchanges = "nothing"

        def step(self, replica, batch) -> None:
            replica.update()

    test = make_pairs(60, seed=1)
    run = run_inproc(data=(make_pairs(60), test), strategy=Alone(), workers=3, epochs=2, lr=0.05)
    right = (run.model(test[0]).argmax(1) == test[1]).float().mean()
    assert float(right) == pytest.approx(run.test_accuracy, abs=1e-6)


def test_a_new_end_replaces_the_old_one(run_inproc: RunInproc, tmp_path: Path) -> None:
    out = str(tmp_path / "r")
    run_inproc(out=out, steps=4, checkpoint_every=4)
    plain = {"model": small_net, "data": (make_pairs(60), make_pairs(20, seed=1)), "resume": out}
    assert paceline.train(**plain, epochs=2).steps == 16


def test_a_refused_request_does_not_burn_its_folder(run_inproc: RunInproc, tmp_path: Path) -> None:
    out = str(tmp_path / "r")
    with pytest.raises(BadRequest):
        run_inproc(out=out, metric="auc")
    assert run_inproc(out=out, steps=2).steps == 2
    with pytest.raises(BadRequest, match="holds a run already"):
        run_inproc(out=out)


def test_own_optimizers(run_inproc: RunInproc) -> None:
    run = run_inproc(optimizer=torch.optim.Adam, lr=0.05, steps=2)
    assert not identical(
        run.weights, run_inproc(optimizer=torch.optim.Adam, lr=0.001, steps=2).weights
    )
    for options, message in (
        ({"optimizer": torch.optim.Adam(small_net().parameters())}, "every worker makes"),
        (
            {"optimizer": lambda p: torch.optim.SGD(p, lr=0.1), "lr": 0.5},
            "your own optimizer function",
        ),
        ({"model": 5}, "model cannot be"),
        ({"model": nn.Linear}, "without arguments"),
        ({"metric": lambda: 1}, "metric cannot be"),
        (
            {"until_accuracy": 0.9, "data": ((torch.randn(9, 6), torch.randn(9, 3)),) * 2},
            "targets that are classes",
        ),
        ({"out": ""}, "not a path"),
        ({"data_dir": "nowhere"}, "not a folder"),
        ({"data": DataLoader(Stream(), batch_size=4), "batch_size": 5}, "batch_size=5 contradicts"),
        ({"data": Stream(), "shard": "static"}, "its own order"),
    ):
        with pytest.raises(BadRequest, match=message):
            run_inproc(**{"steps": 1, **options})


def test_ones_own_model_needs_no_count_of_classes(run_inproc: RunInproc) -> None:
    read: list[int] = []

    class Counting(Dataset):
        def __len__(self) -> int:
            return 40

        def __getitem__(self, i: int) -> tuple[Tensor, int]:
            read.append(i)
            return torch.zeros(6), i % 3

    run_inproc(data=Counting(), steps=1, batch_size=4)
    assert len(read) < 12


def test_a_metric_of_none_is_none(run_inproc: RunInproc) -> None:
    class Pair(nn.Linear):
        def __init__(self) -> None:
            super().__init__(6, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return super().forward(x), x

    run = run_inproc(
        model=Pair,
        loss=lambda out, y: nn.functional.cross_entropy(out[0], y),
        metric="none",
        steps=2,
    )
    assert run.test_accuracy is None
    assert run.test_loss > 0


def test_numpy_numbers_become_torchs_default(run_inproc: RunInproc) -> None:
    inputs, targets = make_pairs(30)
    assert run_inproc(data=(inputs.double().numpy(), targets.numpy()), steps=2).steps == 2
