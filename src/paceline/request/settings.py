"""Options that are changed one by one: `--set lr=0.1`, `--set strategy.every=8`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.errors import BadRequest, UnknownName
from paceline.registry import Spec
from paceline.request.checks import CHOICES
from paceline.request.config import Config, strategy_for


def apply_settings(values: Mapping[str, Any], settings: list[str]) -> dict[str, Any]:
    """Return the options with `--set` applied: `lr=0.1`, `strategy.every=8`."""
    result, known = dict(values), Config.options()
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise BadRequest(f"--set {setting}: write --set name=value")
        name, dot, inner = key.strip().replace("-", "_").partition(".")
        if name not in known:
            raise UnknownName("option", name, known)
        if not dot:
            result[name] = value
        elif name not in CHOICES:
            raise BadRequest(
                f"--set {setting}: {name} has no options of its own; these have:"
                f" {', '.join(CHOICES)}"
            )
        else:
            # only the strategy has no default
            chosen: Any = result.get(name) or known[name].default or strategy_for(2)
            result[name] = Spec.of(chosen).with_option(inner, value)
    return result
