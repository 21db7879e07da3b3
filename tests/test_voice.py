"""Errors and notices speak of flags on the command line and of arguments in Python."""

import ast
import re
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest

import paceline
from paceline.errors import BadRequest, PeerSlow, in_python, on_the_command_line, to_plain
from paceline.registry import ALL
from paceline.request.config import Config

SOURCE = Path(__file__).parent.parent / "src" / "paceline"
# Their sentences are read on a command line or on a page only.
FOR_COMMANDS = ("cli", "bench", "doctor", "report", "spark", "testbed")
COMMANDS = {  # options of other programs, and of commands that Python does not have
    "--silent", "--ignore-scripts", "--help", "--mca", "--bind-to", "--oversubscribe", "--host",
    "--allow-run-as-root", "--map-by", "--prtemca", "--always", "--dirty", "--quiet", "--threads",
}  # fmt: skip
FURTHER_VALUES = {"cpu", "off", "best", "value"}


def sentences() -> Iterator[tuple[str, str]]:
    """Every text in the sources with a flag in it, with {holes} filled by X1."""
    for path in sorted(SOURCE.rglob("*.py")):
        if path.relative_to(SOURCE).parts[0] in FOR_COMMANDS:
            continue
        tree = ast.parse(path.read_text())
        documented = (ast.Module, ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)
        skip = {
            id(n.body[0].value)
            for n in ast.walk(tree)
            if isinstance(n, documented) and n.body and isinstance(n.body[0], ast.Expr)
        } | {id(part) for n in ast.walk(tree) if isinstance(n, ast.JoinedStr) for part in n.values}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                text = "".join(
                    str(part.value) if isinstance(part, ast.Constant) else "X1"
                    for part in node.values
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                text = node.value if id(node) not in skip else ""
            else:
                continue
            words = text.strip()
            if re.search(r"(?<![\w-])--[a-z]", text) and words not in COMMANDS:
                yield f"{path.relative_to(SOURCE)}:{node.lineno}", text


FOUND = [(where, text) for where, text in sentences() if not text.startswith(("#!", "srun "))]


def test_the_sources_have_such_sentences() -> None:
    assert len(FOUND) > 50


def test_python_never_sees_a_flag() -> None:
    """Except in a command to type. A word after a flag is its value, or it is in `_NO_VALUES`."""
    values = {name for registry in ALL.values() for name in registry.names()} | FURTHER_VALUES
    for field in Config.options().values():
        if typing.get_origin(field.metadata["kind"]) is typing.Literal:
            values |= set(typing.get_args(field.metadata["kind"]))
    wrong = []
    for where, text in FOUND:
        said = in_python(text)
        if re.search(r"(?<![\w-])--[a-z]", re.sub(r"paceline [a-z]+(?: [^;,)`]+)*", "", said)):
            wrong.append(f"{where}: {said}")
        for value in re.findall(r'\w="([a-z-]+)"', said):
            if value not in {*values, "none", "auto"}:
                wrong.append(f"{where}: is {value!r} a value? {said}")
    assert wrong == []


@pytest.mark.parametrize(
    ("flags", "arguments"),
    [
        ("use --transport gloo, not x", 'use transport="gloo", not x'),
        ("Use --workers 2, or --transport gloo --device cpu",
         'Use workers=2, or transport="gloo" device="cpu"'),
        ("Use --servers 1.", "Use servers=1."),
        ("choose another --out", "choose another `out`"),
        ("leave --workers out", "leave `workers` out"),
        ("with --out and --checkpoint-every it would go on",
         "with `out` and `checkpoint_every` it would go on"),
        ("or --plugin FILE.", "or plugin=FILE."),
        ("continue that run with --resume runs/a.b", 'continue that run with resume="runs/a.b"'),
        ("replace them with --force", "replace them with force=True"),
        ("or give --set transport=auto", 'or give transport="auto"'),
        ("(--deadline-s 0.5)", "(deadline_s=0.5)"),
        ("Get it with: paceline data fetch x   or try --data mnist, which is built in.",
         'Get it with: paceline data fetch x   or try data="mnist", which is built in.'),
        ("paceline testbed up --hosts 4 --rate 1m", "paceline testbed up --hosts 4 --rate 1m"),
        ("make it with: paceline prepare flights --out a", "make it with: paceline prepare flights"
         " --out a"),
        ("give it with --model package.module:factory, or", 'give it with'
         ' model="package.module:factory", or'),
        ("choose another --out: this one is taken", "choose another `out`: this one is taken"),
        ("a path like runs--a/b and --lr=0.1", "a path like runs--a/b and lr=0.1"),
    ],
)  # fmt: skip
def test_sentences(flags: str, arguments: str) -> None:
    assert in_python(flags) == arguments
    assert str(BadRequest(flags)) == arguments
    with on_the_command_line():
        assert str(BadRequest(flags)) == flags
    assert str(BadRequest(flags)) == arguments


def test_an_error_is_told_to_another_process_as_it_was_written() -> None:
    slow = PeerSlow(1, 3.0)
    assert "give_up_s" in str(slow)
    assert to_plain(slow) == {"error": "PeerSlow", "arguments": [1, 3.0, ""]}
    assert to_plain(BadRequest("use --lr 1")) == {
        "error": "BadRequest",
        "arguments": ["use --lr 1"],
    }


def test_errors_of_train_speak_of_arguments(run_inproc, capsys) -> None:
    run = run_inproc(steps=1)
    with pytest.raises(paceline.BadRequest, match=r'continue that run with resume="') as said:
        run_inproc(steps=1, out=str(run.out))
    assert "--" not in str(said.value)
    with pytest.raises(paceline.BadRequest, match=r'use device="cpu"'):
        run_inproc(device="cuda:9")


def test_the_same_errors_speak_of_flags_on_the_command_line(
    run_inproc, monkeypatch, capsys
) -> None:
    from paceline.cli.main import main

    run = run_inproc(model="mlp", steps=1)
    command = ["train", "--data", "fashion-mini", "--transport", "inproc", "--out", str(run.out)]
    monkeypatch.setattr("sys.argv", ["paceline", *command])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert f"continue that run with --resume {run.out}" in capsys.readouterr().err
