"""`paceline report DIR --pdf --markdown`"""

from __future__ import annotations

import json
import shutil
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


# --- records that are missing, few, failed or of another version


def test_a_study_without_records_is_one_sentence(cli, tmp_path: Path) -> None:
    folder = write_study(tmp_path / "s", [run()])
    shutil.rmtree(folder / "runs")
    for more in (("--no-figures",), ("--pdf",), ("--markdown",)):
        code, out, err = cli("report", "s", *more)
        assert (code, out, err) == (2, "", "paceline: s holds no finished run yet\n")


def test_a_study_of_one_run_has_a_report(cli, tmp_path: Path) -> None:
    write_study(tmp_path / "s", [run("serial", 1, 2.0, 0.95)])
    code, out, err = cli("report", "s", "--no-figures")
    assert (code, err) == (0, "")
    assert out.startswith("serial with 1 worker trained for 2.00 s, to 95.00% accuracy.\n")


def test_a_study_whose_runs_all_failed_says_why_and_has_no_table(cli, tmp_path: Path) -> None:
    write_study(tmp_path / "s", [run(error="it broke"), run("psgd", 2, error="no memory")])
    code, out, err = cli("report", "s", "--no-figures")
    assert (code, err) == (0, "")
    first, *reasons, _, _ = out.splitlines()
    assert first == "No run was completed: see the reasons below."
    assert reasons == ["serial x 1 failed: it broke", "psgd x 2 failed: no memory"]


@pytest.mark.parametrize(
    ("schema", "expected"),
    [(99, "has schema 99; this Paceline knows 1: use a newer Paceline"), ("1", ""), (None, "")],
)
def test_mixed_schemas_are_one_sentence(cli, tmp_path: Path, schema: object, expected: str) -> None:
    """A record of a later version ends the report; others that cannot be read are left out."""
    folder = write_study(tmp_path / "s", [run(), run("psgd", 2)])
    path = next((folder / "runs").glob("psgd*/run.json"))
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema": schema}))
    code, out, err = cli("report", "s", "--no-figures")
    if expected:
        assert (code, out) == (2, "")
        assert err == f"paceline: {path.relative_to(tmp_path)} {expected}\n"
    else:
        assert (code, err) == (0, "")
        (said,) = (line for line in out.splitlines() if line.startswith("A record is left out: "))
        assert str(path.relative_to(tmp_path)) in said
