"""`paceline report DIR --pdf --markdown`"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.records import run, write_study

pytestmark = pytest.mark.native_threads


def test_report_writes_all_three(cli, tmp_path: Path) -> None:
    write_study(tmp_path / "s", [run("serial", 1, 2.0), run("allreduce", 2, 1.0)])
    code, out, err = cli("report", "s", "--pdf", "--markdown", "mine.md", "--no-figures")
    assert (code, err) == (0, "")
    assert [line.rpartition("/")[2] for line in out.splitlines() if "file://" in line] == [
        "report.html", "report.pdf", "mine.md",
    ]  # fmt: skip
    assert (tmp_path / "s" / "report.pdf").read_bytes().startswith(b"%PDF")
    assert "mine_figures/" in (tmp_path / "mine.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("s", "s", "--pdf"), "--pdf and --markdown are for one study or run"),
        (("--markdown", "s"), "the folder of the records comes first"),
        (("s", "--pdf", "nosuch/a.pdf"), "there is no folder nosuch"),
        (("nosuch", "--pdf"), "neither study.json nor run.json"),
        (("failed", "--pdf"), "no run in failed was completed"),
    ],
)
def test_bad_requests_are_one_sentence(
    cli, tmp_path: Path, arguments: tuple[str, ...], says: str
) -> None:
    write_study(tmp_path / "s", [run()])
    write_study(tmp_path / "failed", [run(error="it broke")])
    code, _, err = cli("report", *arguments, "--no-figures")
    assert (code, err.count("\n")) == (2, 1)
    assert says in err


def test_a_missing_extra_is_found_before_anything_is_written(
    cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_study(tmp_path / "s", [run()])
    monkeypatch.setitem(sys.modules, "typst", None)
    code, _, err = cli("report", "s", "--pdf")
    assert (code, err.count("\n")) == (2, 1)
    assert "pip install 'paceline[pdf]'" in err
    assert not (tmp_path / "s" / "report.html").exists()
