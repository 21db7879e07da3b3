"""`shards:DIR`: arrays on disk that are mapped into memory, not read.

Opening them takes no time. A row is copied when it becomes part of a batch.
"""

from __future__ import annotations

import hashlib
import mmap
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from paceline.common.units import parse_bytes
from paceline.data.augment import Augment
from paceline.data.base import Data, Scale
from paceline.data.manifest import PAGE, ArrayFile, Manifest, ShardInfo, npy_header
from paceline.errors import BadRequest, DataCorrupt, DataUnavailable
from paceline.registry import sources

VERIFY_BYTES = 256 << 20  # verify=auto compares the checksums of at most this much data


@dataclass(frozen=True)
class RowSpan:
    """Rows [start, stop) of a data set that are on one host."""

    start: int
    stop: int
    host: str = ""


class Mapped:
    """One array of a shard, mapped into memory.

    PyTorch wants memory that it may write to, so the mapping is private. Nothing writes to it.
    """

    def __init__(
        self, path: Path, array: ArrayFile, shape: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        self.path, self.shape = path, shape
        header = npy_header(np.dtype(str(dtype).removeprefix("torch.")), shape)
        try:
            with open(path, "rb") as file:
                if (size := path.stat().st_size) != array.bytes:
                    raise DataCorrupt(
                        f"{path} is damaged: it has {size:,} bytes, and the manifest says"
                        f" {array.bytes:,}"
                    )
                if file.read(len(header)) != header:
                    raise DataCorrupt(
                        f"{path} is damaged: its header is not that of a {dtype} array of shape"
                        f" {shape}"
                    )
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except FileNotFoundError:
            raise DataUnavailable(
                f"{path} is missing, although the manifest names it. Is it on another host? Copy it"
                " here, or prepare the data again"
            ) from None
        except (OSError, ValueError) as error:
            raise DataCorrupt(f"{path} cannot be read: {error}") from None
        count = int(np.prod(shape))
        self.rows: Tensor = (
            torch.frombuffer(self._map, dtype=dtype, count=count, offset=PAGE)
            if count
            else torch.empty(0, dtype=dtype)
        ).view(shape)

    def verify(self, array: ArrayFile) -> None:
        if hashlib.sha256(self._map).hexdigest() != array.sha256:
            raise DataCorrupt(
                f"{self.path} is damaged: its SHA-256 differs from the manifest's. Prepare the data"
                " again"
            )

    def will_need(self, start: int, stop: int) -> None:
        row = self.rows[0].nbytes if len(self.rows) else 0
        begin = (PAGE + start * row) // PAGE * PAGE
        if (length := PAGE + stop * row - begin) > 0:
            self._map.madvise(mmap.MADV_WILLNEED, begin, min(length, len(self._map) - begin))

    def unmap(self) -> None:
        """Unmap the pages from this process. The system may keep them in its cache."""
        self._map.madvise(mmap.MADV_DONTNEED)


class ShardedSamples:
    """The rows of all shards of one part, one after the other.

    About `window_bytes` of them stay in the process's memory; older pages are unmapped.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        part: str,
        window_bytes: int,
        change: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.folder, self.change, self.window_bytes = folder, change, window_bytes
        self.shape: tuple[int, ...] = tuple(manifest.inputs["shape"])
        self.dtypes = tuple(
            getattr(torch, str(d["dtype"])) for d in (manifest.inputs, manifest.targets)
        )
        self.infos = [s for s in manifest.of(part) if s.rows]
        ends = np.cumsum([s.rows for s in self.infos], dtype=np.int64)
        self.ends, self.starts = (
            torch.from_numpy(ends),
            [0, *ends[:-1].tolist()] if len(ends) else [],
        )
        self._stops: list[int] = ends.tolist()
        self.inputs, self.targets = self._open()
        self.row_bytes = (
            int(np.prod(self.shape)) * self.inputs[0].rows.element_size() if self.infos else 1
        )
        self.window_rows = max(1, window_bytes // max(1, self.row_bytes))
        self._touched, self._ahead = 0, (-1, -1)
        self._total = sum(s.inputs.bytes for s in self.infos)

    def _open(self) -> tuple[list[Mapped], list[Mapped]]:
        inputs = [
            Mapped(self.folder / s.inputs.file, s.inputs, (s.rows, *self.shape), self.dtypes[0])
            for s in self.infos
        ]
        targets = [
            Mapped(self.folder / s.targets.file, s.targets, (s.rows,), self.dtypes[1])
            for s in self.infos
        ]
        return inputs, targets

    def verify(self) -> None:
        for info, inputs, targets in zip(self.infos, self.inputs, self.targets, strict=True):
            inputs.verify(info.inputs)
            targets.verify(info.targets)

    @property
    def spans(self) -> list[RowSpan]:
        return [
            RowSpan(start, start + s.rows, s.host)
            for start, s in zip(self.starts, self.infos, strict=True)
        ]

    def __len__(self) -> int:
        return self._stops[-1] if self._stops else 0

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("inputs", "targets")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Map the files again: this is another process, perhaps on another host."""
        self.__dict__.update(state)
        self.inputs, self.targets = self._open()

    def labels(self) -> Tensor | None:
        return torch.cat([t.rows for t in self.targets]) if self.dtypes[1] is torch.int64 else None

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Copy the rows in the order of `indices`.

        Mostly all of them are in one shard, because an epoch takes one window after the other.
        """
        numbers = indices.numpy()
        low, high = int(numbers.min()), int(numbers.max())
        shard = bisect_right(self._stops, low)
        if high < self._stops[shard]:
            local = indices - self.starts[shard]
            self._read_ahead(shard, low - self.starts[shard])
            inputs, targets = (
                self.inputs[shard].rows.index_select(0, local),
                self.targets[shard].rows.index_select(0, local),
            )
        else:
            inputs = torch.empty((len(indices), *self.shape), dtype=self.dtypes[0])
            targets = torch.empty(len(indices), dtype=self.dtypes[1])
            where = torch.bucketize(indices, self.ends, right=True)
            for each in where.unique().tolist():
                mine = (where == each).nonzero().flatten()
                local = indices.index_select(0, mine) - self.starts[each]
                inputs.index_copy_(0, mine, self.inputs[each].rows.index_select(0, local))
                targets.index_copy_(0, mine, self.targets[each].rows.index_select(0, local))
            # A page fault maps neighbouring pages, too.
            self._touched += len(indices) * max(self.row_bytes, 16 * PAGE)
            if self._touched > self.window_bytes:
                self.unmap()
        return (self.change(inputs) if self.change else inputs), targets

    def _read_ahead(self, shard: int, row: int) -> None:
        """Tell the system to read a whole window when its first row is used."""
        window = row // self.window_rows
        if self._ahead != (shard, window):
            if self._ahead[0] >= 0 and self._total > self.window_bytes:
                self.inputs[self._ahead[0]].unmap()
            self._ahead = (shard, window)
            start = window * self.window_rows
            self.inputs[shard].will_need(
                start, min(start + self.window_rows, self.infos[shard].rows)
            )

    def unmap(self) -> None:
        if self._total > self.window_bytes:
            for mapped in self.inputs:
                mapped.unmap()
        self._touched = 0


@sources.register("shards", positional="path")
def shards(
    path: Annotated[str, "the folder that `paceline prepare` wrote"] = "",
    window: Annotated[
        str, "rows are shuffled within windows of so many bytes; one window stays in memory"
    ] = "256MB",
    verify: Annotated[str, "compare checksums first: auto (up to 256 MB), yes, no"] = "auto",
    augment: Annotated[bool, "images: random crops and flips in training"] = True,
) -> Data:
    """Shards that `paceline prepare` made, mapped from disk; they may be larger than memory."""
    if not path:
        raise BadRequest("shards:DIR needs a folder: paceline prepare flights --out DIR makes one")
    folder = Path(path)
    if not folder.is_dir():
        raise DataUnavailable(
            f"shards:{path}: there is no such folder; make it with: paceline prepare flights --out"
            f" {path}"
        )
    if verify not in ("auto", "yes", "no"):
        raise BadRequest(f"shards: verify={verify}: use auto, yes or no")
    manifest = Manifest.read(folder)
    size = sum(s.inputs.bytes + s.targets.bytes for s in manifest.shards)
    bound = parse_bytes(window, "window")
    scale = (
        Scale(tuple(manifest.scale["mean"]), tuple(manifest.scale["std"]))
        if manifest.scale
        else None
    )
    stored = tuple(manifest.inputs["shape"])
    crop = int(manifest.inputs.get("crop", stored[-1]))
    training = Augment(crop, augment, scale) if scale else None
    testing = Augment(crop, False, scale) if scale else None
    train, test = (
        ShardedSamples(folder, manifest, p, bound, c)
        for p, c in (("train", training), ("test", testing))
    )
    if verify == "yes" or (verify == "auto" and size <= VERIFY_BYTES):
        train.verify()
        test.verify()
    classes = manifest.targets["classes"]
    return Data(
        f"shards:{folder.name}",
        train,
        test if len(test) else None,
        (stored[0], crop, crop) if scale else stored,
        len(classes) if classes is not None else None,
        origin=_origin(manifest, train.infos),
    )


def _origin(manifest: Manifest, infos: list[ShardInfo]) -> dict[str, Any]:
    """Return where the data came from and how long its preparation took, for a run's record."""
    return {
        "name": manifest.name,
        "engine": manifest.engine,
        "master": manifest.master,
        "rows": {part: manifest.rows(part) for part in ("train", "test")},
        "shards": len(manifest.shards),
        "hosts": sorted({s.host for s in infos}),
        "counted_from_rows": manifest.counted_from_rows,
        "id": manifest.id,
        "content": (
            hashlib.sha256(
                "".join(s.inputs.sha256 + s.targets.sha256 for s in infos).encode()
            ).hexdigest()[:16]
        ),
        "report": manifest.report,
        "seconds": manifest.seconds,
    }
