"""A folder of shards: array files that workers map into memory, and a manifest of them.

DIR/
  train-00000-ID.inputs.npy    rows x shape; a NumPy file whose data begins at a page boundary
  train-00000-ID.targets.npy   rows; ID names one preparation
  test-00000-ID...
  manifest.json                written last; a folder without it is unfinished, and is not read
  report.md                    rows that were read, rows that were dropped and why, rows that remain

A shard is written to a temporary file, flushed to the disk and renamed, so no half of a shard is
ever visible. Its bytes depend on its rows only: two attempts at the same task write the same bytes,
even at the same time.
"""

from __future__ import annotations

import errno
import hashlib
import json
import re
import secrets
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.common.files import name_aside, rename_whole, write_whole
from paceline.common.locks import try_lock
from paceline.errors import BadRequest, DataCorrupt, DataUnavailable, PacelineError, RunFailed

MANIFEST = "manifest.json"
SHARD = r"(?:train|test)-\d{5}-[0-9a-f]{8}\.(?:inputs|targets)\.npy"
OWN = re.compile(
    rf"{SHARD}|\.{SHARD}\.[0-9a-f]+\.part|\.manifest\.json\.[0-9a-f]+\.part"
    r"|manifest\.json|report\.md|\.lock"
)
SCHEMA = 1
PAGE = 4096


@dataclass(frozen=True)
class ArrayFile:
    """One array of one shard."""

    file: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class ShardInfo:
    """A shard of one part of the data, with the host that wrote it."""

    part: str  # train or test
    number: int
    rows: int
    host: str
    inputs: ArrayFile
    targets: ArrayFile

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ShardInfo:
        """Return the shard that `dataclasses.asdict` described."""
        files = {name: ArrayFile(**values[name]) for name in ("inputs", "targets")}
        return cls(**{**values, **files})


@dataclass
class Manifest:
    """What manifest.json holds."""

    kind: str  # table or images
    name: str
    engine: str
    master: str
    inputs: dict[str, Any]  # dtype, shape
    targets: dict[str, Any]  # dtype, classes (None: numbers)
    shards: list[ShardInfo]
    # How each column is encoded, with its statistics or its vocabulary.
    columns: list[dict[str, Any]] = field(default_factory=list)
    # Statistics or a vocabulary come from the training part, not from the recipe.
    counted_from_rows: bool = False
    report: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    # Mean and std per channel, with which the bytes of images are normalised.
    scale: dict[str, list[float]] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    id: str = ""  # of the preparation that made it

    def of(self, part: str) -> list[ShardInfo]:
        return sorted((s for s in self.shards if s.part == part), key=lambda s: s.number)

    def rows(self, part: str) -> int:
        return sum(s.rows for s in self.of(part))

    def described(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            **asdict(self),
            "rows": {part: self.rows(part) for part in ("train", "test")},
        }

    def write(self, folder: Path) -> None:
        content = json.dumps(self.described(), indent=1)
        try:
            write_whole(folder / MANIFEST, content, durable=True)
        except OSError as error:
            raise RunFailed(_cannot_write(folder / MANIFEST, error)) from None

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        path = folder / MANIFEST
        try:
            content = json.loads(path.read_text())
        except FileNotFoundError:
            if folder.is_dir() and any(folder.glob("*.npy")):
                raise DataCorrupt(
                    f"{folder} has shards but no {MANIFEST}: its preparation did not finish; run it"
                    " again"
                ) from None
            raise DataUnavailable(
                f"{folder} has no {MANIFEST}: make shards with: paceline prepare flights --out"
                f" {folder}"
            ) from None
        except (OSError, ValueError) as error:
            raise DataCorrupt(f"{path} cannot be read: {error}") from None
        if not isinstance(content, dict) or content.get("schema") != SCHEMA:
            raise DataCorrupt(
                f"{path} is not a manifest of this version of Paceline: prepare the data again"
            )
        try:
            rows = content.pop("rows")
            content.pop("schema")
            content["shards"] = [ShardInfo.from_dict(s) for s in content["shards"]]
            found = cls(**content)
            found._check(rows)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise DataCorrupt(f"{path} is damaged: {error}. Prepare the data again") from None
        return found

    def _check(self, rows: dict[str, int]) -> None:
        """Check all values that are used later. Raises ValueError, TypeError or KeyError."""
        np.dtype(self.inputs["dtype"]), np.dtype(self.targets["dtype"])
        shape, classes = self.inputs["shape"], self.targets["classes"]
        if not isinstance(shape, list) or not all(isinstance(n, int) and n > 0 for n in shape):
            raise ValueError(f"shape {shape!r}")
        if classes is not None and not isinstance(classes, list):
            raise ValueError(f"classes {classes!r}")
        if self.scale and not all(isinstance(self.scale[k], list) for k in ("mean", "std")):
            raise ValueError(f"scale {self.scale!r}")
        if not all(isinstance(held, dict) for held in (self.report, self.seconds)):
            raise ValueError("`report` and `seconds` must be tables")
        places = [(s.part, s.number) for s in self.shards]
        if len(set(places)) != len(places) or not {s.part for s in self.shards} <= {
            "train",
            "test",
        }:
            raise ValueError("a shard is listed twice, or its part is not train or test")
        for shard in self.shards:
            if not isinstance(shard.rows, int) or shard.rows < 0:
                raise ValueError(f"{shard.rows!r} rows")
            for array in (shard.inputs, shard.targets):
                if not re.fullmatch(SHARD, str(array.file)) or not isinstance(array.bytes, int):
                    raise ValueError(f"{array.file!r} is not the name of a shard's file")
        if any(self.rows(part) != count for part, count in rows.items()):
            raise ValueError("the rows of its shards do not add up")


class Preparation:
    """Replace the shards of a folder, while a lock keeps other preparations out.

    New shards are written beside the old ones, then the new manifest replaces the old one, then the
    old shards are deleted.
    """

    def __init__(self, out: str | Path, force: bool) -> None:
        self.folder, self.force, self.id = Path(out).resolve(), force, secrets.token_hex(4)

    def __enter__(self) -> Preparation:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = try_lock(self.folder / ".lock")
            there = [p.name for p in self.folder.iterdir()]
        except OSError as error:
            raise BadRequest(f"out={self.folder} cannot be used: {error.strerror}") from None
        if lock is None:
            raise BadRequest(f"out={self.folder}: another preparation is writing there")
        self._lock = lock
        others = [name for name in there if not OWN.fullmatch(name)]
        if others:
            self._lock.release()
            raise BadRequest(
                f"out={self.folder} has other files in it ({others[0]}, ...): choose an empty or a"
                " new folder"
            )
        if MANIFEST in there and not self.force:
            self._lock.release()
            raise BadRequest(
                f"out={self.folder} holds shards already: choose another folder, or replace them"
                " with --force"
            )
        return self

    def finish(self, manifest: Manifest, report: str) -> None:
        manifest.id = self.id
        manifest.write(self.folder)
        try:
            (self.folder / "report.md").write_text(report)
        except OSError as error:
            raise RunFailed(_cannot_write(self.folder / "report.md", error)) from None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Delete the shards that the manifest does not name: old ones, or those of a failure."""
        named = {MANIFEST, "report.md", ".lock"}
        with suppress(PacelineError):
            named |= {
                array.file
                for s in Manifest.read(self.folder).shards
                for array in (s.inputs, s.targets)
            }
        if not (self.folder / MANIFEST).exists():
            named.discard("report.md")
        for path in self.folder.iterdir():
            if path.name not in named and OWN.fullmatch(path.name):
                with suppress(OSError):
                    path.unlink()
        self._lock.release()


class ArrayWriter:
    """Write a .npy file batch by batch to a temporary file, and rename it when it is complete."""

    def __init__(self, path: Path, dtype: str, rows: int | None, shape: Sequence[int]) -> None:
        self.path, self.expected, self.shape, self.dtype = path, rows, tuple(shape), np.dtype(dtype)
        self.aside = name_aside(path)
        self.rows, self._hash, self._bytes = 0, hashlib.sha256(), 0
        try:
            self._file = open(self.aside, "w+b")  # noqa: SIM115
            self._put(npy_header(self.dtype, (rows or 0, *self.shape)))
        except OSError as error:
            self.give_up()
            raise RunFailed(_cannot_write(path, error)) from None

    def write(self, rows: npt.NDArray[Any]) -> None:
        try:
            self._put(
                np.ascontiguousarray(rows, dtype=self.dtype).data.cast("B") if rows.size else b""
            )
        except OSError as error:
            self.give_up()
            raise RunFailed(_cannot_write(self.path, error)) from None
        self.rows += len(rows)

    def _put(self, content: Any) -> None:
        self._file.write(content)
        self._hash.update(content)
        self._bytes += len(content)

    def close(self) -> ArrayFile:
        if self.expected is not None and self.rows != self.expected:
            self.give_up()
            raise RunFailed(
                f"{self.path.name}: {self.rows} rows were written, but {self.expected} were counted"
                " before: the source has changed meanwhile"
            )
        try:
            if self.expected is None:
                self._amend()
            self._file.close()
            rename_whole(self.aside, self.path)
        except OSError as error:
            self.give_up()
            raise RunFailed(_cannot_write(self.path, error)) from None
        return ArrayFile(self.path.name, self._bytes, self._hash.hexdigest())

    def _amend(self) -> None:
        """Write the header again, with the number of rows, and hash the whole file."""
        self._file.seek(0)
        self._file.write(npy_header(self.dtype, (self.rows, *self.shape)))
        self._file.seek(0)
        self._hash = hashlib.file_digest(self._file, "sha256")

    def give_up(self) -> None:
        with suppress(OSError, AttributeError):
            self._file.close()
        with suppress(OSError):
            self.aside.unlink()


class ShardWriter:
    """Write both arrays of a shard. `rows` is None if their number is not known yet."""

    def __init__(
        self,
        folder: Path,
        id: str,
        part: str,
        number: int,
        rows: int | None,
        shape: Sequence[int],
        dtypes: tuple[str, str],
    ) -> None:
        self.part, self.number = part, number
        stem = f"{part}-{number:05d}-{id}"
        try:
            folder.mkdir(parents=True, exist_ok=True)  # an executor's host may not have it yet
        except OSError as error:
            raise RunFailed(_cannot_write(folder, error)) from None
        self.inputs = ArrayWriter(folder / f"{stem}.inputs.npy", dtypes[0], rows, shape)
        self.targets = ArrayWriter(folder / f"{stem}.targets.npy", dtypes[1], rows, ())

    def write(self, inputs: npt.NDArray[Any], targets: npt.NDArray[Any]) -> None:
        self.inputs.write(inputs)
        self.targets.write(targets)

    def close(self) -> ShardInfo:
        rows = self.inputs.rows
        return ShardInfo(
            self.part,
            self.number,
            rows,
            socket.gethostname(),
            self.inputs.close(),
            self.targets.close(),
        )

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.inputs.give_up()
        self.targets.give_up()


def npy_header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """Return a header of NumPy's format 1.0, padded so that the data begins at a page boundary."""
    text = repr(
        {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    ).encode()
    return b"\x93NUMPY\x01\x00" + (PAGE - 10).to_bytes(2, "little") + text.ljust(PAGE - 11) + b"\n"


def _cannot_write(path: Path, error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"{path} cannot be written: {error.strerror}. The unfinished files are deleted"
    return f"{path} cannot be written: {error.strerror or error}"
