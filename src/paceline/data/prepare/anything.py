"""`paceline prepare WHAT` and `paceline.prepare(WHAT)`: a table, your own recipe, or images."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from paceline.data.manifest import Manifest
from paceline.data.prepare.recipe import Recipe, builtin
from paceline.errors import BadRequest

IMAGES = "imagefolder:"
NEEDS = (
    "preparing data needs pyarrow, Polars and, for Spark, pyspark: pip install"
    " 'paceline[data,spark]'"
)


def prepare(
    what: str | None = None,
    *,
    out: str | Path,
    recipe: str | Path | None = None,
    engine: str = "auto",
    master: str = "",
    shards: int = 4,
    data_dir: str | None = None,
    size: int = 0,
    persist: bool = True,
    force: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> Manifest:
    """Make shards for `data="shards:OUT"`, and return their manifest.

    paceline.prepare("flights", out="data/flights-shards")
    paceline.prepare(recipe="mine.toml", out="data/mine", engine="spark")
    paceline.prepare("imagefolder:photos", out="data/photos", size=224, shards=16)
    """
    if (what is None) == (recipe is None):
        names = ", ".join(builtin())
        raise BadRequest(f"prepare needs one of: a name ({names}), imagefolder:PATH, --recipe FILE")
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise BadRequest(NEEDS) from None
    if what is not None and what.startswith(IMAGES):
        from paceline.data.prepare.images import prepare_images

        return prepare_images(
            what.removeprefix(IMAGES), out, engine, master, shards, size, force, say
        )
    if size:
        raise BadRequest(f"--size {size} is for images: {what or recipe} is a table")
    from paceline.data.prepare.run import prepare as prepare_table

    made = Recipe.named(str(what), data_dir) if recipe is None else Recipe.read(recipe)
    return prepare_table(made, out, engine, master, shards, force, persist, say)
