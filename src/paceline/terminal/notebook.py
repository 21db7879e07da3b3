"""The live bar of a run in a notebook: one line of text that IPython's display replaces.

`rich` draws its bar with ipywidgets, which many notebooks do not have.
"""

from __future__ import annotations

import time
from typing import Any

WIDTH = 24
REFRESH_S = 0.2


class NotebookBar:
    """Shows the progress of a run below a cell, without widgets."""

    def __init__(self, label: str) -> None:
        self.label, self._shown, self._last = label, "", 0.0
        self._began = time.monotonic()
        self._id: Any = None

    def update(self, done: int, total: int | None, words: str, force: bool = False) -> None:
        """Show how far the run is; at most five times a second unless `force` is given."""
        now = time.monotonic()
        if not force and now - self._last < REFRESH_S:
            return
        self._last = now
        text = f"{self.label} {bar(done, total)} {words}{left(now - self._began, done, total)}"
        if text != self._shown:
            self._shown = text
            self._display(text.rstrip())

    def _display(self, text: str) -> None:
        from IPython.display import display  # it is there: this process is a notebook's kernel

        content = {"text/plain": text}
        if self._id is None:
            self._id = display(content, raw=True, display_id=True)
        else:
            self._id.update(content, raw=True)


def bar(done: int, total: int | None) -> str:
    """`━━━━━━━━────── 120/400`, or the number of steps where the end is not known."""
    if not total:
        return f"step {done:,}"
    full = min(WIDTH, WIDTH * done // total)
    return f"{'━' * full}{'─' * (WIDTH - full)} {done:,}/{total:,}"


def left(elapsed_s: float, done: int, total: int | None) -> str:
    """`  0:42 left`: nothing before the first step, and nothing at the end."""
    if not total or not 0 < done < total:
        return ""
    seconds = int(elapsed_s / done * (total - done))
    return f"  {seconds // 60}:{seconds % 60:02d} left"
