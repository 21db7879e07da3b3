"""Something to do, packed for another interpreter: classes of a notebook or a script travel along,
and it is not run again.
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
    try:
        inner = cloudpickle.dumps((interactive_entries(), content))
    except Exception as error:  # pickling runs a person's own code
        raise BadRequest(
            f"the model or the data cannot be sent to the workers' process ({type(error).__name__}:"
            f" {error}): give a class or a function that makes it"
        ) from error
    return pickle.dumps((list(sys.path), list(plugins), torch.get_default_dtype(), inner))


def unpack(package: bytes) -> Any:
    path, plugins, dtype, inner = pickle.loads(package)
    torch.set_default_dtype(dtype)
    sys.path[:] = path
    for plugin in plugins:
        load_plugin(plugin)
    entries, content = pickle.loads(inner)
    adopt_entries(entries)
    return content
