"""Engine tests: their marker, what they need, and the table at the end of `make test-engines`.

A test of an engine is in `test_<engine>.py`. It skips itself with the command that installs the
engine where that is absent (`needs`), and says which version it has run with (`used`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.engine import VERSIONS, engine_of, words

HERE = Path(__file__).parent
_outcomes: dict[str, tuple[str, float, str]] = {}  # by test: how it ended, seconds, why skipped


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.engines)
            item.add_marker(pytest.mark.processes)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    if HERE in item.path.parents:
        _note(item.nodeid, report)
    return report


def _note(name: str, report: pytest.TestReport) -> None:
    how, seconds, why = _outcomes.get(name, ("not finished", 0.0, ""))
    if report.skipped:
        how = "skipped"
        why = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
    elif report.failed:
        how = "failed"
    elif report.when == "call":
        how = "passed"
    _outcomes[name] = how, seconds + report.duration, why.removeprefix("Skipped: ")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what was run on which engine, and what was skipped, with the reason."""
    if not _outcomes:
        return
    say = terminalreporter.write_line
    terminalreporter.section("engines")
    rows = [("engine", "result", "s", "what")]
    for name, (how, seconds, why) in _outcomes.items():
        what = words(name) + (f" ({why})" if why else "")
        rows.append((engine_of(name), how, f"{seconds:.0f}", what))
    wide = [max(len(row[column]) for row in rows) for column in range(3)]
    for engine, how, seconds, what in rows:
        say(f"{engine:{wide[0]}}  {how:{wide[1]}}  {seconds:>{wide[2]}}  {what}")
    say("")
    for engine in sorted({engine_of(name) for name in _outcomes}):
        ends = [how for name, (how, _, _) in _outcomes.items() if engine_of(name) == engine]
        counts = ", ".join(f"{ends.count(how)} {how}" for how in dict.fromkeys(ends))
        say(f"{engine}: {VERSIONS.get(engine, 'not run')}: {counts}")
