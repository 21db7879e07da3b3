"""A rank's output, cut into lines."""

from __future__ import annotations

from collections.abc import Iterator

MOST_BYTES = 64 << 10  # of one line; a longer one is cut


class Lines:
    """Turns the bytes of one stream into lines of text.

    `is_error`: the standard error. `whole`: a line is never cut.
    """

    def __init__(self, is_error: bool = False, whole: bool = False) -> None:
        self.is_error, self._most = is_error, float("inf") if whole else MOST_BYTES
        self._begun = bytearray()  # a line without its end

    def add(self, part: bytes) -> Iterator[str]:
        """Add what was read, and give the lines that are whole by now."""
        self._begun += part
        *whole, last = bytes(self._begun).split(b"\n")
        self._begun = bytearray(last)
        yield from (_text(line) for line in whole)
        if len(self._begun) > self._most:
            yield from self.rest()

    def rest(self) -> Iterator[str]:
        """Give the line that never ended."""
        if self._begun:
            yield _text(bytes(self._begun))
            self._begun.clear()


def _text(line: bytes) -> str:
    """A line without what moves the cursor back: of a bar that is drawn anew its last state."""
    return line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]
