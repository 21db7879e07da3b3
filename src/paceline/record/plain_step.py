"""A short check of the events of steps: a long run has millions, and a general check is slow."""

from __future__ import annotations

from typing import Any

from paceline.record.formats import EVENT, EVENTS, GO_TOGETHER
from paceline.record.shapes import LARGEST, IfThere, number, whole

_STEP = {**EVENT, **EVENTS["step"], **GO_TOGETHER["step"]}
_WHOLE = frozenset(name for name, shape in _STEP.items() if shape is whole)
_NUMBERS = frozenset(name for name, shape in _STEP.items() if shape is number)
_MAY_BE = frozenset(name for name, shape in _STEP.items() if shape == IfThere(number))
_MUST_BE = _WHOLE | _NUMBERS | {"kind", "loss", "waits"}
_ALL = _MUST_BE | _MAY_BE


def is_plain_step(event: Any) -> bool:
    """Whether it is surely the event of a step with fields of the right kinds.

    False only means that the general check decides: for other kinds, and for fields that only some
    strategies have.
    """
    if type(event) is not dict or event.get("kind") != "step":
        return False
    if not _MUST_BE <= event.keys() <= _ALL:
        return False
    for name, value in event.items():
        kind = type(value)
        if kind is int:
            right = name not in ("kind", "loss", "waits") and 0 <= value <= LARGEST
        elif kind is float:
            right = name not in _WHOLE and name not in ("kind", "waits") and abs(value) <= LARGEST
        else:
            right = (name == "loss" and value is None) or name == "kind"
            right = right or (name == "waits" and kind is bool)
        if not right:
            return False
    return True
