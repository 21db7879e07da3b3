"""The callbacks of a request: names, objects and classes, checked and made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from paceline.callbacks.base import Callback
from paceline.common.values import shortened
from paceline.errors import BadRequest
from paceline.registry import Spec, callbacks

IN_PYTHON = "<"  # how the saved text of an object begins: it cannot be made from that text


def check_callbacks(given: Iterable[Any]) -> tuple[Any, ...]:
    """Return the callbacks with their names looked up and their options checked.

    Refuses unknown names, missing extras, and objects that are no callbacks.
    """
    checked: list[Any] = []
    for each in given:
        if isinstance(each, (str, Mapping, Spec)) and not str(each).startswith(IN_PYTHON):
            spec = callbacks.resolve(Spec.of(each))
            _is_one(callbacks.build(spec), str(spec))
            if str(spec) in checked:
                raise BadRequest(f"callbacks: {spec} is given twice")
            checked.append(str(spec))
        else:
            checked.append(each)
    return tuple(checked)


def make_callbacks(given: Iterable[Any]) -> tuple[tuple[Callback, ...], tuple[str, ...], list[str]]:
    """Return the callbacks, the text that the saved config has for each, and notices."""
    made: list[Callback] = []
    texts: list[str] = []
    gone = [each for each in given if isinstance(each, str) and each.startswith(IN_PYTHON)]
    for each in given:
        if isinstance(each, str):
            if each not in gone:
                made.append(callbacks.build(each))
                texts.append(each)
        else:
            made.append(_from_class(each) if isinstance(each, type) else each)
            texts.append(f"{IN_PYTHON}{type(made[-1]).__name__}>")
    notices = [
        f"callbacks {', '.join(gone)} were given in Python and are not called from now on:"
        " pass them again to resume with them"
    ]
    return tuple(made), tuple(texts), notices if gone else []


def _from_class(given: type) -> Callback:
    try:
        return _is_one(given(), given.__qualname__)
    except TypeError as error:
        raise BadRequest(
            f"callback {given.__qualname__} cannot be made without arguments: give an object of"
            f" it ({error})"
        ) from error


def _is_one(made: Any, name: str) -> Callback:
    if not isinstance(made, Callback):
        raise BadRequest(f"callback {name} is a {type(made).__name__}, not a paceline.Callback")
    return made


def as_given(value: Any) -> tuple[Any, ...]:
    """Return the value of the option `callbacks` as a tuple. Refuses what cannot be a callback."""
    several = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    for each in several:
        is_class = isinstance(each, type) and issubclass(each, Callback)
        if not is_class and not isinstance(each, (str, Mapping, Spec, Callback)):
            raise BadRequest(
                f"callbacks: {shortened(each)} is not a callback: give a name (paceline list"
                " callbacks), an object of a subclass of paceline.Callback, or such a class"
            )
    return several


def refuse_objects(value: Any, launcher: str = "spark") -> None:
    """Refuse callbacks that are objects where worker 0 runs on another host (Spark, Ray).

    Names are looked up on that host, and called there.
    """
    for each in as_given(value):
        if not isinstance(each, (str, Mapping, Spec)):
            raise BadRequest(
                f"callbacks: {each} cannot be called with launcher={launcher}, because worker 0 is"
                " in a process of the cluster: give a name, csv or package.module:Class, say"
            )
