"""CIFAR-10, from its official binary files or its official pickled files."""

from __future__ import annotations

import hashlib
import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from paceline.common.places import places
from paceline.data.base import Data, Scale, TensorSamples
from paceline.errors import DataCorrupt, DataUnavailable
from paceline.registry import sources

BINARY = (
    "cifar-10-batches-bin",
    tuple(f"data_batch_{i}.bin" for i in range(1, 6)),
    ("test_batch.bin",),
)
PICKLED = ("cifar-10-batches-py", tuple(f"data_batch_{i}" for i in range(1, 6)), ("test_batch",))
PICKLED_MD5 = {  # unpickling can run code, so only the official files are opened
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
}
ARRAYS = (  # what an array is pickled with; Python 2 wrote the official files
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),  # bytes in old protocols
)
SCALE = Scale((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
ROW = 1 + 3 * 32 * 32

Rows = npt.NDArray[np.uint8]  # one row per image: the label, then 3 x 32 x 32 bytes


def _read_binary(path: Path) -> Rows:
    raw = np.frombuffer(path.read_bytes(), dtype=np.uint8)
    if len(raw) == 0 or len(raw) % ROW:
        raise DataCorrupt(
            f"{path} is truncated: {len(raw):,} bytes is not a multiple of {ROW}. Fetch cifar10"
            " again."
        )
    return raw.reshape(-1, ROW)


def _read_pickled(path: Path) -> Rows:
    raw = path.read_bytes()
    if hashlib.md5(raw, usedforsecurity=False).hexdigest() != PICKLED_MD5[path.name]:
        raise DataCorrupt(
            f"{path} is not the official file (its MD5 differs). Unpickling can run code, so it is"
            " not opened"
        )
    try:
        content = _Arrays(io.BytesIO(raw), encoding="bytes").load()
    except pickle.UnpicklingError as error:
        raise DataCorrupt(f"{path} is not a file of CIFAR-10: {error}") from None
    labels = np.asarray(content[b"labels"], dtype=np.uint8)
    return np.concatenate([labels[:, None], np.asarray(content[b"data"], dtype=np.uint8)], axis=1)


class _Arrays(pickle.Unpickler):
    """Makes arrays only. The official files hold nothing else, so no other class is looked up."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in ARRAYS:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is no part of an array")


@sources.register("cifar10")
def cifar10(data_dir: str | None) -> Data:
    """Small photographs in ten classes, 50,000 + 10,000 images of 3x32x32."""
    for place in places(data_dir):
        for (folder, train, test), read in ((BINARY, _read_binary), (PICKLED, _read_pickled)):
            here = place / folder
            if all((here / f).exists() for f in (*train, *test)):
                return Data(
                    "cifar10",
                    _samples(here, train, read),
                    _samples(here, test, read),
                    (3, 32, 32),
                    10,
                )
    raise DataUnavailable(
        "cifar10 is not on this machine (looked in"
        f" {', '.join(str(p / BINARY[0]) for p in places(data_dir))}). Get it with: paceline data"
        " fetch cifar10"
    )


def _samples(folder: Path, files: tuple[str, ...], read: type | object) -> TensorSamples:
    rows = np.concatenate([read(folder / f) for f in files])  # type: ignore[operator]
    if rows[:, 0].max() > 9:
        raise DataCorrupt(f"{folder} has a label {rows[:, 0].max()}; the ten classes are 0 to 9")
    images = np.ascontiguousarray(rows[:, 1:]).reshape(-1, 3, 32, 32)
    return TensorSamples(
        torch.from_numpy(images), torch.from_numpy(rows[:, 0].astype("int64")), SCALE
    )
