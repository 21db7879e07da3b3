"""One colour and one shape per series, the same in every chart.

The colours are from Paul Tol's "bright" and "vibrant" schemes. Readers with any kind of colour
vision can distinguish them, on white and on black. Series beyond the number of colours differ in
shape.
"""

from __future__ import annotations

from paceline.registry import strategies

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


def assign(series: list[str]) -> dict[str, tuple[str, str]]:
    """Return (colour, shape) by label.

    The first series of each strategy has that strategy's colour, the others have the free ones.
    """
    order = [name for name in strategies.names() if name != "serial"]
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
