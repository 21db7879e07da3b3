"""A page that plays something on a clock: one HTML file without a network, a framework or a server.

`paceline explain` plays collectives, timetables and split models so. A page gives its own styles,
script and data; controls, keys and the clock are here (player.html, player.css, player.js).
"""

from __future__ import annotations

import json
from html import escape
from importlib.resources import files
from typing import Any

from paceline.look.look import css


def player(
    title: str,
    command: str,
    data: dict[str, Any],
    *,
    script: str,
    style: str = "",
    lead: str = "",
    clocks: str = "",
    body: str = "",
) -> str:
    """Return the page. `title` and `command` are text; `lead`, `clocks` and `body` are HTML.

    `script` runs after player.js: it makes panels of `data` and calls `begin(panels)`.
    """
    page = _read("player.html")
    for mark, text in {
        "TITLE": escape(title),
        "COMMAND": escape(command),
        "LEAD": lead,
        "CLOCKS": clocks,
        "BODY": body,
        "CSS": css() + _read("player.css") + style,
        "SCRIPT": _read("player.js") + script,
        "DATA": json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
    }.items():
        page = page.replace(f"@{mark}@", text)
    return page


def _read(name: str) -> str:
    return files("paceline.look").joinpath(name).read_text("utf-8")
