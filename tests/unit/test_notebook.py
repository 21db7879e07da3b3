"""The live bar in a notebook that has no ipywidgets, with a stand-in for IPython's shell.

The stand-in shows what a kernel would be sent. `rich` decides by the shell's class name that this
is a notebook.
"""

import builtins
import sys
from types import ModuleType
from typing import Any

import pytest

from paceline.terminal.notebook import NotebookBar, bar, left
from paceline.terminal.run import Watch
from paceline.terminal.study import StudyTable


class ZMQInteractiveShell:
    """As IPython calls the shell of a notebook's kernel."""


class Shown:
    """What the cell shows, as in IPython's display with a display id."""

    def __init__(self) -> None:
        self.cells: list[Any] = []

    def display(self, *objects: Any, raw: bool = False, display_id: Any = None, **_: Any) -> Any:
        self.cells.append(objects[0])
        place = len(self.cells) - 1
        shown = self

        class Handle:
            def update(self, content: Any, raw: bool = False) -> None:
                shown.cells[place] = content

        return Handle() if display_id else None


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Shown:
    shown = Shown()
    package, module = ModuleType("IPython"), ModuleType("IPython.display")
    module.display = shown.display  # type: ignore[attr-defined]
    package.display = module  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", package)
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    monkeypatch.setattr(builtins, "get_ipython", ZMQInteractiveShell, raising=False)
    return shown


def bars(shown: Shown) -> list[str]:
    return [cell["text/plain"] for cell in shown.cells if isinstance(cell, dict) and len(cell) == 1]


def test_a_run_has_one_bar_that_ends_full(notebook: Shown, run_inproc) -> None:
    run = run_inproc(steps=6, workers=2, evaluate_every=3)
    (line,) = bars(notebook)  # and no warning: warnings are errors in the tests
    assert line.startswith(f"training {'━' * 24} 6/6 loss ")
    assert line.endswith("samples/s")
    assert run.steps == 6


def test_no_bar_where_none_is_wanted(notebook: Shown, run_inproc) -> None:
    run_inproc(steps=2, progress=False)
    assert notebook.cells == []


def test_a_study_prints_lines(notebook: Shown) -> None:
    assert not StudyTable(live=True).live


def test_the_bar_is_replaced_not_repeated(notebook: Shown) -> None:
    shown = NotebookBar("training")
    for step in range(1, 4):
        shown.update(step, 8, f"loss {step}", force=True)
    shown.update(4, 8, "loss 4")  # too soon after the one before
    (line,) = bars(notebook)
    assert line.startswith("training ━━━━━━━━━─────────────── 3/8 loss 3")


def test_words_of_the_bar() -> None:
    assert bar(1200, None) == "step 1,200"
    assert bar(9, 8) == f"{'━' * 24} 9/8"
    assert left(10.0, 5, 25) == "  0:40 left"
    assert [left(1.0, 0, 5), left(1.0, 5, 5), left(1.0, 5, None)] == ["", "", ""]


def test_a_run_that_ends_before_its_first_step_shows_no_bar(notebook: Shown) -> None:
    with Watch(None, live=True, headed=False):  # type: ignore[arg-type]
        pass
    assert bars(notebook) == []
