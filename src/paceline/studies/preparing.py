"""`[prepare]` of a study: make the shards that its runs train on, once, before the first run.

[prepare]
images = "mnist"               # written as PNG files first, as `paceline data export` does
most = 1500                    # images of each class, in each part
out = "data/digits"            # the runs use it by data = "shards:data/digits"
engine = "spark"               # and the other options of `paceline prepare`
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from paceline.data.export import export
from paceline.data.manifest import MANIFEST
from paceline.data.prepare.anything import prepare
from paceline.errors import BadRequest, UnknownName

TEXTS = ("images", "what", "recipe", "out", "engine", "master")
NUMBERS = ("most", "shards", "size")


def check(given: Mapping[str, Any]) -> None:
    """Refuse unknown names, wrong values, and a table that does not say what to prepare."""
    if not given:
        return
    for key, value in given.items():
        if key not in TEXTS + NUMBERS:
            raise UnknownName("option of [prepare]", key, [*TEXTS, *NUMBERS])
        kind = str if key in TEXTS else int
        if not isinstance(value, kind) or isinstance(value, bool) or value in ("", 0):
            words = "text" if key in TEXTS else "a whole number above 0"
            raise BadRequest(f"[prepare] {key} = {value!r}: write {words}")
    if not given.get("out") or sum(key in given for key in ("images", "what", "recipe")) != 1:
        raise BadRequest("[prepare] needs out, and one of images, what and recipe")
    if "most" in given and "images" not in given:
        raise BadRequest("[prepare] most belongs to images: leave it out")


def prepare_data(
    given: Mapping[str, Any], data_dir: str | None, say: Callable[[str], None]
) -> None:
    """Make the shards, unless they are there."""
    out = Path(str(given["out"]))
    if (out / MANIFEST).exists():
        return
    options = {k: v for k, v in given.items() if k not in ("images", "most", "out", "what")}
    what = given.get("what")
    if (images := given.get("images")) is not None:
        folder = out.with_name(f"{out.name}-images")
        if not folder.exists():
            say(f"writing images of {images} to {folder}")
            export(str(images), folder, data_dir, given.get("most"))
        what = f"imagefolder:{folder}"
    say(f"preparing {out} ({given.get('engine', 'auto')})")
    made = prepare(what, out=out, data_dir=data_dir, **options)
    hosts = ", ".join(sorted({str(shard.host) for shard in made.shards}))
    say(f"prepared {made.rows('train'):,} training rows in {out}, written on {hosts}")
