"""Pieces of HTML: a document with everything inside, prose, tables."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from importlib.resources import files
from typing import Any


def document(title: str, body: str, data: dict[str, Any], library: str) -> str:
    """Return a page that needs no other file; `library` is the JavaScript that draws charts."""
    library = library.replace("</script", "<\\/script")
    content = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    folder = files("paceline.report.page")
    style, script = (folder.joinpath(name).read_text() for name in ("page.css", "page.js"))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{html.escape(title)}</title>
<style>
{style}</style>
</head>
<body>
{body}
<script type="application/json" id="data">{content}</script>
<script>{library}</script>
<script>{script}</script>
</body>
</html>
"""


def header(title: str, subtitle: str) -> str:
    """Return the head of the page, with a switch between light and dark; `subtitle` is HTML."""
    return (
        f"<header><div><h1>{html.escape(title)}</h1><p class=soft>{subtitle}</p></div>"
        "<button id=theme type=button>light / dark</button></header>"
    )


def prose(text: str) -> str:
    """Escape a sentence, with `names` set as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))


def code(text: str) -> str:
    return f"<code>{html.escape(text)}</code>"


def breakable(name: str) -> str:
    """Return the name of a setting as code; a line may end between its options."""
    return code(name).replace(",", ",<wbr>")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table; headings and cells are HTML."""
    titles = "".join(f"<th>{h}</th>" for h in head)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return (
        f"<div class=scroll><table><thead><tr>{titles}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
    )


def definitions(items: dict[str, str]) -> str:
    """Return a list of names and values."""
    pairs = (f"<dt>{prose(k)}</dt><dd>{html.escape(v)}</dd>" for k, v in items.items())
    return f"<dl>{''.join(pairs)}</dl>"


def options(names: Sequence[str], chosen: str) -> str:
    """Return the options of a select box."""
    return "".join(
        f"<option{' selected' if name == chosen else ''}>{html.escape(name)}</option>"
        for name in names
    )


def folded_json(summary: str, value: Any) -> str:
    """Return a value as JSON that the reader can unfold."""
    text = html.escape(json.dumps(value, indent=2))
    return f"<details><summary>{summary}</summary><pre><code>{text}</code></pre></details>"
