"""Where data sets are looked for: what the person said, ./data, the user's cache, the
system's own.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from paceline.errors import DataUnavailable

SYSTEM = Path("/usr/share/datasets")


def cache_dir() -> Path:
    return Path(os.path.expanduser("~/.cache/paceline/data"))


def places(data_dir: str | None) -> Iterator[Path]:
    seen = set()
    for place in (Path(data_dir) if data_dir else None, Path("data"), cache_dir(), SYSTEM):
        if place is not None and place not in seen:
            seen.add(place)
            yield place


def find(name: str, data_dir: str | None, folders: Iterable[str], wanted: Iterable[str]) -> Path:
    """The first folder that has all the wanted files (or their .gz); a sentence that says what to
    do if there is none.
    """
    wanted = list(wanted)
    looked = []
    for place in places(data_dir):
        for folder in folders:
            here = place / folder
            looked.append(str(here))
            if all((here / f).exists() or (here / f"{f}.gz").exists() for f in wanted):
                return here
    raise DataUnavailable(
        f"{name} is not on this machine (looked in {', '.join(looked)}). Get it with: paceline data"
        f" fetch {name}   Without a network, try --data fashion-mini, which is built in."
    )
