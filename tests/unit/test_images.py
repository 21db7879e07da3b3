"""Folders of images to packed shards, and the inputs that a model gets from them."""

from __future__ import annotations

import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import paceline
from paceline.data.augment import Augment
from paceline.data.export import export
from paceline.data.imagefolder import SCALE, decode
from paceline.data.prepare import images
from paceline.data.prepare.anything import prepare
from paceline.errors import BadRequest, DataCorrupt, DataUnavailable, RunFailed


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Two classes told apart by their colour, of different sizes; one file is not an image."""
    random = np.random.default_rng(0)
    for part, count in (("train", 12), ("val", 5)):
        for label, colour in (("blue", 2), ("red", 0)):
            folder = tmp_path / "photos" / part / label
            folder.mkdir(parents=True)
            for i in range(count):
                pixels = random.integers(0, 60, (20 + i, 30, 3)).astype(np.uint8)
                pixels[..., colour] += 150
                Image.fromarray(pixels).save(folder / f"{i}.png")
    (tmp_path / "photos" / "train" / "red" / "broken.png").write_bytes(b"no image")
    return tmp_path / "photos"


@pytest.mark.processes
def test_a_folder_of_images_becomes_shards(photos: Path, tmp_path: Path) -> None:
    manifest = prepare(f"imagefolder:{photos}", out=tmp_path / "out", shards=3, size=16)
    assert manifest.kind == "images"
    assert manifest.targets["classes"] == ["blue", "red"]
    assert (manifest.rows("train"), manifest.rows("test")) == (24, 10)
    assert manifest.report["dropped"][0]["rows"] == 1
    assert "broken.png" in manifest.report["dropped"][0]["why"]
    again = prepare(f"imagefolder:{photos}", out=tmp_path / "again", shards=3, size=16)
    assert [s.inputs.sha256 for s in again.shards] == [s.inputs.sha256 for s in manifest.shards]

    train, test = paceline.load_data(f"shards:{tmp_path / 'out'},augment=false")
    direct_train, _ = paceline.load_data(f"imagefolder:{clean(photos)},size=16")
    assert test is not None
    for samples in (train, test):
        inputs, labels = samples.batch(torch.arange(len(samples)))  # type: ignore[union-attr]
        assert inputs.shape[1:] == (3, 16, 16)
        brighter = inputs[:, 0].mean((1, 2)) > inputs[:, 2].mean((1, 2))
        assert torch.equal(brighter.long(), labels)
    one, other = (
        s.batch(torch.arange(24))[0].flatten(1).sum(1).sort()[0] for s in (train, direct_train)
    )  # type: ignore[union-attr]
    assert torch.allclose(one, other)
    run = paceline.train(
        data=f"shards:{tmp_path / 'out'}",
        model="mlp:hidden=8",
        epochs=3,
        batch_size=4,
        out=str(tmp_path / "run"),
    )
    assert run.test_accuracy > 0.8


def clean(photos: Path) -> Path:
    (photos / "train" / "red" / "broken.png").unlink()
    return photos


def test_larger_images_are_stored_with_a_margin(photos: Path, tmp_path: Path) -> None:
    manifest = prepare(f"imagefolder:{photos}", out=tmp_path / "out", shards=1, size=70)
    assert manifest.inputs == {"dtype": "uint8", "shape": [3, 80, 80], "crop": 70}
    train, _ = paceline.load_data(f"shards:{tmp_path / 'out'}")
    assert train.batch(torch.tensor([0, 1]))[0].shape == (2, 3, 70, 70)  # type: ignore[union-attr]


def test_every_image_is_cut_and_mirrored_by_itself() -> None:
    torch.manual_seed(0)
    size, stored = 5, 8
    images = (
        torch.arange(3 * stored * stored, dtype=torch.uint8)
        .view(1, 3, stored, stored)
        .repeat(200, 1, 1, 1)
    )
    cut = Augment(size, True, lambda x: x)(images)
    seen = set()
    for image in cut:
        found = [
            (top, left, flip)
            for top in range(stored - size + 1)
            for left in range(stored - size + 1)
            for flip in (False, True)
            if torch.equal(
                image.flip(2) if flip else image, images[0, :, top : top + size, left : left + size]
            )
        ]
        # A crop of the image, or of its mirror image, the same in all three channels.
        assert len(found) == 1
        seen.add(found[0])
    assert len(seen) > 25  # of 32
    middle = Augment(size, False, lambda x: x)(images[:1])
    assert torch.equal(middle[0], images[0, :, 1:6, 1:6])
    padded = Augment(stored, True, SCALE)(images)
    assert padded.shape == images.shape
    assert not torch.equal(padded[0], padded[1])


def test_images_that_are_here_in_imagenets_layout(tmp_path: Path) -> None:
    assert export("fashion-mini", tmp_path / "out", most=2) == 40
    assert len(list((tmp_path / "out" / "train").iterdir())) == 10
    train, test = paceline.load_data(f"imagefolder:{tmp_path / 'out'}")
    assert test is not None
    assert (len(train), len(test)) == (20, 20)  # type: ignore[arg-type]
    with pytest.raises(BadRequest, match="is not empty"):
        export("fashion-mini", tmp_path / "out")
    with pytest.raises(BadRequest, match="not a set of images"):
        export("synthetic", tmp_path / "other")


def test_bad_folders(photos: Path, tmp_path: Path) -> None:
    with pytest.raises(DataUnavailable, match="there is no folder"):
        prepare("imagefolder:nowhere", out=tmp_path / "out")
    with pytest.raises(BadRequest, match="Did you mean 'local'"):
        prepare(f"imagefolder:{photos}", out=tmp_path / "out", engine="locl")
    with pytest.raises(BadRequest, match="needs Spark"):
        prepare(f"imagefolder:{photos}", out=tmp_path / "out", engine="local", master="local[2]")
    with pytest.raises(BadRequest, match="prepare needs one of"):
        prepare(out=tmp_path / "out")
    with pytest.raises(BadRequest, match="is for images"):
        prepare("flights", out=tmp_path / "out", size=3)
    for file in photos.rglob("train/*/*.png"):
        file.write_bytes(b"")
    with pytest.raises(DataCorrupt, match=r"none of its 25 training images|is not an image"):
        prepare(f"imagefolder:{photos}", out=tmp_path / "out", size=8)
    assert not (tmp_path / "out" / "manifest.json").exists()


# PIL warns of 300, which is an error in tests, and refuses 500.
@pytest.mark.parametrize("pixels", [300, 500])
def test_an_image_of_too_many_pixels_is_left_out(
    pixels: int, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    huge = photos / "train" / "red" / "huge.png"
    Image.new("RGB", (pixels, 5)).save(huge)
    with pytest.raises(
        DataCorrupt, match=r"huge\.png is not an image that can be read: Image size"
    ):
        decode(huge, 16)
    manifest = prepare(f"imagefolder:{photos}", out=tmp_path / "out", shards=3, size=16)
    assert manifest.rows("train") == 24
    assert manifest.report["dropped"][0]["rows"] == 2


@pytest.mark.parametrize(
    "error",
    [
        OSError("truncated"),
        SyntaxError("broken PNG"),
        ValueError("negative size"),
        struct.error("unpack requires"),
        Image.DecompressionBombError("a bomb"),
        EOFError(),
        ZeroDivisionError("division"),
        KeyError("mode"),
    ],
    ids=lambda e: type(e).__name__,
)
def test_whatever_a_reader_of_images_raises_names_the_file(
    error: Exception, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise error

    monkeypatch.setattr(Image, "open", broken)
    with pytest.raises(DataCorrupt, match=r"0\.png is not an image that can be read: \S"):
        decode(photos / "train" / "red" / "0.png", 16)
    with pytest.raises(DataCorrupt, match="is not an image that can be read"):
        paceline.load_data(f"imagefolder:{photos}")


def test_a_report_that_cannot_be_written(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_text = Path.write_text

    def full(path: Path, *arguments: Any, **options: Any) -> int:
        if path.name == "report.md":
            raise OSError(28, "No space left on device")
        return write_text(path, *arguments, **options)

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(RunFailed, match=r"report\.md"):
        prepare(f"imagefolder:{photos}", out=tmp_path / "out", shards=1, size=16)


def test_how_far_spark_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "TELL_EVERY_S", 0.01)
    far = iter(["", "3 of 8 tasks"])
    said: list[str] = []
    with images._telling(lambda: next(far, ""), said.append):
        until = time.monotonic() + 10
        while not said and time.monotonic() < until:
            time.sleep(0.01)
    assert said == ["packing: 3 of 8 tasks"]
