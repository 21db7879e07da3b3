"""`paceline data export`: write a set of images as PNG files in ImageNet's layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from paceline.data.base import Data, TensorSamples
from paceline.errors import BadRequest, RunFailed
from paceline.registry import sources

Say = Callable[[str], None]


def export(
    name: str,
    out: str | Path,
    data_dir: str | None = None,
    most: int | None = None,
    say: Say = lambda _: None,
) -> int:
    """Write OUT/train/<class>/*.png and OUT/val/<class>/*.png, and return the number of files.

    `most` limits the images of each class and part.
    """
    data: Data = sources.build(name, data_dir=data_dir)
    root = Path(out)
    if root.exists() and any(root.iterdir()):
        raise BadRequest(f"out={root} is not empty: choose another folder")
    written = 0
    for part, samples in (("train", data.train), ("val", data.test)):
        if samples is None:
            continue
        if (
            not isinstance(samples, TensorSamples)
            or samples.inputs.dtype is not torch.uint8
            or samples.inputs.dim() != 4
        ):
            raise BadRequest(
                f"{name} is not a set of images: mnist, fashion-mnist, fashion-mini and cifar10 are"
            )
        seen: Counter[int] = Counter()
        try:
            for number, (image, label) in enumerate(
                zip(samples.inputs, samples.targets.tolist(), strict=True)
            ):
                if most is not None and seen[label] >= most:
                    continue
                seen[label] += 1
                folder = root / part / f"class-{label:02d}"
                folder.mkdir(parents=True, exist_ok=True)
                pixels = image.permute(1, 2, 0).numpy()
                shown = pixels[..., 0] if pixels.shape[-1] == 1 else np.ascontiguousarray(pixels)
                Image.fromarray(shown).save(folder / f"{number:05d}.png")
        except OSError as error:
            raise RunFailed(f"{root} cannot be written: {error.strerror or error}") from None
        written += sum(seen.values())
        say(f"{part}: {sum(seen.values()):,} images of {len(seen)} classes")
    return written
