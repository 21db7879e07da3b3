"""Sources: their samples, their errors for missing or damaged files, and the user's own data."""

import gzip
import hashlib
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from paceline.data import cifar
from paceline.data.adopt import adopt
from paceline.data.base import Data, Stream
from paceline.data.batches import ShardBatches, StreamBatches, evaluation_slices
from paceline.data.idx import read_idx
from paceline.data.mnist import FILES, MINI
from paceline.data.order import LoaderOrder
from paceline.data.shards import GlobalShards
from paceline.errors import BadRequest, DataCorrupt, DataUnavailable
from paceline.registry import sources

CPU = torch.device("cpu")


def test_fashion_mini_is_built_in() -> None:
    data = sources.build("fashion-mini")
    assert (len(data.train), len(data.test), data.input_shape, data.classes) == (
        6000,
        1000,
        (1, 28, 28),
        10,
    )
    images, labels = data.train.batch(torch.arange(512))
    assert images.dtype is torch.float32
    assert abs(float(images.mean())) < 0.1
    assert abs(float(images.std()) - 1) < 0.1
    assert labels.min() >= 0
    assert sum(f.stat().st_size for f in MINI.iterdir()) < 5_000_000


@pytest.mark.parametrize("folder", ["MNIST/raw", "mnist"])
@pytest.mark.parametrize("packed", [True, False])
def test_copies_in_the_usual_places_are_used(tmp_path: Path, folder: str, packed: bool) -> None:
    target = tmp_path / "elsewhere" / folder
    target.mkdir(parents=True)
    for file in FILES:
        raw = (MINI / f"{file}.gz").read_bytes()
        (target / (f"{file}.gz" if packed else file)).write_bytes(
            raw if packed else gzip.decompress(raw)
        )
    assert len(sources.build("mnist", data_dir=str(tmp_path / "elsewhere")).train) == 6000
    with pytest.raises(DataUnavailable, match="paceline data fetch mnist"):
        sources.build("mnist", data_dir=None)
    shutil.move(tmp_path / "elsewhere", tmp_path / "data")
    assert len(sources.build("mnist", data_dir=None).train) == 6000


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda raw: raw[:-100], "truncated"),
        (lambda raw: raw + b"x", "too long"),
        (lambda raw: b"<html>" + raw, "not an idx file"),
        (lambda raw: b"", "not an idx file"),
    ],
)
def test_damaged_idx_files_are_named(tmp_path: Path, damage: object, message: str) -> None:
    path = tmp_path / "train-labels-idx1-ubyte"
    path.write_bytes(damage(gzip.decompress((MINI / f"{path.name}.gz").read_bytes())))
    with pytest.raises(DataCorrupt, match=f"{path.name}.*{message}"):
        read_idx(path)


def test_a_damaged_gz_is_named(tmp_path: Path) -> None:
    packed = tmp_path / "x.gz"
    packed.write_bytes((MINI / "t10k-labels-idx1-ubyte.gz").read_bytes()[:-30])
    with pytest.raises(DataCorrupt, match=r"x\.gz is damaged"):
        read_idx(tmp_path / "x")


class RunsCode:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.touch, (Path("ran"),)


def test_a_pickle_of_cifar_holds_arrays_and_runs_no_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even a file with the official checksum makes nothing but arrays."""
    rows, path = np.arange(2 * 3072, dtype=np.uint8).reshape(2, 3072), tmp_path / "data_batch_1"
    for content, protocol in (({b"labels": [3, 4], b"data": rows}, 2), (RunsCode(), 2)):
        path.write_bytes(pickle.dumps(content, protocol=protocol))
        digest = hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()
        monkeypatch.setitem(cifar.PICKLED_MD5, path.name, digest)
        if isinstance(content, dict):
            read = cifar._read_pickled(path)
            assert read[:, 0].tolist() == [3, 4]
            assert (read[:, 1:] == rows).all()
        else:
            with pytest.raises(DataCorrupt, match="is no part of an array"):
                cifar._read_pickled(path)
    assert not Path("ran").exists()


def test_cifar_in_both_layouts(tmp_path: Path) -> None:
    folder = tmp_path / "data" / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    rows = np.random.default_rng(0).integers(0, 10, (4, 3073), dtype=np.uint8)
    for name in [f"data_batch_{i}.bin" for i in range(1, 6)] + ["test_batch.bin"]:
        (folder / name).write_bytes(rows.tobytes())
    data = sources.build("cifar10", data_dir=None)
    assert (len(data.train), len(data.test), data.input_shape) == (20, 4, (3, 32, 32))
    assert data.train.targets.tolist() == rows[:, 0].tolist() * 5
    (folder / "data_batch_3.bin").write_bytes(rows.tobytes()[:-5])
    with pytest.raises(DataCorrupt, match=r"data_batch_3\.bin is truncated"):
        sources.build("cifar10", data_dir=None)
    pickled = tmp_path / "data" / "cifar-10-batches-py"
    folder.rename(pickled)
    for file in pickled.iterdir():
        file.rename(file.with_suffix(""))
    with pytest.raises(DataCorrupt, match="it is not opened"):
        sources.build("cifar10", data_dir=None)


def test_synthetic_is_repeatable_and_separable() -> None:
    a, b = (sources.build("synthetic:shape=2x4,classes=3,samples=50,noise=0.1") for _ in range(2))
    assert torch.equal(a.train.inputs, b.train.inputs)
    assert a.input_shape == (2, 4)
    assert len(a.test) == 10
    means = torch.stack([a.train.inputs[a.train.targets == c].mean(0) for c in range(3)])
    nearest = (a.test.inputs[:, None] - means).flatten(2).norm(dim=2).argmin(1)
    assert torch.equal(nearest, a.test.targets)
    for bad in ("classes=1", "samples=0", "shape=0x3", "noise=-1"):
        with pytest.raises(BadRequest, match="synthetic"):
            sources.build(f"synthetic:{bad}")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for part, count in (("train", 6), ("val", 2)):
        for label, name in enumerate(("cat", "dog")):
            folder = tmp_path / "photos" / part / name
            folder.mkdir(parents=True)
            for i in range(count):
                Image.new("RGB", (24, 20), (250 * label, i, 0)).save(folder / f"{i}.png")
    return tmp_path / "photos"


def test_imagefolder(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = sources.build(f"imagefolder:{photos}")
    assert (len(data.train), len(data.test), data.input_shape, data.classes) == (
        12,
        4,
        (3, 20, 20),
        2,
    )
    assert sources.build(f"imagefolder:path={photos},size=16").input_shape == (3, 16, 16)
    images, labels = data.train.batch(torch.arange(12))
    assert torch.equal((images[:, 0].mean((1, 2)) > 0).long(), labels)
    assert labels.tolist() != sorted(labels.tolist()), (
        "sorted by class, static shards would not be i.i.d."
    )
    monkeypatch.setattr("paceline.data.imagefolder.IN_MEMORY_BYTES", 0)
    lazily = sources.build(f"imagefolder:{photos}").train.batch(torch.arange(12))
    assert torch.equal(lazily[0], images)
    assert torch.equal(lazily[1], labels)


def test_imagefolder_mistakes(photos: Path, tmp_path: Path) -> None:
    with pytest.raises(DataUnavailable, match="one folder per class"):
        sources.build(f"imagefolder:{tmp_path}")
    (photos / "train" / "cat" / "broken.png").write_bytes(b"no image")
    with pytest.raises(DataCorrupt, match=r"broken\.png"):
        sources.build(f"imagefolder:{photos}")
    (photos / "val" / "bird").mkdir()
    with pytest.raises(BadRequest, match="bird"):
        sources.build(f"imagefolder:{photos}")


class Squares(Dataset):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return torch.tensor([float(i), float(i * i)]), i % 3


class Numbers(IterableDataset):
    def __iter__(self):
        return iter((torch.tensor([float(i)]), i) for i in range(11))


X, Y = torch.arange(20.0).view(10, 2), torch.arange(10) % 3


@pytest.mark.parametrize(
    "given",
    [
        (X, Y),
        (X.numpy(), Y.numpy()),
        TensorDataset(X, Y),
        ((X, Y), (X[:4], Y[:4])),
        Squares(),
        (Squares(), Squares()),
        DataLoader(Squares()),
    ],
)
def test_own_data_is_adopted(given: object) -> None:
    data = adopt(given)
    assert (len(data.train), data.input_shape, data.classes) == (10, (2,), 3)
    inputs, targets = data.train.batch(torch.tensor([4, 1]))
    assert inputs.shape == (2, 2)
    assert targets.tolist() == [1, 1]
    assert adopt(data) is data


def test_a_loader_that_is_honoured_needs_no_notice() -> None:
    data = adopt(DataLoader(Squares(), batch_size=4, shuffle=True, num_workers=2))
    assert (data.batch_size, data.notice) == (4, "")


@pytest.mark.parametrize("bad", [5, None, (1, 2, 3), "text"])
def test_what_is_not_data(bad: object) -> None:
    with pytest.raises(BadRequest):
        adopt(bad)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_streams_are_dealt_out_exactly_once(workers: int) -> None:
    data = adopt((Numbers(), Numbers()))
    assert isinstance(data.train, Stream)
    assert "one batch of each round" in data.notice
    assert len(data.test) == 11
    for _ in range(2):
        seen, steps = [], []
        for worker in range(workers):
            batches = StreamBatches(data.train, 3, workers, worker, seed=0, device=CPU)
            count = 0
            for batch in batches:
                count += 1
                if batch.weight:
                    seen += batch.targets.tolist()
                assert batch.global_weight <= 3 * workers
                if batches.ended:
                    break
            steps.append(count)
        assert sorted(seen) == list(range(11))
        assert len(set(steps)) == 1


def test_loaders_with_a_sampler_agree_between_ranks_and_differ_between_epochs() -> None:
    loader = DataLoader(
        Squares(), sampler=torch.utils.data.WeightedRandomSampler([1.0] * 10, 10), batch_size=2
    )
    data = adopt(loader)

    def epochs(seed: int) -> list[list[float]]:
        batches = ShardBatches(data.train, LoaderOrder(loader, 1, seed=seed), 0, CPU)
        result: list[list[float]] = [[]]
        for batch in batches:
            result[-1] += batch.inputs[:, 0].tolist()
            if batches.ended:
                if len(result) == 2:
                    return result
                result.append([])
        return result

    assert epochs(1) == epochs(1)
    first, second = epochs(1)
    assert first != second
    assert first != epochs(2)[0]


def test_batches_resume_where_they_were() -> None:
    data = adopt((X, Y))
    for make in (
        lambda: ShardBatches(data.train, GlobalShards(10, (2, 1), 5), 0, CPU),
        lambda: StreamBatches(adopt(Numbers()).train, 2, 2, 0, 5, CPU),
    ):
        whole = make()
        ahead = []
        for batch in whole:
            ahead.append(
                (batch.step, batch.epoch, None if batch.inputs is None else batch.inputs.tolist())
            )
            if len(ahead) == 9:
                break
        for stop in range(1, 8):
            first = make()
            for _, batch in zip(range(stop), first, strict=False):
                assert batch is not None
            # zip has drawn `stop` batches and one more is not started
            second = make()
            second.restore(first.state())
            batch = next(iter(second))
            assert (
                batch.step,
                batch.epoch,
                None if batch.inputs is None else batch.inputs.tolist(),
            ) == ahead[stop]
            first.give_back()  # its last batch was not used
            third = make()
            third.restore(first.state())
            batch = next(iter(third))
            assert (
                batch.step,
                batch.epoch,
                None if batch.inputs is None else batch.inputs.tolist(),
            ) == ahead[stop - 1]


@pytest.mark.parametrize(("samples", "workers"), [(10, 3), (2, 5), (1000, 4)])
def test_test_sets_are_counted_once(samples: int, workers: int) -> None:
    parts = [
        i
        for w in range(workers)
        for part in evaluation_slices(samples, workers, w, 7)
        for i in part.tolist()
    ]
    assert parts == list(range(samples))


def test_an_empty_set_is_refused() -> None:
    with pytest.raises(BadRequest, match="empty"):
        adopt((X[:0], Y[:0]))
    with pytest.raises(DataCorrupt, match="the same length"):
        adopt((X, Y[:3]))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_files(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"123")
    path.chmod(0)
    with pytest.raises(DataCorrupt, match="cannot be read"):
        read_idx(path)


def test_data_needs_samples() -> None:
    with pytest.raises(BadRequest, match="no training samples"):
        Data("x", adopt((X, Y)).train.__class__(X[:0], Y[:0]), None, (2,), 3)
