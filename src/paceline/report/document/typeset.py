"""A report as a PDF, typeset by Typst.

    from paceline.report.document.typeset import write_pdf
    write_pdf("runs/study")                             # runs/study/report.pdf

The template reads the report as JSON, so nothing that comes from records is read as markup.
"""

from __future__ import annotations

import json
import re
from functools import reduce
from importlib.resources import files
from pathlib import Path
from typing import Any

from paceline.errors import BadRequest, PacelineError
from paceline.report.document.content import Document, Figure, read_document
from paceline.report.document.drawing import pixels, printed
from paceline.report.document.inline import CODE, Part, Text, clean, over, plain
from paceline.report.document.output import target, written
from paceline.report.document.tables import Table

INSTALL = "pip install 'paceline[pdf]'"
LONGEST = 14  # characters without a place where a line may end
PLACES = re.compile(r"(?<=[,:=/;&|])|(?<=\w[-_.+])")  # where a line may end inside a name


def write_pdf(folder: str | Path, file: str | Path | None = None) -> Path:
    """Write the report of a study, a run or a folder of runs as a PDF; return its path.

    The default is `report.pdf` in the folder.
    """
    path = target(folder, file, "report.pdf")
    written(path, pdf(read_document(folder)))
    return path


def pdf(document: Document) -> bytes:
    """Return a report as a PDF."""
    found = compiled(document, "pdf")
    assert isinstance(found, bytes)
    return found


def compiled(document: Document, form: str, **options: Any) -> bytes | list[bytes]:
    """Return a report in a format of Typst: pdf, or one PNG per page."""
    typst = library()
    template = files("paceline.report.document").joinpath("report.typ").read_bytes()
    try:
        found: bytes | list[bytes] = typst.compile(
            template, format=form, sys_inputs={"report": json.dumps(described(document))}, **options
        )
    except typst.TypstError as error:
        raise PacelineError(f"the report cannot be typeset: {error}") from None
    return found


def library() -> Any:
    """Return the module `typst`, which is an extra."""
    try:
        import typst
    except ImportError as error:
        raise BadRequest(f"a PDF needs typst: {INSTALL} ({error})") from None
    return typst


def described(document: Document) -> dict[str, Any]:
    """Return a report as the template reads it."""
    return {
        "title": clean(document.title),
        "question": clean(document.question),
        "facts": [[name, _parts(plain(value))] for name, value in document.facts],
        "answer": [_parts(sentence) for sentence in document.answer],
        "main": _table(document.main),
        "figures": [_figure(document, figure) for figure in document.figures],
        "remarks": [
            {
                "text": _parts(remark.text),
                "figures": [[_parts(k), _parts(v)] for k, v in remark.figures],
                "commands": list(remark.commands),
            }
            for remark in document.remarks
        ],
        "method": [[what, _parts(how)] for what, how in document.method],
        "more": [_table(table) for table in document.more],
        "commands": [command.strip() for command in document.commands],
        "environment": [[_parts(plain(k)), _parts(plain(v))] for k, v in document.environment],
        "options": [[_parts(plain(k)), _parts(plain(v))] for k, v in document.options],
        "made_by": document.made_by,
    }


def _figure(document: Document, figure: Figure) -> dict[str, Any]:
    svg = printed(document, figure)
    return {
        "svg": svg,
        "pixels": pixels(svg),
        "alt": clean(figure.chart.title),
        "caption": _parts(figure.caption),
    }


def _table(table: Table) -> dict[str, Any]:
    return {
        "title": table.title,
        "caption": _parts(table.caption),
        "head": [_parts(_heading(title)) for title in table.head],
        "kinds": table.kinds,
        "rows": [[_parts(cell) for cell in row] for row in table.rows],
        "notes": [_parts(note) for note in table.notes],
        "wide": table.wide,
    }


def _heading(title: str) -> Text:
    first, *rest = [plain(line) for line in title.split("\n")]
    return reduce(over, rest, first)


def _parts(text: Text) -> list[list[Any]]:
    """Return (style, pieces): a line may end between two pieces."""
    return [[part.style, _pieces(part)] for part in text]


def _pieces(part: Part) -> list[str]:
    """Cut what has no space at its punctuation, and elsewhere where it is long."""
    found = []
    for word in re.split(r"(?<= )", part.text):
        pieces = PLACES.split(word) if part.style == CODE or len(word) > 2 * LONGEST else [word]
        for piece in pieces:
            long = len(piece) > 2 * LONGEST
            found += (
                [piece[i : i + LONGEST] for i in range(0, len(piece), LONGEST)] if long else [piece]
            )
    return [piece for piece in found if piece]
