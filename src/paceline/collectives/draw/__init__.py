"""Draws schedules: in the terminal, as pictures (SVG, PNG), as a page that plays them.

from paceline.collectives.base import schedule_of
from paceline.collectives.draw import html, svg

Path("ring.html").write_text(html(schedule_of("ring", 4), schedule_of("tree", 4)))
Path("ring.svg").write_text(svg(schedule_of("ring", 4)))
"""

from paceline.collectives.draw.frames import Frame, contributions, describe, frames, title
from paceline.collectives.draw.page import html
from paceline.collectives.draw.picture import step_pictures, svg
from paceline.collectives.draw.scene import MOST_CHUNKS, MOST_RANKS
from paceline.look.picture import png

__all__ = [
    "MOST_CHUNKS",
    "MOST_RANKS",
    "Frame",
    "contributions",
    "describe",
    "frames",
    "html",
    "png",
    "step_pictures",
    "svg",
    "title",
]
