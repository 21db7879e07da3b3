"""Pieces of HTML: a document with everything inside, templates, prose, tables.

A page is put together from templates (`templates/`, Jinja2 with autoescape) and from these pieces.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from paceline.look import css


@cache
def _templates() -> Environment:
    found = Environment(
        loader=PackageLoader("paceline.report.page"), autoescape=True, undefined=StrictUndefined
    )
    found.filters["prose"] = lambda text: Markup(prose(text))
    found.filters["setting"] = lambda name: Markup(breakable(name))
    found.filters["answer"] = lambda text: Markup(emphasised(text))
    return found


def fill(template: str, **values: Any) -> Markup:
    """Return a template, filled; strings are escaped, `Markup` is not."""
    return Markup(_templates().get_template(template).render(values))


def document(title: str, body: str, data: dict[str, Any], library: str) -> str:
    """Return a page that needs no other file; `library` is the JavaScript that draws charts."""
    folder = files("paceline.report.page")
    style, script = (folder.joinpath(name).read_text() for name in ("page.css", "page.js"))
    content = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return str(
        fill(
            "document.html",
            title=title,
            style=Markup(css() + style),
            body=Markup(body),
            data=Markup(content),
            library=Markup(library.replace("</script", "<\\/script")),
            script=Markup(script),
        )
    )


def header(title: str, subtitle: str, links: Sequence[tuple[str, str]] = ()) -> str:
    """Return the head of the page, with a switch between light and dark, and links to sections.

    `subtitle` is HTML.
    """
    return str(fill("header.html", title=title, subtitle=Markup(subtitle), links=links))


def links_in(body: str) -> list[tuple[str, str]]:
    """Return (id, title) of the sections of a page that have both."""
    found = re.findall(r'<section[^>]*?\bid="?([\w-]+)"?[^>]*>\s*<h2>(.*?)</h2>', body)
    return [(name, html.unescape(title)) for name, title in found]


def slug(title: str) -> str:
    """`Where the time goes` -> `where-the-time-goes`"""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def prose(text: str) -> str:
    """Escape a sentence, with `names` set as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))


def emphasised(text: str) -> str:
    """Return a sentence of the answer: names stand out, and so does `1.55x as fast as serial`."""
    marked = re.sub(r"(\d[\d.]*x(?: and \d[\d.]*x)* as fast as serial)", r"<b>\1</b>", prose(text))
    return re.sub(r"\((95% interval .*?)\)", r"<small>(\1)</small>", marked)


def code(text: str) -> str:
    return f"<code>{html.escape(text)}</code>"


def breakable(name: str) -> str:
    """Return the name of a setting as code; a line may end between its options."""
    return code(name).replace(",", ",<wbr>").replace(":", ":<wbr>")


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


def command_box(command: str) -> str:
    """Return a command with a button that copies it."""
    shown = f"<code>{html.escape(command)}</code>"
    return f"<div class=command>{shown}<button type=button data-copy=command>copy</button></div>"


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
