"""A DataLoader's processes read the samples: with its settings, once each, and end with their
rank.
"""

import gc
import json
import multiprocessing
import os
import signal
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from tests import commands
from tests.small import make_pairs, small_net, trained_from
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler, get_worker_info

import paceline
from paceline.data.adopt import adopt
from paceline.data.batches import ShardBatches
from paceline.data.order import LoaderOrder
from paceline.data.shards import GlobalShards, StaticShards
from paceline.errors import WorkerFailed

CPU = torch.device("cpu")
cross_entropy = nn.functional.cross_entropy


class Traced(Dataset):
    """Writes a line for each sample that is read: by which process, with which seed."""

    def __init__(self, rows: int, trace: Path | None = None) -> None:
        self.inputs, self.labels, self.trace = *make_pairs(rows), trace

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        info = get_worker_info()
        if self.trace is not None and info is not None:
            with self.trace.open("a") as file:
                file.write(f"{os.getpid()} {info.seed} {i}\n")
        return self.inputs[i] + 0.1 * torch.randn(6), self.labels[i]


def lines(trace: Path) -> list[tuple[int, int, int]]:
    return [tuple(map(int, line.split())) for line in trace.read_text().splitlines()]


def name_of(worker: int) -> None:
    """A `worker_init_fn`."""
    torch.manual_seed(worker + int(os.environ.get("TEST_SEED", "1")))


@pytest.mark.parametrize(
    "settings",
    [{"num_workers": 2}, {"num_workers": 1, "persistent_workers": True, "worker_init_fn": name_of}],
)
def test_one_worker_has_the_numbers_of_the_plain_loop(settings: dict[str, Any]) -> None:
    """Augmentation in the loader's processes included, with a `break` in the second epoch."""

    def weights(paced: bool) -> list[Tensor]:
        torch.manual_seed(4)
        loader = DataLoader(Traced(20), batch_size=8, shuffle=True, **settings)
        pace = paceline.join("serial") if paced else None
        found = trained_from(loader, small_net(), pace)
        loader._iterator = None  # ends persistent processes
        return found

    for a, b in zip(weights(True), weights(False), strict=True):
        assert torch.equal(a, b)
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("shard", [None, "static"])
def test_train_reads_through_the_loaders_processes(tmp_path: Path, shard: str | None) -> None:
    """Bug 3 of the first user's review. No two processes draw the same random numbers."""
    trace = tmp_path / "trace"
    loader = DataLoader(
        Traced(24, trace),
        batch_size=3,
        shuffle=True,
        num_workers=2,
        prefetch_factor=3,
        collate_fn=lambda samples: tuple(map(torch.stack, zip(*samples, strict=True))),
    )
    run = paceline.train(
        data=(loader, None),
        model=small_net,
        strategy="allreduce",
        workers=2,
        threads=1,
        epochs=2,
        shard=shard,
        out=str(tmp_path / "run"),
        progress=False,
    )
    assert (run.steps, run.samples) == (8, 48)
    found = lines(trace)
    assert sorted(i for _, _, i in found) == sorted([*range(24)] * 2)
    processes = {(pid, seed) for pid, seed, _ in found}
    assert len(processes) == len({seed for _, seed in processes}) == 8  # ranks x epochs x processes


def test_a_test_loaders_processes_read_the_test_set(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    test = DataLoader(Traced(30, trace), batch_size=8, num_workers=1)
    paceline.train(
        data=(make_pairs(16), test),
        model=small_net,
        strategy="allreduce",
        workers=2,
        threads=1,
        epochs=1,
        out=str(tmp_path / "run"),
        progress=False,
    )
    assert sorted(i for _, _, i in lines(trace)) == list(range(30))


@pytest.mark.slow
def test_the_benchmark_runs(tmp_path: Path) -> None:
    script = Path(__file__).parent.parent.parent / "benchmarks" / "loader.py"
    small = ["--rounds", "1", "--samples", "8", "--epochs", "1", "--batch-size", "4"]
    said = commands.run(
        [sys.executable, str(script), *small, "--delay-ms", "0", "--json"],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
        cwd=tmp_path,
    )
    assert set(json.loads(said.stdout)["against_stock"]) == {"join", "train"}


def test_a_sampler_with_processes_in_ones_own_loop(tmp_path: Path) -> None:
    """Two ranks under `paceline launch`, a sampler and processes: what the plain script sees."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import torch, paceline
            from torch.utils.data import DataLoader, WeightedRandomSampler
            from tests.multiprocess.test_loader_processes import Traced
            pace = paceline.join("allreduce")
            saw = open(f"saw-{pace.rank}", "w")
            torch.manual_seed(6 + pace.rank)
            model = torch.nn.Linear(6, 3)
            torch.manual_seed(6 + pace.rank)
            data = Traced(30)
            loader = DataLoader(data, 4, sampler=WeightedRandomSampler([1.0] * 30, 24),
                                num_workers=1, collate_fn=lambda samples: [
                                    torch.stack([x for x, _ in samples]),
                                    torch.stack([y for _, y in samples])])
            loader.dataset.labels = torch.arange(30)
            opt = torch.optim.SGD(model.parameters(), 0.1)
            model, opt, batches = pace.prepare(model, opt, loader)
            for epoch in range(2):
                for step, (x, y) in enumerate(batches):
                    pace.step(model(x).mean())
                    print(epoch, step, *y.tolist(), file=saw)
            pace.finish()
            saw.close()
            """
        )
    )
    ranks = started("script.py", 2, tmp_path)
    assert [rank.wait(100) for rank in ranks] == [0, 0]
    seen: dict[tuple[int, int], list[int]] = {}
    for file in tmp_path.glob("saw-*"):
        for line in file.read_text().splitlines():
            epoch, step, *labels = map(int, line.split())
            seen.setdefault((epoch, step), []).extend(labels)
    torch.manual_seed(6)
    plain = DataLoader(range(30), 8, sampler=WeightedRandomSampler([1.0] * 30, 24))  # type: ignore[arg-type]
    expected = {
        (epoch, step): sorted(batch.tolist())
        for epoch in range(2)
        for step, batch in enumerate(plain)
    }
    assert {at: sorted(labels) for at, labels in seen.items()} == expected


def started(script: str, size: int, folder: Path) -> list[commands.Popen]:
    """The ranks of a script, as a launcher starts them."""
    place = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
    place["MASTER_PORT"] = str(commands.free_port())
    return [
        commands.Popen(
            [sys.executable, script],
            cwd=folder,
            env={**os.environ, **(place | {"RANK": str(rank)} if size > 1 else {})},
        )
        for rank in range(size)
    ]


@pytest.mark.parametrize("persistent", [False, True])
def test_the_place_in_the_data_is_what_was_used_and_not_what_was_read(persistent: bool) -> None:
    data = Traced(40)
    loader = DataLoader(
        data, batch_size=3, shuffle=True, num_workers=2, persistent_workers=persistent
    )
    samples: Any = adopt(loader).train
    makes: list[Callable[[], Any]] = [
        lambda: GlobalShards(40, (3, 2), 5),
        lambda: StaticShards(40, (3, 2), 5),
        lambda: LoaderOrder(loader, 2, seed=5),
    ]
    for make in makes:
        known = ShardBatches(samples, make(), 1, CPU, stand_in=True)  # read in this process
        expected = [b for b, _ in zip(known, range(14), strict=False)]
        ahead = ShardBatches(samples, make(), 1, CPU, stand_in=True, seed=1)
        found, saved = [], {}
        for batch in ahead:
            found.append(batch)
            if len(found) == 4:
                saved = ahead.state()
            if len(found) == 14:
                break
        assert [b.targets.tolist() for b in found] == [b.targets.tolist() for b in expected]
        assert [b.weight for b in found] == [b.weight for b in expected]
        assert [b.ends_epoch for b in found] == [b.ends_epoch for b in expected]
        again = ShardBatches(samples, make(), 1, CPU, stand_in=True, seed=1)
        again.restore(saved)
        rest = iter(again)
        assert next(rest).targets.tolist() == expected[4].targets.tolist()
        again.give_back()
        assert [next(rest).targets.tolist() for _ in range(6)] == [
            b.targets.tolist() for b in expected[4:10]
        ]
        del rest, ahead, again
    gc.collect()
    assert multiprocessing.active_children() == []


def test_a_pass_that_is_left_ends_its_processes() -> None:
    """D4: after a `break` the next pass is a whole one."""
    loader = DataLoader(Traced(40), batch_size=4, num_workers=2)
    pace = paceline.join("serial")
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _, _, batches = pace.prepare(model, optimizer, loader, batch_size=5)  # not the loader itself
    x, _ = next(iter(batches))
    assert (len(x), len(batches)) == (5, 8)
    assert multiprocessing.active_children() == []
    for x, y in batches:
        pace.step(cross_entropy(model(x), y))
        break
    assert multiprocessing.active_children() == []
    assert sum(1 for _ in batches) == 8
    assert multiprocessing.active_children() == []


STUCK = """
import os, pathlib, time, torch, paceline
from torch.utils.data import DataLoader, Dataset
class Stuck(Dataset):
    def __len__(self): return 100
    def __getitem__(self, i):
        if i > 5:
            pathlib.Path(f"loader-{os.getpid()}").touch()
            time.sleep(1000)
        return torch.randn(3), 0
pace = paceline.join("allreduce")
model = torch.nn.Linear(3, 2)
opt = torch.optim.SGD(model.parameters(), 0.1)
loader = DataLoader(Stuck(), 1, num_workers=2)
model, opt, batches = pace.prepare(model, opt, loader)
for x, y in batches:
    pace.step(model(x).sum())
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_loader_processes_die_with_their_rank(tmp_path: Path, ranks: int) -> None:
    """Processes that are busy in `__getitem__` cannot look whether their rank still lives."""
    (tmp_path / "stuck.py").write_text(STUCK)
    running = started("stuck.py", ranks, tmp_path)

    def loaders() -> list[int]:
        return [int(file.name.split("-")[1]) for file in tmp_path.glob("loader-*")]

    def until(what: Callable[[], bool]) -> bool:
        deadline = time.monotonic() + 60
        while not what() and time.monotonic() < deadline:
            time.sleep(0.02)
        return what()

    try:
        assert until(lambda: len(loaders()) == 2 * ranks)
        for rank in running:
            rank.kill()
        assert until(lambda: not any(map(_alive, loaders())))
    finally:
        for rank in running:
            rank.kill()
            rank.wait()
        for pid in filter(_alive, loaders()):
            os.kill(pid, signal.SIGKILL)


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def test_an_error_in_a_loaders_process_is_told(tmp_path: Path) -> None:
    class Broken(Traced):
        def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
            if get_worker_info() is not None and i == 17:
                raise ValueError("sample 17 is broken")
            return super().__getitem__(i)

    with pytest.raises(WorkerFailed, match="sample 17 is broken"):
        paceline.train(
            data=DataLoader(Broken(20), batch_size=4, num_workers=1),
            model=small_net,
            workers=2,
            threads=1,
            out=str(tmp_path / "run"),
            progress=False,
        )


def test_a_loader_goes_to_other_interpreters() -> None:
    """As with Spark and with processes that are not forked."""
    loader = DataLoader(
        Traced(12),
        batch_size=4,
        sampler=WeightedRandomSampler([1.0] * 12, 12, generator=torch.Generator().manual_seed(1)),
        num_workers=1,
        worker_init_fn=name_of,
    )
    there = cloudpickle.loads(cloudpickle.dumps(adopt(loader)))
    here, other = (
        [b.targets.tolist() for b, _ in zip(_batches(data), range(3), strict=False)]
        for data in (adopt(loader), there)
    )
    assert here == other


def _batches(data: Any) -> ShardBatches:
    return ShardBatches(data.train, LoaderOrder(data.loader, 1, seed=2), 0, CPU, seed=2)
