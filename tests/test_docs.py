"""The documentation agrees with the code: names, options, commands, imports, links.

The lists of strategies and codecs are made from the registry. After a change there, write them
again: PACELINE_WRITE_DOCS=1 python -m pytest tests/test_docs.py
"""

import importlib
import importlib.util
import os
import re
import shlex
import textwrap
import tomllib
from pathlib import Path

import click
import pytest

from paceline.common.values import format_value
from paceline.registry import ALL, Entry, strategies

ROOT = Path(__file__).parent.parent
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [*DOCS, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "deploy" / "README.md"]
FORBIDDEN = r"\b(whom?ever|somebody|nobody|everybody|not to be had)\b"


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def listed(entry: Entry) -> str:
    """The item of a registered thing in a list of the documentation."""
    options = ", ".join(f"`{o.name}={format_value(o.default)}`" for o in entry.options.values())
    text = f"- **`{entry.name}`**: {entry.summary}" + (f" Options: {options}." if options else "")
    return textwrap.fill(
        text, 98, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


@pytest.mark.parametrize(
    ("file", "plural"), [("strategies.md", "strategies"), ("codecs.md", "codecs")]
)
def test_the_list_is_the_registry(file: str, plural: str) -> None:
    page = ROOT / "docs" / file
    before, mark, rest = page.read_text().partition(f"<!-- {plural} -->\n")
    found, end, after = rest.partition("<!-- end -->")
    assert mark, f"{file} has no <!-- {plural} -->"
    assert end, f"{file} has no <!-- end -->"
    wanted = "".join(listed(entry) + "\n" for entry in ALL[plural])
    if os.environ.get("PACELINE_WRITE_DOCS"):
        page.write_text(before + mark + wanted + end + after)
    else:
        assert found == wanted


def test_the_readme_names_every_strategy() -> None:
    readme = (ROOT / "README.md").read_text()
    assert all(f"`{name}`" in readme for name in strategies.names())


@pytest.mark.parametrize(
    ("file", "plural"),
    [
        ("codecs.md", "codecs"),
        ("optimizers.md", "optimizers"),
        ("optimizers.md", "schedules"),
        ("data.md", "data"),
        ("transports.md", "transports"),
        ("transports.md", "collectives"),
        ("transports.md", "faults"),
        ("callbacks.md", "callbacks"),
    ],
)
def test_pages_name_everything(file: str, plural: str) -> None:
    text = (ROOT / "docs" / file).read_text()
    for entry in ALL[plural]:
        assert re.search(rf"[`\"]{re.escape(entry.name)}\b", text), f"{file}: {entry.name}"


def test_every_study_file_is_in_the_table() -> None:
    text = (ROOT / "docs" / "studies.md").read_text()
    for file in (ROOT / "studies").glob("*.toml"):
        assert f"studies/{file.name}" in text, file.name


def anchors(page: Path) -> set[str]:
    """The anchors that a page's headings have on GitHub."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if target.startswith("http"):
            continue
        file, _, anchor = target.partition("#")
        linked = page.parent / file if file else page
        assert linked.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(linked), f"{page.name}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_files_that_a_page_names_exist(page: Path) -> None:
    if page.name == "CHANGELOG.md":  # it names files that are gone
        return
    for path in re.findall(
        r"\b((?:tests|src|examples|benchmarks|deploy|docs)/[\w./-]*\w)", page.read_text()
    ):
        assert (ROOT / path).exists(), f"{page.name}: {path}"


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_prose(page: Path) -> None:
    for number, line in enumerate(page.read_text().splitlines(), 1):
        assert len(line) <= 100, f"{page.name}:{number} has {len(line)} characters"
        found = re.search(FORBIDDEN, line, re.IGNORECASE)
        assert not found, f"{page.name}:{number} says {found and found[0]!r}"


def test_comments_of_studies() -> None:
    for file in (ROOT / "studies").glob("*.toml"):
        tomllib.loads(file.read_text())
        for line in file.read_text().splitlines():
            assert not line.startswith("#") or len(line) <= 100, line
            assert not re.search(FORBIDDEN, line, re.IGNORECASE), line


def commands(page: Path) -> list[str]:
    """Every command line of Paceline on a page: in code blocks and between backticks."""
    text = page.read_text().replace("\\\n", " ")
    blocks = [line for line in text.splitlines() if re.match(r"(    |\$ )", line)]
    spans = re.findall(r"`(paceline [^`]+)`", re.sub(r"\s*\n\s*", " ", text))
    found = []
    for line in [*blocks, *spans]:
        for part in line.split("&&"):
            call = re.match(
                r"\s*(?:\$ )?(?:(?:mpirun|torchrun|srun)\b.*?)?"
                r"(?:\$\(which paceline\)|(?:\.venv/bin/)?\bpaceline) (?=[a-z-])(.*)",
                part,
            )
            if call:
                found.append(call[1])
    return found


def check_command(line: str) -> None:
    """Raise if the command, one of its options or a registered name in it does not exist."""
    from paceline.cli.main import cli

    arguments = [a for a in shlex.split(line, comments=True) if a != "..."]
    if arguments == ["--version"]:
        return
    command: click.Command = cli
    while isinstance(command, click.Group) and arguments:
        context = click.Context(command)
        found = command.get_command(context, arguments[0])
        assert found is not None, f"there is no command {arguments[0]!r}"
        command, arguments = found, arguments[1:]
    if "--" in arguments and command.name != "run":  # that of `cluster` takes any program
        check_command(shlex.join(arguments[arguments.index("--") + 1 :]))
    context = click.Context(command, **command.context_settings)
    given, left, _ = command.make_parser(context).parse_args(list(arguments))
    if context.ignore_unknown_options:  # `paceline testbed run` hands its arguments to `train`
        check_command(shlex.join(["train", *given.pop("arguments", ()), *left]))
    else:
        assert not left or "--" in arguments, f"what is {left}?"
    for name, plural in [
        ("strategy", "strategies"),
        ("codec", "codecs"),
        ("optimizer", "optimizers"),
        ("model", "models"),
        ("data", "data"),
        ("transport", "transports"),
        ("lr_schedule", "schedules"),
    ]:
        value = given.get(name) or "auto"
        module = re.fullmatch(r"([a-z_.]+):[A-Za-z_]+", value)  # a reader's own: mynet:MyNet
        if module and module[1] not in ALL[plural]:
            continue
        if value != "auto" and not given.get("plugin") and not re.search("[A-Z]{2}", value):
            ALL[plural].resolve(value)


@pytest.mark.parametrize("page", [*DOCS, ROOT / "deploy" / "README.md"], ids=named)
def test_commands_exist(page: Path) -> None:
    for line in commands(page):
        try:
            check_command(line)
        except Exception as error:
            pytest.fail(f"{page.name}: paceline {line}\n{type(error).__name__}: {error}")


def test_commands_that_do_not_exist_are_found() -> None:
    for line in [
        "train --stratgy ps",
        "trian",
        "train --strategy allreduc",
        "train --codec topk:rtio=1",
        "list strategies codecs",
        "launch --slurm job.sh -- train --nothing",
    ]:
        with pytest.raises(Exception, match=r"."):
            check_command(line)


def test_the_pages_have_commands() -> None:
    assert sum(len(commands(page)) for page in DOCS) > 60


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_imports_resolve(page: Path) -> None:
    import paceline

    text = page.read_text()
    if page.name == "CHANGELOG.md":  # it names modules that have moved
        return
    for module in re.findall(r"^\s*import (paceline[\w.]*)", text, re.MULTILINE):
        assert importlib.util.find_spec(module), f"{page.name}: import {module}"
    for module, names in re.findall(r"from (paceline[\w.]*) import ([\w, ]+)", text):
        for name in names.split(","):
            assert hasattr(importlib.import_module(module), name.strip()), f"{module}: {name}"
    for name in re.findall(r"\bpaceline\.([a-z_]+)\(", text):
        assert hasattr(paceline, name), f"{page.name}: paceline.{name}"
