"""`train`, `study` and `join` have real signatures, in step with the options.

After an option was added, write the stub again with `make written`, or with
PACELINE_WRITE_DOCS=1 python -m pytest tests/test_signatures.py
"""

import inspect
import os
import pydoc

import pytest

import paceline
from paceline.request.config import Config
from paceline.request.signature import TYPES, expanded, type_of
from tests import stub


def test_train_has_every_option_with_its_default_and_type() -> None:
    shown = inspect.signature(paceline.train).parameters
    options = Config.options()
    assert list(shown) == [*options, "progress", "watch"]
    for name, field in options.items():
        assert shown[name].default == field.default
        assert shown[name].annotation == expanded(type_of(name, field))
        assert shown[name].kind is inspect.Parameter.KEYWORD_ONLY
    assert set(options) >= set(TYPES)
    assert shown["out"].annotation == "str | Path | None"
    assert str(shown["workers"]) == "workers: 'int' = 1"
    assert shown["precision"].annotation == 'Literal["fp32", "bf16", "fp16"]'


def test_study_has_them_too_beside_its_own() -> None:
    shown = inspect.signature(paceline.study).parameters
    assert next(iter(shown)) == "file"
    assert set(shown) == {*Config.options(), "file", "variant", "seeds", "progress", "watch"}


def test_ray_train_has_them_too() -> None:
    shown = inspect.signature(paceline.ray_train).parameters
    assert set(shown) == {*Config.options(), "max_failures", "storage_path", "progress"}


@pytest.mark.parametrize("name", ["train", "study", "ray_train"])
def test_help_documents_each_option(name: str) -> None:
    text = pydoc.plain(pydoc.render_doc(getattr(paceline, name)))
    documented = getattr(paceline, name).__doc__
    for option in set(Config.options()) - {"out"}:
        assert f"{option}: " in documented, option
    assert "workers: how many workers" in text
    assert "--" not in documented  # arguments, not flags
    assert "instead of `batch_size`" in documented


def test_join_and_load_have_types_and_documentation() -> None:
    for function in (paceline.join, paceline.load):
        signature = inspect.signature(function)
        assert inspect.getdoc(function)
        for parameter in signature.parameters.values():
            assert parameter.annotation is not parameter.empty, parameter
            assert parameter.kind is not parameter.VAR_KEYWORD
    documented = inspect.getdoc(paceline.join)
    for name in inspect.signature(paceline.join).parameters:
        assert f"`{name}`" in documented, f"join does not document {name}"


def test_the_stub_is_what_the_options_say() -> None:
    wanted = stub.written()
    if os.environ.get("PACELINE_WRITE_DOCS"):
        stub.PATH.write_text(wanted)
    assert stub.PATH.read_text() == wanted, "write it again: the first lines of this file say how"


def test_an_option_that_does_not_exist_is_still_refused() -> None:
    with pytest.raises(paceline.BadRequest, match="Did you mean 'workers'"):
        paceline.train(worker=2)


def test_options_that_were_not_given_are_those_of_the_resumed_run(run_inproc) -> None:
    first = run_inproc(steps=4, checkpoint_every=2, lr=0.25)
    again = run_inproc(resume=str(first.out), steps=6, out=str(first.out))
    assert again.record["config"]["lr"] == 0.25
