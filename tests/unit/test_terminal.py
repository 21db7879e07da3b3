"""Tables on narrow terminals: the names of settings are broken after a comma or a space only."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from tests.records import run, write_study

from paceline.cli import study as command
from paceline.report.reading import read_study
from paceline.studies.estimate import Estimator
from paceline.studies.grid import BUILTIN, StudySpec
from paceline.studies.plan import PlannedRun, rounds_of
from paceline.terminal.fitting import INDENT, WRAP, Column, drop, fit_table, shorten, wrap_name
from paceline.terminal.results import show_study
from paceline.terminal.study import StudyTable

SPEC = StudySpec.read(BUILTIN)
LABELS = list(dict.fromkeys(s.label for s in SPEC.settings()))


def terminal(width: int) -> Console:
    return Console(width=width, file=io.StringIO(), force_terminal=True, color_system=None)


def printed(console: Console) -> list[str]:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def read_names(lines: list[str]) -> list[str]:
    """Put names together again from the first column: a continuation is indented."""
    names: list[str] = []
    for line in lines:
        first = line.strip().split("  ")[0].split(" ")[0]
        if line.lstrip("\r").startswith((INDENT, " " + INDENT)) and names:
            names[-1] += first
        elif line.strip():
            names.append(first)
    return names


def assert_whole(lines: list[str], width: int) -> None:
    """Every label is there, whole or broken after a comma, and no line is too long."""
    assert max(len(line.rstrip()) for line in lines) <= width, lines
    names = read_names(lines)
    text = "\n".join(lines)
    for label in LABELS:
        if label.startswith("serial"):
            assert label.split(",")[0] in text
        else:
            assert label in names, (label, names)


def records() -> list[dict[str, Any]]:
    """Three seeds of the built-in study, with times that need many digits."""
    return [
        run(
            s.strategy,
            s.workers,
            (123.45 + seed) / s.workers,
            0.9512 + 0.001 * seed,
            target=0.92,
            reached_s=61.25 + seed,
            threads=int(s.options["threads"]),
        )
        for s in SPEC.settings()
        for seed in range(3)
    ]


@pytest.mark.parametrize("width", [80, 60])
def test_the_results_of_the_built_in_study_fit(tmp_path: Path, width: int) -> None:
    console = terminal(width)
    show_study(read_study(write_study(tmp_path / "s", records())), console)
    lines = printed(console)
    start = next(i for i, line in enumerate(lines) if "setting" in line and "workers" in line)
    end = next(i for i, line in enumerate(lines) if line.startswith("Speed against serial"))
    table = lines[start:end]
    assert_whole(table, width)
    assert all(heading in table[0] for heading in ("workers", "serial", "accuracy"))
    assert ("92%" in table[0], "training" in table[0]) == (width == 80, width == 80)
    assert any("95.22" in line and "4.00x" in line for line in table)


@pytest.mark.parametrize("width", [80, 60])
def test_the_live_table_of_the_built_in_study_fits(width: int) -> None:
    table, rounds = StudyTable(live=False), rounds_of(SPEC)
    table.console = terminal(width)
    table.planned(SPEC, rounds, {})
    done: list[PlannedRun] = rounds[0]
    for number, planned in enumerate(done):
        table._records[planned.name] = run(planned.setting.strategy, 1, 3.21 + number)
    table._current = next(
        p for p in rounds[1] if p.setting.label == "ps:consistency=ssp,staleness=4"
    )
    table.console = terminal(width)
    table.console.print(table._table())
    lines = printed(table.console)
    status = next(i for i, line in enumerate(lines) if "runs, 0:" in line)
    assert_whole(lines[:status], width)
    assert sum("> " in line for line in lines[:status]) == 1
    running = "".join(line.strip() for line in lines[status + 1 :])
    assert f"running ps:consistency=ssp,staleness=4 x {table._current.setting.workers}" == running
    counts = [str(n) for n in sorted({s.workers for s in SPEC.settings()})]
    assert all(count in lines[0] for count in counts)  # no column had to go


@pytest.mark.parametrize("width", [80, 60])
def test_the_list_of_the_built_in_study_fits(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Estimator, "seconds", lambda self, setting: 1234.0)
    console = terminal(width)
    command._list_runs(SPEC, console)
    lines = printed(console)
    end = next(i for i, line in enumerate(lines) if "runs, about" in line)
    assert_whole(lines[:end], width)


def test_less_important_columns_give_way_first() -> None:
    names = ["ps:consistency=ssp,staleness=4", "serial"]
    times = Column("time", ["1.00 (0.90-1.10)", "2.00 (1.90-2.10)"], ["1.00", "2.00"])
    sent = Column("sent", ["88.6 kB", "–"])
    steps = [drop(sent), WRAP, shorten(times)]

    def at(width: int) -> str:
        console = terminal(width)
        console.print(fit_table(console, "setting", names, [times, sent], steps))
        lines = printed(console)
        assert max(len(line) for line in lines) <= width
        return "\n".join(lines)

    wide, narrower, wrapped, narrow = at(70), at(52), at(42), at(34)
    assert "88.6 kB" in wide
    assert "88.6 kB" not in narrower
    assert all("ps:consistency=ssp,staleness=4" in text for text in (wide, narrower))
    assert all("(0.90-1.10)" in text for text in (wide, narrower, wrapped))
    assert all("ps:consistency=ssp,\n" not in text for text in (wide, narrower))
    for text in (wrapped, narrow):
        assert "ps:consistency=ssp, " in text
        assert f"{INDENT}staleness=4" in text
    assert "(0.90-1.10)" not in narrow


words = st.text("abcxyz:=.", min_size=1, max_size=12)


@given(st.lists(words, min_size=1, max_size=6), st.sampled_from([",", ", "]), st.integers(4, 40))
def test_a_wrapped_name_loses_nothing_and_is_broken_between_words_only(
    parts: list[str], between: str, width: int
) -> None:
    name = between.join(parts)
    lines = wrap_name(name, width).split("\n")
    assert "".join(lines).replace(" ", "") == name.replace(" ", "")
    assert all(line.startswith(INDENT) for line in lines[1:])
    whole = {part + comma for part in parts for comma in ("", ",")}
    assert all(word in whole for line in lines for word in line.replace(",", ", ").split())
    assert all(len(line) <= max(width, len(INDENT) + 13) for line in lines)
