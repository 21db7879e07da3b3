"""`report.pdf` and `report.md`: what they say, and that no record is read as markup."""

from __future__ import annotations

import dataclasses
import math
import os
import random
import re
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from tests.pdf_text import pages
from tests.records import run, write_study

from paceline.errors import BadRequest
from paceline.report.answer import answer
from paceline.report.commentary.all import comments
from paceline.report.document.content import Document, document, read_document
from paceline.report.document.drawing import printed
from paceline.report.document.inline import clean, prose, shown
from paceline.report.document.markdown import fenced, markdown, write_markdown
from paceline.report.document.typeset import pdf, write_pdf
from paceline.report.judge import serial_speedup
from paceline.report.lines import Line, RunRecord, Study
from paceline.report.reading import read_study

pytestmark = pytest.mark.native_threads  # of vl-convert and Typst

PRINTABLE = "".join(map(chr, range(32, 127))) + "éßΔ–…†"
SETTINGS = ("serial x 1", "allreduce x 2", "ps:consistency=ssp,staleness=4 x 2")


def made_up(folder: Path, *, events: bool = False, **about: Any) -> Path:
    """Three settings, three rounds, nine confirming blocks."""
    chance = random.Random(1)

    def near(value: float) -> float:
        return value * chance.uniform(0.97, 1.03)

    strategies = {"serial": (1, 2.0), "allreduce": (2, 1.2), SETTINGS[2][:-4]: (2, 1.5)}
    runs = [
        run(name, workers, near(s), near(0.93), each=[{"payload_sent_bytes": 123_450}] * workers)
        for _ in range(3)
        for name, (workers, s) in strategies.items()
    ]
    speeds = dict(zip(SETTINGS, (1000, 1600, 1300), strict=True))
    blocks = [
        {
            "number": i, "order": list(SETTINGS), "seconds": 30.0, "foreign": 0.01, "stolen": 0.0,
            "samples_per_s": {name: near(v) for name, v in speeds.items()},
            "repeats": int(i == 2), "disturbed": i == 4,
        }
        for i in range(9)
    ]  # fmt: skip
    confirm = {
        "serial": SETTINGS[0], "settings": list(SETTINGS[1:]), "width": 0.1, "pilot": 5,
        "threshold": 0.05, "wanted": 9, "block_s": 30.0, "ended": "", "blocks": blocks,
    }  # fmt: skip
    return write_study(folder, runs, events, confirm=confirm, **about)


def in_memory(label: str) -> Study:
    """A study of serial and of a setting with any label, which is the study's title, too."""
    lines = []
    for name, workers, train_s in (("serial", 1, 2.0), (label, 2, 1.0)):
        record = run(name, workers, train_s, path=label)
        record["environment"]["command"] = f"paceline train {label}"
        runs = [RunRecord("r", seed, record, Path("nowhere")) for seed in (0, 1)]
        lines.append(Line(name, workers, {"strategy": name}, runs))
    return Study(label, Path("nowhere"), lines, {"definition": {"question": label}})


def without_charts(study: Study) -> Document:
    return dataclasses.replace(document(study), figures=[])


def squeezed(text: str) -> str:
    return re.sub(r"\s", "", text)


def tables(text: str) -> list[list[list[str]]]:
    """The cells of each table as a reader sees them; markup that records brought in fails."""
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    found: list[list[list[str]]] = []
    for before, token in zip([None, *tokens], tokens, strict=False):
        if token.type == "table_open":
            found.append([])
        elif token.type == "tr_open":
            found[-1].append([])
        elif token.type == "inline" and before and before.type in ("td_open", "th_open"):
            found[-1][-1].append(seen(token))
        assert token.type != "html_block", token.content
    return found


def seen(token: Any) -> str:
    allowed = ("text", "code_inline", "strong_open", "strong_close", "em_open", "em_close")
    for child in token.children:
        assert child.type in (*allowed, "softbreak", "image"), child
    return "".join(child.content for child in token.children)


@settings(max_examples=60)
@given(st.text(min_size=1, max_size=40).filter(clean))
def test_any_label_survives_in_markdown(label: str) -> None:
    text = markdown(without_charts(in_memory(label)))
    main, *_ = tables(text)
    assert [len(row) for row in main] == [len(main[0])] * 3
    assert [row[0] for row in main] == ["setting", "serial", clean(label)]
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    assert tokens[0].tag == "h1"
    assert seen(tokens[1]) == clean(label)
    assert [t.tag for t in tokens if t.type == "heading_open"].count("h1") == 1
    command = next(t.content for t in tokens if t.type == "fence")
    assert clean(command.replace("\ufffd", " ")) == clean(f"paceline train {label}")


@settings(max_examples=12)
@given(st.text(PRINTABLE, min_size=1, max_size=120).filter(clean))
def test_any_label_survives_in_the_pdf(label: str) -> None:
    found = pages(pdf(without_charts(in_memory(label))))
    text, wanted = squeezed("".join(found)), squeezed(label)
    assert "\ufffd" not in text
    assert text.startswith(wanted)  # the title
    assert text.count(wanted) >= 4  # and the question, the table, the resources


@pytest.mark.parametrize(
    "label", ["ps:consistency=ssp,staleness=4", "a|b`#*_$@", "x" * 300, "-", "1."]
)
def test_labels_with_markup(label: str) -> None:
    found = without_charts(in_memory(label))
    assert tables(markdown(found))[0][2][0] == label
    assert squeezed("".join(pages(pdf(found)))).count(label) >= 4


def test_code_ends_where_it_should() -> None:
    assert fenced("a ```b") == "````\na ```b\n````"


def test_a_sentence_keeps_its_words() -> None:
    assert shown(prose("The fastest was `a b`: 1.5x (`c`).")) == "The fastest was a b: 1.5x (c)."


def test_it_says_what_the_page_says(tmp_path: Path) -> None:
    study = read_study(made_up(tmp_path / "s", started=1_790_000_000))
    found = without_charts(study)
    text = markdown(found)
    read = "".join(pages(pdf(found)))
    for sentence in [*answer(study), *(c.text for c in comments(study))]:
        assert squeezed(shown(prose(sentence))) in squeezed(read), sentence
    plain = re.sub(r"[`\\]", "", text)
    assert all(s.replace("`", "") in plain for s in answer(study))
    line = next(x for x in study.lines if x.label == "allreduce")
    speed = serial_speedup(study, line)
    assert speed is not None
    cells = next(row for row in tables(text)[0] if row[0] == "allreduce")
    assert f"{speed.mean:.2f}x ({speed.low:.2f} to {speed.high:.2f})" in cells
    assert "faster in 9 of 9 blocks" in cells
    assert "12.3 kB" in cells
    assert math.isclose(float(cells[4].partition("%")[0]), 100 * line.accuracy.mean, abs_tol=0.006)
    for words in ("Holm", "Stein", "1 disturbed block was kept", "5% of the machine"):
        assert words in text, words
    assert "9 confirming blocks" in text
    assert "September 2026" in text


def test_charts_are_vectors_beside_the_markdown_and_in_the_pdf(tmp_path: Path) -> None:
    folder = made_up(tmp_path / "s", events=True)
    path = write_markdown(folder)
    assert path == folder / "report.md"
    links = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", path.read_text())
    assert len(links) > 5
    assert {link.partition("/")[0] for link in links} == {"figures"}
    first = folder / links[0]
    assert first.read_text().startswith("<svg")
    assert "chosen above" not in path.read_text()  # a reader cannot choose
    first.write_text("<svg>mine</svg>")  # newer than the records: kept
    write_markdown(folder)
    assert first.read_text() == "<svg>mine</svg>"
    newest = first.stat().st_mtime + 10
    os.utime(folder / "study.json", (newest, newest))
    write_markdown(folder)
    assert first.read_text() != "<svg>mine</svg>"

    made = write_pdf(folder, tmp_path / "my report.pdf")
    content = made.read_bytes()
    assert content.startswith(b"%PDF")
    assert not re.search(rb"/Subtype\s*/Image", content)
    text = squeezed("".join(pages(content)))
    for number in range(1, len(links) + 1):
        assert f"Figure{number}." in text
    assert all(f"Table{number}." in text for number in (1, 2))
    assert f"1of{len(pages(content))}" in text


def test_another_folder_gets_figures_of_its_own(tmp_path: Path) -> None:
    folder = made_up(tmp_path / "s")
    (tmp_path / "notes").mkdir()
    path = write_markdown(folder, tmp_path / "notes" / "week 3.md")
    links = re.findall(r"\]\(([^)]+)\)", path.read_text())
    assert {link.partition("/")[0] for link in links} == {"week%203_figures"}
    assert (path.parent / "week 3_figures" / "train_s_by_setting.svg").is_file()
    assert not (folder / "figures").exists()


def test_one_run_and_a_folder_of_runs(tmp_path: Path) -> None:
    runs = made_up(tmp_path / "s") / "runs"
    several = read_document(runs)
    assert len(several.main.rows) == 3
    alone = read_document(runs / "allreduce-p2-s0")
    text = markdown(dataclasses.replace(alone, figures=[]))
    assert "allreduce` with 2 workers trained for" in text
    assert "speed against" not in text  # there is nothing to compare with
    assert "This is one run" in text
    assert "Holm" not in text


def test_a_private_study_with_its_own_metric(tmp_path: Path) -> None:
    private = run("allreduce", 2, 1.0)
    private["privacy"] = {
        "epsilon": 3.25, "delta": 1e-5, "epsilon_rdp": 3.5, "noise": 1.1, "noise_per_worker": 1.1,
        "clip": 1.0, "steps": 500, "sampling": "poisson", "trust": "peers", "private": True,
        "guarantee": ["It hides one sample.", "Peers see sums."],
    }  # fmt: skip
    runs = [run("serial", 1, 2.0), private]
    for record, value in zip(runs, (0.91, 0.87), strict=True):
        record["result"]["metric"] = {"name": "auc", "value": value, "higher_is_better": True}
    text = markdown(without_charts(read_study(write_study(tmp_path / "s", runs))))
    head, serial, other = tables(text)[0]
    assert {"test auc", "test accuracy", "epsilon"} <= set(head)
    assert (serial[head.index("epsilon")], other[head.index("epsilon")]) == ("–", "3.25")
    assert other[head.index("test auc")] == "0.87"
    assert "**Privacy.** With delta 1e-05: It hides one sample. Peers see sums." in text


# --- what cannot be written


def test_all_runs_failed(tmp_path: Path) -> None:
    failed = write_study(tmp_path / "s", [run("serial", error="it broke\nTraceback")])
    for write in (write_pdf, write_markdown):
        with pytest.raises(BadRequest, match=r"no run in .* was completed.*\(failed: it broke\)$"):
            write(failed)


def test_no_records(tmp_path: Path) -> None:
    for write in (write_pdf, write_markdown):
        with pytest.raises(BadRequest, match=r"neither study\.json nor"):
            write(tmp_path)


@pytest.mark.parametrize(
    ("file", "says"),
    [
        ("nosuch/report.pdf", "there is no folder nosuch"),
        (".", "is a folder: name a file"),
        ("file/report.pdf", "there is no folder file"),
        ("x" * 300, "is not a path"),
        ("a\0b", "is not a path"),
    ],
)
def test_a_file_that_cannot_be_written(tmp_path: Path, file: str, says: str) -> None:
    folder = write_study(tmp_path / "s", [run()])
    (tmp_path / "file").write_text("")
    for write in (write_pdf, write_markdown):
        with pytest.raises(BadRequest, match=says):
            write(folder, file)


def test_without_typst(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_study(tmp_path / "s", [run()])
    monkeypatch.setitem(sys.modules, "typst", None)
    with pytest.raises(BadRequest, match=re.escape("pip install 'paceline[pdf]'")):
        write_pdf(folder)
    assert not (folder / "report.pdf").exists()


def test_names_beside_lines_do_not_overlap_in_print(tmp_path: Path) -> None:
    """Four settings whose points all but coincide; charts are lower in print than on the page."""
    names = ("serial", "allreduce", "psgd", "stepwise", "hogwild")
    runs = [
        run(name, workers, (4.0 if workers == 1 else 2.2) + 0.001 * i, 0.95 + 0.0001 * i)
        for i, name in enumerate(names)
        for workers in ((1,) if name == "serial" else (1, 2))
        for _ in range(2)
    ]
    found = read_document(write_study(tmp_path / "s", runs, events=True))
    labelled = re.compile(r'series: ([\w-]+)" [^>]*text mark"[^>]*translate\([\d.]+,([\d.-]+)\)')
    checked = 0
    for figure in found.figures:
        heights = sorted(float(y) for _, y in labelled.findall(printed(found, figure)))
        assert all(b - a > 11 for a, b in pairwise(heights)), (figure.chart.name, heights)
        checked += len(heights) >= 3
    assert checked >= 4


def test_a_pilot_that_was_not_finished_has_fixed_nothing(tmp_path: Path) -> None:
    found = read_study(made_up(tmp_path / "s"))
    assert "the variance of the first 5 blocks fixed it" in str(document(found).method)
    confirm = found.about["confirm"]
    found.about["confirm"] = {**confirm, "blocks": confirm["blocks"][:2], "ended": "budget"}
    for name in ("blocks", "confirmed"):
        found.__dict__.pop(name, None)  # what was read before
    assert "the variance of the first 5 blocks was to fix it" in str(document(found).method)
