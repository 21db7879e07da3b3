"""Pack a folder of images into shards, in parallel: decode, resize and crop each image once.

Images larger than 64 pixels are stored with a margin of an eighth, for random crops in training.
"""

from __future__ import annotations

import platform
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np

from paceline.common.cores import cores
from paceline.data.imagefolder import SCALE, Listing, decode
from paceline.data.manifest import Manifest, Preparation, ShardInfo, ShardWriter
from paceline.data.prepare.report import as_text
from paceline.errors import BadRequest, DataCorrupt, UnknownName
from paceline.spark.master import usual_master
from paceline.spark.session import Session, as_sentence

Say = Callable[[str], None]
ENGINES = ("auto", "local", "spark")
SMALL = 64  # pixels: images up to this size get no margin; training pads them
AT_A_TIME = 64  # images
TELL_EVERY_S = 1.0


@dataclass(frozen=True)
class Portion:
    """The images of one shard."""

    part: str
    number: int
    files: tuple[str, ...]
    labels: tuple[int, ...]


def pack(portion: Portion, folder: Path, id: str, size: int) -> tuple[ShardInfo, list[str]]:
    """Write a shard of images. Return it, and the files that could not be decoded."""
    broken = []
    with ShardWriter(
        folder, id, portion.part, portion.number, None, (3, size, size), ("uint8", "int64")
    ) as writer:
        for start in range(0, len(portion.files), AT_A_TIME):
            images, labels = [], []
            for name, label in zip(
                portion.files[start : start + AT_A_TIME], portion.labels[start:], strict=False
            ):
                try:
                    images.append(decode(Path(name), size))
                    labels.append(label)
                except DataCorrupt:
                    broken.append(name)
            if images:
                writer.write(np.stack(images), np.asarray(labels, dtype=np.int64))
        return writer.close(), broken


def prepare_images(
    path: str,
    out: str | Path,
    engine: str = "auto",
    master: str = "",
    shards: int = 4,
    size: int = 0,
    force: bool = False,
    say: Say = lambda _: None,
) -> Manifest:
    if engine not in ENGINES:
        raise UnknownName("engine for images", engine, ENGINES)
    if not 1 <= shards <= 99_999:
        raise BadRequest(f"shards={shards}: 1 to 99,999")
    if engine == "auto":
        engine = "spark" if master else "local"
        say(
            f"engine {engine}: "
            + (
                f"a master is given, {master}"
                if master
                else "the cores of one machine decode images as fast as it reads them"
            )
        )
    if engine == "local" and master:
        raise BadRequest(f"--master {master} needs Spark: leave it out, or use --engine spark")
    if engine == "spark":  # executors have another working folder
        path = str(Path(path).expanduser().absolute())
    listing = Listing.read(path, size)
    stored = listing.size if listing.size <= SMALL else listing.size * 8 // 7
    portions = _portions(listing, shards)
    began = time.perf_counter()
    where = usual_master(master) if engine == "spark" else ""
    say(
        f"packing {len(listing.train[0]) + len(listing.test[0]):,} images of {len(listing.classes)}"
        " classes"
    )
    with Preparation(out, force) as made:
        work = partial(pack, folder=made.folder, id=made.id, size=stored)
        found = (
            _by_spark(portions, work, where, say)
            if engine == "spark"
            else _here(portions, work, say)
        )
        broken = [name for _, names in found for name in names]
        manifest = Manifest(
            kind="images",
            name=f"imagefolder:{Path(path).name}",
            engine=engine,
            master=where,
            inputs={"dtype": "uint8", "shape": [3, stored, stored], "crop": listing.size},
            targets={"dtype": "int64", "classes": listing.classes},
            shards=[info for info, _ in found],
            report=_report(listing, broken),
            seconds={"write": round(time.perf_counter() - began, 4)},
            scale={"mean": list(SCALE.mean), "std": list(SCALE.std)},
            machine={"host": socket.gethostname(), "python": platform.python_version()},
        )
        if not manifest.rows("train"):
            raise DataCorrupt(
                f"{path}: none of its {len(broken):,} training images can be read (the first is"
                f" {broken[0]})"
            )
        made.finish(manifest, as_text(manifest))
    return manifest


def _portions(listing: Listing, shards: int) -> list[Portion]:
    portions = []
    for part, (files, labels), count in (
        ("train", listing.train, shards),
        ("test", listing.test, max(1, shards // 4)),
    ):
        for number in range(count if files else 0):
            own = [str(f) for f in files[number::count]]
            portions.append(Portion(part, number, tuple(own), tuple(labels[number::count])))
    return portions


def _here(
    portions: list[Portion], work: Callable[[Portion], tuple[ShardInfo, list[str]]], say: Say
) -> list[tuple[ShardInfo, list[str]]]:
    """Pack the shards in threads: decoding and resizing release Python's global lock."""
    found = []
    with ThreadPoolExecutor(max_workers=cores()) as pool:
        for done, result in enumerate(pool.map(work, portions), start=1):
            found.append(result)
            say(f"packed {done} of {len(portions)} shards")
    return found


def _by_spark(
    portions: list[Portion],
    work: Callable[[Portion], tuple[ShardInfo, list[str]]],
    master: str,
    say: Say,
) -> list[tuple[ShardInfo, list[str]]]:
    def packed(portion: Portion) -> tuple[dict[str, object], list[str]]:
        info, broken = work(portion)
        return asdict(info), broken

    with (
        Session(master, "paceline prepare images") as session,
        as_sentence(session),
        _telling(session.progress, say),
    ):
        found = (
            session.spark.sparkContext.parallelize(portions, len(portions)).map(packed).collect()
        )
    return [(ShardInfo.from_dict(info), names) for info, names in found]


@contextmanager
def _telling(progress: Callable[[], str], say: Say) -> Iterator[None]:
    """Report Spark's progress once a second."""
    over = threading.Event()

    def tell() -> None:
        while not over.wait(TELL_EVERY_S):
            if (far := progress()) and not over.is_set():
                say(f"packing: {far}")

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        over.set()
        teller.join(TELL_EVERY_S)


def _report(listing: Listing, broken: list[str]) -> dict[str, object]:
    gone = set(broken)
    classes = {name: {"train": 0, "test": 0} for name in listing.classes}
    for part, (files, labels) in (("train", listing.train), ("test", listing.test)):
        for file, label in zip(files, labels, strict=True):
            if str(file) not in gone:
                classes[listing.classes[label]][part] += 1
    images = len(listing.train[0]) + len(listing.test[0])
    return {
        "rows_in": images,
        "broken_lines": 0,
        "broken_lines_of_joined_tables": 0,
        "bad_numbers": 0,
        "dropped": (
            [
                {
                    "why": f"not an image that can be read ({Path(broken[0]).name}, ...)",
                    "rows": len(broken),
                }
            ]
            if broken
            else []
        ),
        "rows_kept": images - len(broken),
        "missing": {},
        "classes": classes,
        "constant_columns": [],
    }
