"""`shards:DIR`: arrays on disk that are mapped, not read. Opening costs nothing; a row is copied
when a batch takes it.
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
from paceline.data.manifest import PAGE, Manifest, Piece, ShardInfo, npy_header
from paceline.errors import BadRequest, DataCorrupt, DataUnavailable
from paceline.registry import sources

VERIFY_BYTES = 256 << 20  # checksums are compared by default up to here


@dataclass(frozen=True)
class Block:
    """Rows [start, stop) of a data set that are on one host."""

    start: int
    stop: int
    host: str = ""


class Mapped:
    """One array of a shard. The mapping is private, so that PyTorch may treat it as its own memory;
    nothing writes there.
    """

    def __init__(
        self, path: Path, piece: Piece, shape: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        self.path, self.shape = path, shape
        header = npy_header(np.dtype(str(dtype).removeprefix("torch.")), shape)
        try:
            with open(path, "rb") as file:
                if (size := path.stat().st_size) != piece.bytes:
                    raise DataCorrupt(
                        f"{path} is damaged: {size:,} bytes, of which the manifest says"
                        f" {piece.bytes:,}"
                    )
                if file.read(len(header)) != header:
                    raise DataCorrupt(
                        f"{path} is damaged: it does not begin as an array of {shape} {dtype} does"
                    )
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except FileNotFoundError:
            raise DataUnavailable(
                f"{path} is missing: the manifest names it. Is it on another host? Prepare the data"
                " again"
            ) from None
        except (OSError, ValueError) as error:
            raise DataCorrupt(f"{path} cannot be read: {error}") from None
        count = int(np.prod(shape))
        self.rows: Tensor = (
            torch.frombuffer(self._map, dtype=dtype, count=count, offset=PAGE)
            if count
            else torch.empty(0, dtype=dtype)
        ).view(shape)

    def verify(self, piece: Piece) -> None:
        if hashlib.sha256(self._map).hexdigest() != piece.sha256:
            raise DataCorrupt(
                f"{self.path} is damaged: its content is not what was written (SHA-256). Prepare"
                " the data again"
            )

    def will_need(self, start: int, stop: int) -> None:
        row = self.rows[0].nbytes if len(self.rows) else 0
        begin = (PAGE + start * row) // PAGE * PAGE
        if (length := PAGE + stop * row - begin) > 0:
            self._map.madvise(mmap.MADV_WILLNEED, begin, min(length, len(self._map) - begin))

    def let_go(self) -> None:
        """The pages leave this process; the system may keep them."""
        self._map.madvise(mmap.MADV_DONTNEED)


class ShardedSamples:
    """The rows of all shards of one part, one after the other.

    At most about `window_bytes` of them stay mapped into the process: what was touched longest ago
    is let go.
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
        self._touched, self._asked = 0, (-1, -1)
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
    def blocks(self) -> list[Block]:
        return [
            Block(start, start + s.rows, s.host)
            for start, s in zip(self.starts, self.infos, strict=True)
        ]

    def __len__(self) -> int:
        return self._stops[-1] if self._stops else 0

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("inputs", "targets")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """In another process, perhaps on another host: mapped anew."""
        self.__dict__.update(state)
        self.inputs, self.targets = self._open()

    def labels(self) -> Tensor | None:
        return torch.cat([t.rows for t in self.targets]) if self.dtypes[1] is torch.int64 else None

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """In the order of `indices`. Mostly they are of one shard: that is how an epoch goes
        through the data.
        """
        numbers = indices.numpy()
        low, high = int(numbers.min()), int(numbers.max())
        shard = bisect_right(self._stops, low)
        if high < self._stops[shard]:
            local = indices - self.starts[shard]
            self._ask(shard, low - self.starts[shard])
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
            self._touched += len(indices) * max(
                self.row_bytes, 16 * PAGE
            )  # a fault maps its neighbours too
            if self._touched > self.window_bytes:
                self.let_go()
        return (self.change(inputs) if self.change else inputs), targets

    def _ask(self, shard: int, row: int) -> None:
        """The first time that a window is touched, the system is told that the whole of it
        will be.
        """
        window = row // self.window_rows
        if self._asked != (shard, window):
            if self._asked[0] >= 0 and self._total > self.window_bytes:
                self.inputs[self._asked[0]].let_go()
            self._asked = (shard, window)
            start = window * self.window_rows
            self.inputs[shard].will_need(
                start, min(start + self.window_rows, self.infos[shard].rows)
            )

    def let_go(self) -> None:
        if self._total > self.window_bytes:
            for mapped in self.inputs:
                mapped.let_go()
        self._touched = 0


@sources.register("shards", positional="path")
def shards(
    path: Annotated[str, "the folder that `paceline prepare` wrote"] = "",
    window: Annotated[
        str, "rows are shuffled within so many bytes, and no more stay in memory"
    ] = "256MB",
    verify: Annotated[str, "compare checksums first: auto (up to 256 MB), yes, no"] = "auto",
    augment: Annotated[bool, "images: random crops and flips in training"] = True,
) -> Data:
    """Shards that `paceline prepare` made: mapped from disk, also where they are larger than
    memory.
    """
    if not path:
        raise BadRequest("shards:DIR: which folder? paceline prepare flights --out DIR makes one")
    folder = Path(path)
    if not folder.is_dir():
        raise DataUnavailable(
            f"shards:{path}: there is no such folder; make it with: paceline prepare flights --out"
            f" {path}"
        )
    if verify not in ("auto", "yes", "no"):
        raise BadRequest(f"shards: verify={verify}: auto, yes or no")
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
    """For a run's record: where its data came from, and what that took."""
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
