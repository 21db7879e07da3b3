"""MNIST, Fashion-MNIST, and a small part of Fashion-MNIST that is built in."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch

from paceline.common.places import find
from paceline.data.base import Data, Scale, TensorSamples
from paceline.data.idx import read_idx
from paceline.errors import DataCorrupt
from paceline.registry import sources

FILES = tuple(
    f"{part}-{what}-ubyte" for part in ("train", "t10k") for what in ("images-idx3", "labels-idx1")
)
MINI = Path(__file__).parent / "files" / "fashion-mini"

MNIST_SCALE = Scale((0.1307,), (0.3081,))
FASHION_SCALE = Scale((0.2860,), (0.3530,))


def _load(name: str, folder: Path, scale: Scale) -> Data:
    parts = []
    for part in ("train", "t10k"):
        images = read_idx(folder / f"{part}-images-idx3-ubyte")
        labels = read_idx(folder / f"{part}-labels-idx1-ubyte")
        if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels):
            raise DataCorrupt(
                f"{folder}: {part} has images {images.shape} and labels {labels.shape}"
            )
        if len(labels) and labels.max() > 9:
            raise DataCorrupt(
                f"{folder}: {part} has a label {labels.max()}; the ten classes are 0 to 9"
            )
        with warnings.catch_warnings():  # the memory is read-only, and samples are never written
            warnings.simplefilter("ignore", UserWarning)
            inputs = torch.from_numpy(images).unsqueeze(1)
        parts.append(TensorSamples(inputs, torch.from_numpy(labels.astype("int64")), scale))
    return Data(name, parts[0], parts[1], tuple(parts[0].inputs.shape[1:]), 10)


@sources.register("mnist")
def mnist(data_dir: str | None) -> Data:
    """Handwritten digits, 60,000 + 10,000 images of 1x28x28."""
    return _load("mnist", find("mnist", data_dir, ("MNIST/raw", "mnist"), FILES), MNIST_SCALE)


@sources.register("fashion-mnist")
def fashion_mnist(data_dir: str | None) -> Data:
    """Pictures of clothes, 60,000 + 10,000 images of 1x28x28."""
    folder = find("fashion-mnist", data_dir, ("FashionMNIST/raw", "fashion-mnist"), FILES)
    return _load("fashion-mnist", folder, FASHION_SCALE)


@sources.register("fashion-mini")
def fashion_mini() -> Data:
    """The first 6,000 + 1,000 images of Fashion-MNIST; built in, needs no network."""
    return _load("fashion-mini", MINI, FASHION_SCALE)
