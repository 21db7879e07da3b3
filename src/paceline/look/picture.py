"""Parts of pictures for slides: text, arrow heads, a sheet of panels as SVG, an SVG as PNG."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from html import escape

from paceline.errors import PacelineError
from paceline.look.look import LIGHT

FONT = "system-ui, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
GAP = 36.0
TOP = 56.0  # the height of a sheet's heading
SCALE = 2.0  # pixels of a PNG per unit


def sheet(panels: Sequence[str], columns: int, size: tuple[float, float], heading: str) -> str:
    """Return an SVG of panels, all of one size, in rows below a heading."""
    wide, tall = size
    width = columns * wide + (columns + 1) * GAP
    height = TOP + math.ceil(len(panels) / columns) * (tall + GAP)
    parts = [text(GAP, 36, heading, 20, weight=700)]
    for number, panel in enumerate(panels):
        row, column = divmod(number, columns)
        x, y = GAP + column * (wide + GAP), TOP + row * (tall + GAP)
        parts.append(f'<g transform="translate({x:g} {y:g})">{panel}</g>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}"'
        f' viewBox="0 0 {width:g} {height:g}" font-family="{FONT}">'
        f"<defs>{arrow_head('head', LIGHT['soft'])}</defs>"
        f'<rect width="100%" height="100%" fill="{LIGHT["paper"]}"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def columns_for(panels: int) -> int:
    """How many panels stand in a row of a sheet."""
    return min(4, math.ceil(math.sqrt(panels)))


def arrow_head(name: str, colour: str) -> str:
    """Return a marker that ends lines with an arrow head."""
    return (
        f'<marker id="{name}" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="7"'
        f' markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" fill="{colour}"/></marker>'
    )


def text(
    x: float,
    y: float,
    words: str,
    size: float,
    ink: str = LIGHT["ink"],
    anchor: str = "start",
    weight: int = 400,
) -> str:
    """Return a line of text."""
    return (
        f'<text x="{x:.5g}" y="{y:.5g}" font-size="{size:g}" font-weight="{weight}"'
        f' text-anchor="{anchor}" fill="{ink}">{escape(words)}</text>'
    )


def wrapped(words: str, characters: int) -> list[str]:
    """Lines of about the same length: the narrowest that need no line more."""
    most = len(textwrap.wrap(words, characters))
    for width in range(20, characters):
        lines = textwrap.wrap(words, width)
        if len(lines) <= most:
            return lines
    return textwrap.wrap(words, characters)


def ink_on(colour: str) -> str:
    """Black or white: the colour of text on this colour."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#000000" if 0.299 * red + 0.587 * green + 0.114 * blue > 130 else "#ffffff"


def png(picture: str, scale: float = SCALE) -> bytes:
    """Return an SVG as PNG."""
    try:
        import vl_convert
    except ImportError as error:
        raise PacelineError(
            f"PNG needs vl-convert-python: pip install vl-convert-python ({error})"
        ) from None
    return bytes(vl_convert.svg_to_png(picture, scale=scale))
