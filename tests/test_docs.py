"""The documentation says what the code does."""

import re
from pathlib import Path

import pytest

from paceline.common.values import format_value
from paceline.registry import ALL, strategies

ROOT = Path(__file__).parent.parent


def test_the_table_of_strategies_is_the_registry() -> None:
    text = (ROOT / "docs" / "strategies.md").read_text()
    rows = {m[1]: m[0] for m in re.finditer(r"^\| `([a-z-]+)` \|.*\|$", text, re.MULTILINE)}
    assert set(rows) == set(strategies.names())
    for entry in strategies:
        assert entry.summary in rows[entry.name]
        for option in entry.options.values():
            assert f"`{option.name}={format_value(option.default)}`" in rows[entry.name]
    readme = (ROOT / "README.md").read_text()
    assert all(f"`{name}`" in readme for name in strategies.names())


@pytest.mark.parametrize(
    ("file", "plural"),
    [
        ("codecs.md", "codecs"),
        ("optimizers.md", "optimizers"),
        ("optimizers.md", "schedules"),
        ("data.md", "data"),
    ],
)
def test_pages_name_everything(file: str, plural: str) -> None:
    text = (ROOT / "docs" / file).read_text()
    for entry in ALL[plural]:
        assert f"`{entry.name}" in text, f"{file} does not tell of {entry.name}"


def test_the_table_of_codecs_is_the_registry() -> None:
    text = (ROOT / "docs" / "codecs.md").read_text()
    for entry in ALL["codecs"]:
        row = next(line for line in text.splitlines() if line.startswith(f"| `{entry.name}` |"))
        assert entry.summary in row
        assert all(f"`{o.name}={format_value(o.default)}`" in row for o in entry.options.values())


def test_links_lead_somewhere() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
            assert target.startswith("http") or (page.parent / target).exists(), (
                f"{page.name}: {target}"
            )


def test_the_readmes_flags_exist() -> None:
    from paceline.cli.data import fetch
    from paceline.cli.report import report
    from paceline.cli.study import study
    from paceline.cli.train import train

    known = {
        flag for command in (train, study, fetch, report) for p in command.params for flag in p.opts
    }
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for line in page.read_text().splitlines():
            if re.match(r"^\s*paceline (train|study|report|data)", line):
                for flag in re.findall(r"(--[a-z-]+)", line):
                    assert flag in known, f"{page.name}: {flag} in {line!r}"


def test_every_study_file_is_told_of() -> None:
    text = (ROOT / "docs" / "studies.md").read_text()
    for file in (ROOT / "studies").glob("*.toml"):
        assert f"studies/{file.name}" in text, file.name
