"""A folder of images: PATH/train/<class>/*, PATH/val/<class>/* (ImageNet's layout)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from paceline.common.seeding import derive
from paceline.data.augment import Augment
from paceline.data.base import Data, Scale, TensorSamples
from paceline.errors import BadRequest, DataCorrupt, DataUnavailable
from paceline.registry import sources

SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".webp", ".ppm", ".gif"}
SCALE = Scale((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
IN_MEMORY_BYTES = 1 << 30  # larger sets are decoded batch by batch, not once


class ImageFiles:
    """Image files that are decoded for each batch."""

    def __init__(
        self, files: list[Path], labels: list[int], size: int, change: Callable[[Tensor], Tensor]
    ) -> None:
        self.files, self.size, self.change = files, size, change
        self.targets = torch.tensor(labels, dtype=torch.int64)

    def __len__(self) -> int:
        return len(self.files)

    def labels(self) -> Tensor:
        return self.targets

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        images = np.stack([decode(self.files[i], self.size) for i in indices.tolist()])
        return self.change(torch.from_numpy(images)), self.targets[indices]


def decode(path: Path, size: int) -> npt.NDArray[np.uint8]:
    """Resize the shorter side to `size` and cut out the centre: 3 x size x size bytes."""
    try:
        with Image.open(path) as opened:
            image = opened.convert("RGB")
        width, height = image.size
        if (width, height) != (size, size):
            factor = size / min(width, height)
            sides = max(size, round(width * factor)), max(size, round(height * factor))
            image = image.resize(sides, Image.Resampling.BILINEAR)
            left, top = (image.width - size) // 2, (image.height - size) // 2
            image = image.crop((left, top, left + size, top + size))
        return np.ascontiguousarray(np.asarray(image, dtype=np.uint8).transpose(2, 0, 1))
    except Exception as error:  # each format's reader raises errors of its own
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: Exception) -> DataCorrupt:
    return DataCorrupt(
        f"{path} is not an image that can be read: {str(error) or type(error).__name__}"
    )


def _listing(root: Path, classes: list[str], seed: int) -> tuple[list[Path], list[int]]:
    pairs = [
        (file, label)
        for label, name in enumerate(classes)
        for file in sorted((root / name).rglob("*") if (root / name).is_dir() else ())
        if file.suffix.lower() in SUFFIXES
    ]
    # Folders are sorted by class; with a fixed shuffle, static shards are i.i.d.
    order = np.random.default_rng(derive(seed, "imagefolder")).permutation(len(pairs))
    return [pairs[i][0] for i in order], [pairs[i][1] for i in order]


@dataclass(frozen=True)
class Listing:
    """The files of a folder in ImageNet's layout, and the size of a decoded image."""

    classes: list[str]
    size: int
    train: tuple[list[Path], list[int]]
    test: tuple[list[Path], list[int]]

    @classmethod
    def read(cls, path: str, size: int) -> Listing:
        root = Path(path)
        if not path or not (root / "train").is_dir():
            raise DataUnavailable(
                f"imagefolder:{path or 'PATH'}: there is no folder {root / 'train'}. It must have"
                " one folder per class"
            )
        if size < 0:
            raise BadRequest(f"imagefolder: size={size}: 0 or more")
        classes = sorted(d.name for d in (root / "train").iterdir() if d.is_dir())
        held_out = next((root / n for n in ("val", "test") if (root / n).is_dir()), None)
        files, labels = _listing(root / "train", classes, 0)
        if not files:
            raise DataUnavailable(
                f"{root / 'train'} has {len(classes)} class folders and no image in them"
            )
        if held_out is not None:
            extra = sorted({d.name for d in held_out.iterdir() if d.is_dir()} - set(classes))
            if extra:
                raise BadRequest(
                    f"{held_out} has classes that train/ does not have: {', '.join(extra[:5])}"
                )
        if size == 0:
            try:
                with Image.open(files[0]) as first:
                    size = min(first.size)
            except Exception as error:
                raise _unreadable(files[0], error) from None
        return cls(
            classes,
            size,
            (files, labels),
            _listing(held_out, classes, 0) if held_out is not None else ([], []),
        )


@sources.register("imagefolder", positional="path")
def imagefolder(
    path: Annotated[str, "the folder with train/<class>/ and val/<class>/"] = "",
    size: Annotated[
        int, "pixels of the (square) input; 0 takes the first image's shorter side"
    ] = 0,
    augment: Annotated[bool, "random crops and flips in training"] = False,
) -> Data:
    """Images in folders by class, as ImageNet has them."""
    listing = Listing.read(path, size)
    side = listing.size
    small = (len(listing.train[0]) + len(listing.test[0])) * 3 * side * side <= IN_MEMORY_BYTES

    def samples(
        names: list[Path], numbers: list[int], change: Callable[[Tensor], Tensor]
    ) -> TensorSamples | ImageFiles:
        if not small:
            return ImageFiles(names, numbers, side, change)
        images = np.empty((len(names), 3, side, side), dtype=np.uint8)
        for i, name in enumerate(names):
            images[i] = decode(name, side)
        return TensorSamples(
            torch.from_numpy(images), torch.tensor(numbers, dtype=torch.int64), change
        )

    return Data(
        f"imagefolder:{Path(path).name}",
        samples(*listing.train, Augment(side, True, SCALE) if augment else SCALE),
        samples(*listing.test, SCALE) if listing.test[0] else None,
        (3, side, side),
        len(listing.classes),
    )
