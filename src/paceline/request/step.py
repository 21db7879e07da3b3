"""A training step of the user's own: a function of (model, batch) that returns the loss."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from paceline.errors import BadRequest
from paceline.registry import Spec
from paceline.request.config import Config

Step = Callable[[Any, Any], Tensor]


def step_function(given: Any) -> Step | None:
    """Return the function that was given, or that `module:function` names."""
    if given is None or (callable(given) and not isinstance(given, (type, Spec))):
        return given
    module, colon, name = str(given).partition(":")
    if not isinstance(given, str) or not colon:
        raise BadRequest(
            f"step={given}: give a function of (model, batch) that returns the loss, or its name as"
            " module:function"
        )
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:  # importing runs the user's code
        raise BadRequest(f"step={given} cannot be imported: {error}") from error
    if not callable(found):
        raise BadRequest(f"step={given} is a {type(found).__name__}, not a function")
    return found  # type: ignore[no-any-return]


def check_step(config: Config) -> None:
    """Refuse options that a step of the user's own decides itself, or that look into it."""
    function = step_function(config.step)
    if function is None:
        return
    _check_arguments(function)
    for name in ("loss", "metric"):
        given = getattr(config, name)
        if not (isinstance(given, Spec) and given.name in ("auto", "none")):
            raise BadRequest(
                f"{name} and step: your step computes the loss itself, and returns nothing else to"
                f" compute a {name} from; leave one of them out"
            )
    for name in ("until_accuracy", "target_accuracy", "privacy"):
        if getattr(config, name) is not None:
            why = (
                "private training computes each sample's gradient itself"
                if name == "privacy"
                else "a step of your own gives the loss only"
            )
            raise BadRequest(f"{name} cannot be used with step: {why}")


def _check_arguments(function: Step) -> None:
    """Refuse a function that cannot be called with a model and a batch."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # written in C, say: its first call will tell
        return
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise BadRequest(
            f"step is called with (model, batch), and your function takes {signature}: {error}"
        ) from None
