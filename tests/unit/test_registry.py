"""Registries: names, options, errors that name the fix, and the user's own components."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.common.values import convert
from paceline.errors import BadRequest, UnknownName
from paceline.registry import ALL, Registry, Spec, load_plugin, models, strategies


@pytest.fixture
def toys() -> Registry:
    registry: Registry = Registry("toy", "toys", "paceline.codecs")

    @registry.register("car")
    @dataclass
    class Car:
        """A car. With wheels."""

        wheels: Annotated[int, "how many"] = 4
        kind: Literal["fast", "slow"] = "fast"
        loud: bool = False

    @registry.register("map", positional="path")
    def make_map(where: str, path: str = "", scale: float = 1.0) -> tuple:
        return where, path, scale

    return registry


def test_options_come_from_the_signature(toys: Registry) -> None:
    car = toys.build("car:wheels=3,kind=slow,loud=yes")
    assert (car.wheels, car.kind, car.loud, car.name) == (3, "slow", True, "car")
    assert toys.entry("car").options["wheels"].help == "how many"


def test_what_has_no_default_is_injected(toys: Registry) -> None:
    assert toys.build("map:/a=b,c/d", where="here", unwanted=1) == ("here", "/a=b,c/d", 1.0)
    assert toys.build("map:path=x,scale=2", where="here") == ("here", "x", 2.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("carr", "Did you mean 'car'"),
        ("car:wheel=3", "Did you mean 'wheels'"),
        ("car:wheels=x", "not a whole number"),
        ("car:wheels=2.5", "not a whole number"),
        ("car:kind=green", "allowed are fast, slow"),
        ("car:loud=perhaps", "not true or false"),
        ("car:wheels", "importing|key=value"),
        (":x", "has no name: write NAME"),
    ],
)
def test_mistakes_name_the_fix(toys: Registry, text: str, message: str) -> None:
    with pytest.raises(BadRequest, match=f"(?i){message}"):
        toys.build(text)


def test_resolving_twice_changes_nothing(toys: Registry) -> None:
    once = toys.resolve("car:wheels=3,loud=no")
    assert toys.resolve(once) == once == toys.resolve(str(once))


def test_a_table_is_a_choice() -> None:
    assert str(Spec.of({"name": "ps", "staleness": 4})) == "ps:staleness=4"
    with pytest.raises(BadRequest, match="needs a `name`"):
        Spec.of({"staleness": 4})


def test_import_by_path(tmp_path: Path) -> None:
    (tmp_path / "my_nets.py").write_text(
        "import torch\ndef make(input_shape, classes, width=4):\n    return torch.nn.Linear(width,"
        " classes)\n"
    )
    assert models.build("my_nets:make:width=7", input_shape=(1,), classes=2).in_features == 7
    saved = str(models.resolve("my_nets:make:width=7"))
    assert saved == "my_nets:make:width=7"
    assert models.build(saved, input_shape=(1,), classes=2).in_features == 7
    with pytest.raises(UnknownName, match="no attribute"):
        models.build("my_nets:nothing")


def test_a_registered_name_is_not_taken_twice(toys: Registry) -> None:
    def other() -> None: ...

    other.__module__ = "somewhere.else"
    with pytest.raises(BadRequest, match="registered twice"):
        toys.register("car")(other)


def test_plugin_files(tmp_path: Path) -> None:
    for content, message in ((None, "not a file"), ("1/0", "ZeroDivisionError")):
        file = tmp_path / "broken_plugin.py"
        if content is not None:
            file.write_text(content)
        with pytest.raises(BadRequest, match=message):
            load_plugin(file)


@pytest.mark.parametrize("plural", list(ALL))
def test_everything_registered_says_what_it_is(plural: str) -> None:
    for entry in ALL[plural]:
        assert len(entry.summary) > 10, f"{plural} {entry.name} has no docstring"
        for option in entry.options.values():
            assert convert(option.default, option.kind, "default") == option.default


@given(
    st.integers() | st.booleans() | st.text() | st.none() | st.floats(),
    st.sampled_from([int, float, bool, str, tuple[int, ...]]),
)
def test_converting_anything_gives_a_value_or_a_sentence(value: object, kind: type) -> None:
    try:
        result = convert(value, kind, "x")
    except BadRequest as error:
        message = str(error)
    else:
        assert kind is str or isinstance(result, (int, float, bool, tuple))
        return
    assert message.startswith("x=")


def test_strategies_of_this_release_are_there() -> None:
    assert {"serial", "allreduce", "ddp"} <= set(strategies.names())


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import sys\nsys.exit(3)", "SystemExit: 3"),
        ("strategies.register('ps')(lambda: None)", "'ps' is registered twice"),
        ("strategies.register('mine')(lambda: None)\n1 / 0", "ZeroDivisionError"),
    ],
)
def test_of_a_plugin_that_fails_nothing_stays(tmp_path: Path, code: str, said: str) -> None:
    file = tmp_path / "failing_plugin.py"
    file.write_text(f"from paceline.registry import strategies\n{code}\n")
    before = strategies.names()
    for _ in range(2):  # the second time, too
        with pytest.raises(BadRequest, match=f"plugin {file} failed while it was loaded: .*{said}"):
            load_plugin(file)
    assert strategies.names() == before
    assert strategies.entry("ps").make.__module__ == "paceline.strategies.ps"


def test_a_factory_that_exits_is_refused_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "leaving.py").write_text("import sys\nsys.exit(3)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UnknownName, match="leaving:net"):
        models.entry("leaving:net")
