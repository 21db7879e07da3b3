"""A report as Markdown, with its charts as SVG files beside it.

    from paceline.report.document.markdown import write_markdown
    write_markdown("runs/study")                        # runs/study/report.md

The tables are those of GitHub's dialect. Nothing that comes from records is read as markup.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import indent
from urllib.parse import quote

from paceline.report.document.content import Document, Figure, Remark, read_document
from paceline.report.document.drawing import draw_missing
from paceline.report.document.inline import CODE, STRONG, Part, Text, clean, plain
from paceline.report.document.output import target, written
from paceline.report.document.tables import NUMBER, Table

SPECIAL = re.compile(r"([\\`*_\[\]<>#|$~&@])")
ENTITIES = {"|": "&#124;", "`": "&#96;", "\\": "&#92;"}  # no dialect reads these as markup
LEADING = re.compile(r"^([-+](?=\s|$|--)|\d+(?=[.)](?:\s|$)))")  # a list, a rule


def write_markdown(folder: str | Path, file: str | Path | None = None) -> Path:
    """Write the report of a study, a run or a folder of runs as Markdown; return its path.

    The default is `report.md` in the folder, with the charts in `figures/`. Beside a file in
    another folder, they are in a folder of the file's name.
    """
    path = target(folder, file, "report.md")
    found = read_document(folder)
    inside = path.parent.resolve() == Path(folder).resolve()
    figures = "figures" if inside else f"{path.stem}_figures"
    draw_missing(found, path.parent / figures)
    written(path, markdown(found, figures))
    return path


def markdown(document: Document, figures: str = "figures") -> str:
    """Return a report as Markdown; `figures` is the folder of the charts, as links name it."""
    numbers = iter(range(1, 1000))
    blocks = [
        f"# {escaped(clean(document.title))}",
        *([f"*{escaped(clean(document.question))}*"] if clean(document.question) else []),
        "\n".join(f"- **{name}:** {escaped(clean(value))}" for name, value in document.facts),
        "## Answer",
        *(inline(sentence) for sentence in document.answer),
        *_table(document.main, next(numbers)),
        *(["## Charts"] if document.figures else []),
        *(_figure(figure, i, figures) for i, figure in enumerate(document.figures, 1)),
        *(["## What the runs show"] if document.remarks else []),
        "\n".join(_remark(remark) for remark in document.remarks),
        "## How it was measured",
        *(f"**{what}.** {inline(how)}" for what, how in document.method),
        *(b for table in document.more for b in _section(table, next(numbers))),
        "## To repeat it",
        *(fenced(command) for command in document.commands),
        *_pairs(document.environment, "machine", "value"),
        *_pairs(document.options, "option", "value"),
        f"{escaped(document.made_by)} made this report from the records of the runs.",
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


def inline(text: Text) -> str:
    """Return text with its markup, for a line or a cell of a table."""
    return "".join(_part(part) for part in text)


def escaped(text: str) -> str:
    """Return text that no dialect of Markdown reads as markup."""
    found = SPECIAL.sub(lambda m: ENTITIES.get(m[1], "\\" + m[1]), text)
    return LEADING.sub(lambda m: f"&#{ord(m[1][0])};{m[1][1:]}", found)


def _part(part: Part) -> str:
    if part.style == CODE and part.text.strip() and not set(part.text) & set("|`"):
        return f"`{part.text}`"
    if part.style == STRONG:
        return f"**{escaped(part.text)}**"
    return escaped(part.text)


def fenced(text: str) -> str:
    """Return text as a block of code, whatever it holds."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{text.strip()}\n{fence}"


def _table(table: Table, number: int) -> Iterator[str]:
    yield f"**Table {number}.** {inline(table.caption)}"
    yield _rows(table.head, table.rows, [kind == NUMBER for kind in table.kinds])
    yield from (inline(note) for note in table.notes)


def _section(table: Table, number: int) -> Iterator[str]:
    yield f"## {table.title}"
    yield from _table(table, number)


def _rows(head: Sequence[str], rows: Sequence[Sequence[Text]], right: Sequence[bool]) -> str:
    lines = [
        "| " + " | ".join(escaped(clean(h)) for h in head) + " |",
        "|" + "|".join("---:" if r else "---" for r in right) + "|",
        *("| " + " | ".join(inline(cell) for cell in row) + " |" for row in rows),
    ]
    return "\n".join(lines)


def _pairs(pairs: Sequence[tuple[str, str]], name: str, value: str) -> Iterator[str]:
    if pairs:
        yield _rows((name, value), [(plain(k), plain(v)) for k, v in pairs], (False, False))


def _figure(figure: Figure, number: int, folder: str) -> str:
    name = f"{quote(folder)}/{quote(figure.chart.name)}.svg"
    title = escaped(clean(figure.chart.title))
    return f"![{title}]({name})\n\n**Figure {number}.** {inline(figure.caption)}"


def _remark(remark: Remark) -> str:
    figures = "; ".join(f"{inline(k)}: {inline(v)}" for k, v in remark.figures)
    told = [f"- {inline(remark.text)}", *([f"  - {figures}"] if figures else [])]
    commands = [indent(fenced(command), "  ") for command in remark.commands]
    return "\n".join([*told, *(f"\n{command}\n" for command in commands)])
