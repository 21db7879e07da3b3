"""Packages that only an extra installs, imported where they are needed."""

from __future__ import annotations

import importlib
from typing import Any

from paceline.errors import BadRequest


def need(module: str, package: str, extra: str, what: str) -> Any:
    """Import a package of an extra; say how to install it where it is missing.

    `what` names the thing that needs it, and begins the sentence.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise BadRequest(
            f"{what} needs {package}: pip install 'paceline[{extra}]' ({error})"
        ) from None
