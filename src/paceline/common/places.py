"""Where Paceline keeps its caches, and where it looks for data sets."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from paceline.errors import DataUnavailable

SYSTEM = Path("/usr/share/datasets")


def cache_folder(name: str) -> Path:
    """Return the user's cache folder for one purpose: `data`, `native`, `pages`, `java-25`.

    On Linux it is below $XDG_CACHE_HOME/paceline, or ~/.cache/paceline where that is not set. The
    folder need not exist.
    """
    from platformdirs import user_cache_path  # takes a while to import, and few commands need it

    return user_cache_path("paceline", appauthor=False) / name


def places(data_dir: str | None) -> Iterator[Path]:
    """Yield the folders to search for data sets, in order and each once.

    They are the user's `data_dir`, ./data, the user's cache, the cache of earlier versions (which
    did not follow XDG_CACHE_HOME), and the system's folder.
    """
    found = (
        *((Path(data_dir),) if data_dir else ()),
        Path("data"),
        cache_folder("data"),
        Path(os.path.expanduser("~/.cache/paceline/data")),
        SYSTEM,
    )
    yield from dict.fromkeys(found)


def find(name: str, data_dir: str | None, folders: Iterable[str], wanted: Iterable[str]) -> Path:
    """Return the first folder that has all the wanted files, or their .gz.

    Where there is none, `DataUnavailable` says where it looked and how to get the data set.
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
