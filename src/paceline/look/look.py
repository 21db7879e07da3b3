"""Reads the shared style sheet: `css` returns it, `WORKERS` and `LIGHT` are its colours."""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files


@cache
def css() -> str:
    """Return the shared style sheet (look.css), for inlining into a page."""
    return files("paceline.look").joinpath("look.css").read_text("utf-8")


def _variables(text: str) -> dict[str, str]:
    """The colours that the first block of the style sheet declares, by name."""
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", text.partition("}")[0]))


LIGHT = _variables(css())  # the colours of the light theme: LIGHT["ink"]
# One colour per worker, the same in every picture. Readers with any kind of colour vision can tell
# the sixteen apart (tests/unit/test_look.py); the first ones differ most.
WORKERS = tuple(LIGHT[f"worker-{number}"] for number in range(16))


def worker(rank: int) -> str:
    """Return a worker's colour. Worker 16 has the colour of worker 0 again."""
    return WORKERS[rank % len(WORKERS)]
