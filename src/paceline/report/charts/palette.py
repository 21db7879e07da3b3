"""One colour and one shape per series, the same in every chart.

The colours are from Paul Tol's "bright" and "vibrant" schemes. Readers with any kind of colour
vision can distinguish them, on white and on black. Series beyond the number of colours differ in
shape.
"""

from __future__ import annotations

import pkgutil
from functools import cache
from importlib.util import find_spec

SERIAL = "#888888"
COLOURS = (
    "#4477AA",
    "#EE7733",
    "#228833",
    "#CC3377",
    "#009988",
    "#CCAA22",
    "#33BBEE",
    "#AA55CC",
    "#EE6677",
    "#778833",
    "#5566EE",
)
SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down")
TOGETHER = "computing and exchange, not separated"
PARTS = {
    "compute": "#4477AA",
    "codec": "#228833",
    "sync": "#EE7733",
    "idle": "#BBBBBB",
    TOGETHER: "#AA55CC",
}


@cache
def _strategies() -> list[str]:
    """Return the strategies by the names of their files; to import them would import PyTorch."""
    found = find_spec("paceline.strategies")
    folders = found.submodule_search_locations if found else None
    return sorted(m.name.replace("_", "-") for m in pkgutil.iter_modules(folders or []))


def assign(series: list[str]) -> dict[str, tuple[str, str]]:
    """Return (colour, shape) by label.

    The first series of each strategy has that strategy's colour, the others have the free ones.
    """
    order = [name for name in _strategies() if name != "serial"]
    own = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(order)}
    taken: dict[str, str] = {}
    for label in series:
        name = label.split(",")[0].split(":")[0]
        if name in own and own[name] not in taken.values():
            taken[label] = own[name]
    free = [c for c in COLOURS if c not in taken.values()]
    found: dict[str, tuple[str, str]] = {}
    for i, label in enumerate(series):
        if label == "serial" or label.startswith("serial,"):
            colour = SERIAL
        elif label in taken:
            colour = taken[label]
        else:
            colour = free.pop(0) if free else COLOURS[i % len(COLOURS)]
        found[label] = (colour, SHAPES[i % len(SHAPES)])
    return found
