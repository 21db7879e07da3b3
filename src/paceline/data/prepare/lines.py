"""Parse the lines of a CSV file to columns of text, the same way in every engine.

A record is always one line. A line is broken if its number of fields differs from the number of
columns. A quote counts only at the beginning of a field, and is doubled inside it. A quote that is
never closed would join the following lines to its own: if the parser returns fewer records than
lines, the lines are split in two halves and parsed again, down to the broken line. Bytes that are
not UTF-8 are replaced.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv

from paceline.data.prepare.columns import header, header_line
from paceline.data.prepare.recipe import Source
from paceline.errors import DataCorrupt

READ_BYTES = 1 << 24
TEXT = pa.string()
BOM = b"\xef\xbb\xbf"
BLANK = re.compile(rb"(?:^|\n)[ \t]*\n")


class Lines:
    """Parse the lines of one file to the wanted columns."""

    def __init__(self, source: Source, path: Path, wanted: Sequence[str]) -> None:
        self.source, self.wanted = source, list(wanted)
        self.names = list(source.columns) or header(path, source)
        self.head = b"" if source.columns else header_line(path, source).removeprefix(BOM)
        for name in wanted:
            if name not in self.names:
                raise DataCorrupt(f"{path} has no column {name!r}; it has {', '.join(self.names)}")

    def parse(self, content: bytes) -> tuple[Any, int]:
        """Return the wanted columns of complete lines, and the number of broken lines."""
        content = content.removeprefix(BOM)  # Spark has removed it already
        if (quick := self._quick(content)) is not None:
            return quick
        comment = self.source.comment.encode()
        lines = [line.removesuffix(b"\r") for line in content.split(b"\n")]
        kept = [
            x
            for x in lines
            if x.strip() and x != self.head and not (comment and x.startswith(comment))
        ]
        try:
            b"".join(kept).decode()
        except UnicodeDecodeError:
            kept = [line.decode("utf-8", "replace").encode() for line in kept]
        tables, broken = self._by_halves(kept)
        return pa.concat_tables(tables) if tables else self.empty(), broken

    def _quick(self, content: bytes) -> tuple[Any, int] | None:
        """Parse all lines at once. Return None if some line may need special treatment."""
        body = content.replace(b"\r\n", b"\n")
        body = body.removeprefix(self.head + b"\n") if self.head else body
        if not body.endswith(b"\n"):
            body += b"\n"
        odd = (
            b"\r" in body
            or BLANK.search(body)
            or self.source.comment
            or (self.head and self.head in body)
        )
        return None if odd else self._table(body, body.count(b"\n"))

    def _by_halves(self, lines: list[bytes]) -> tuple[list[Any], int]:
        if not lines:
            return [], 0
        found = self._table(b"\n".join(lines) + b"\n", len(lines))
        if found is not None:
            return [found[0]], found[1]
        if len(lines) == 1:
            return [], 1
        middle = len(lines) // 2
        first, second = self._by_halves(lines[:middle]), self._by_halves(lines[middle:])
        return first[0] + second[0], first[1] + second[1]

    def empty(self) -> Any:
        return pa.table({n: pa.array([], TEXT) for n in self.wanted})

    def _table(self, text: bytes, lines: int) -> tuple[Any, int] | None:
        """Parse the text. Return None if the number of records is not the number of lines."""
        refused = 0

        def refuse(row: Any) -> str:
            nonlocal refused
            refused += 1
            return "skip"

        try:
            table = pacsv.read_csv(
                pa.BufferReader(text),
                read_options=pacsv.ReadOptions(
                    column_names=self.names, use_threads=False, block_size=len(text) + 1
                ),
                parse_options=pacsv.ParseOptions(
                    delimiter=self.source.delimiter,
                    invalid_row_handler=refuse,
                    ignore_empty_lines=False,
                ),
                convert_options=pacsv.ConvertOptions(
                    column_types=dict.fromkeys(self.wanted, TEXT),
                    include_columns=self.wanted,
                    strings_can_be_null=False,
                    quoted_strings_can_be_null=False,
                ),
            )
        except pa.ArrowInvalid:
            return None
        return (table, refused) if table.num_rows + refused == lines else None


def complete_lines(path: Path, size: int = READ_BYTES) -> Iterator[bytes]:
    """Read a file in steps of about `size` bytes, each of complete lines."""
    try:
        with path.open("rb") as file:
            rest = b""
            while content := file.read(size):
                cut = content.rfind(b"\n") + 1
                if not cut:
                    rest += content
                    continue
                yield rest + content[:cut]
                rest = content[cut:]
            if rest:
                yield rest
    except OSError as error:
        raise DataCorrupt(f"{path} cannot be read: {error.strerror}") from None


def joined(lines: Any) -> bytes:
    """Join an Arrow array of lines to bytes."""
    offsets = pa.array([0, len(lines)], pa.int32())
    whole = pc.binary_join(pa.ListArray.from_arrays(offsets, lines.cast(pa.binary())), b"\n")
    return whole[0].as_py() or b""
