"""docs/ten_minutes.md, from its first command to its last, in the order of the page."""

import re
import shlex
import sys
import textwrap
from pathlib import Path

import pytest
from tests.commands import PACELINE, run

PAGE = (Path(__file__).parent.parent.parent / "docs" / "ten_minutes.md").read_text()


def files() -> dict[str, str]:
    """The indented blocks below a line `name:` on the page."""
    found = re.findall(r"^([\w.]+):\n\n((?:    .*\n|\n)+)", PAGE, re.MULTILINE)
    return {name: textwrap.dedent(text).strip() + "\n" for name, text in found if "." in name}


def commands() -> list[list[str]]:
    """Every command of a code block, in order."""
    text = PAGE.replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines() if re.match(" {4}(paceline|python) ", line)]
    return [shlex.split(line, comments=True) for line in lines]


@pytest.mark.slow
def test_every_command_of_the_page(tmp_path: Path) -> None:
    assert set(files()) == {"mynet.py", "my.toml", "use.py"}
    for name, content in files().items():
        (tmp_path / name).write_text(content)
    said = {}
    for words in commands():
        program = PACELINE if words[0] == "paceline" else sys.executable
        quicker = {"study": ["--no-figures"], "train": ["--threads", "1"]}
        more = quicker.get(words[1], [])
        done = run(
            [program, *words[1:], *more],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}{done.stderr}"
        said[" ".join(words[:2])] = done.stdout
    assert [words[1] for words in commands()] == [
        "train", "train", "train", "runs", "show", "study", "use.py",
    ]  # fmt: skip
    for name in ("one", "two", "local"):
        assert f"runs/{name}" in said["paceline runs"]
    assert "local-sgd:every=8" in said["paceline show"]
    assert "as serial" in said["paceline study"].replace("\n", " ")
    assert (tmp_path / "runs" / "my" / "report.html").is_file()
    assert "'test_accuracy'" in said["python use.py"]
    assert "'samples': 400" in said["python use.py"]
    assert "MyNet(" in said["python use.py"]
