"""Packages for another interpreter, made by cloudpickle.

Classes that a notebook or a script defines travel by value, so the other interpreter does not run
the notebook or the script again.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Sequence
from typing import Any

import cloudpickle
import torch

from paceline.errors import BadRequest
from paceline.registry import adopt_entries, interactive_entries, load_plugin


def pack(content: Any, plugins: Sequence[str] = ()) -> bytes:
    """Pack `content` with what it needs: registered classes, plugins, search path, dtype."""
    try:
        inner = cloudpickle.dumps((interactive_entries(), content))
    except Exception as error:  # pickling runs the user's code
        raise BadRequest(
            "the model or the data cannot be pickled for the workers"
            f" ({type(error).__name__}: {error}): give a class or a function that makes it"
        ) from error
    return pickle.dumps((list(sys.path), list(plugins), torch.get_default_dtype(), inner))


def unpack(package: bytes) -> Any:
    """Set this interpreter up as `pack` found its own, and return the content."""
    path, plugins, dtype, inner = pickle.loads(package)
    torch.set_default_dtype(dtype)
    sys.path[:] = path
    for plugin in plugins:
        load_plugin(plugin)
    entries, content = pickle.loads(inner)
    adopt_entries(entries)
    return content
