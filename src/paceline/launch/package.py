"""Packages for another interpreter, made by cloudpickle.

Classes that a notebook or a script defines travel by value, so the other interpreter does not run
the notebook or the script again. So do those of a module that Python cannot find by its name there,
such as a file that torch.hub has loaded.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any

import cloudpickle
import torch

from paceline.errors import BadRequest
from paceline.registry import PLUGIN, adopt_entries, interactive_entries, load_plugin


def pack(content: Any, plugins: Sequence[str] = ()) -> bytes:
    """Pack `content` with what it needs: registered classes, plugins, search path, dtype."""
    try:
        with _by_value(_found_nowhere()):
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
    try:
        entries, content = pickle.loads(inner)
    except (ImportError, AttributeError) as error:
        raise BadRequest(
            f"the workers' process cannot import what the model or the data needs ({error}): put"
            " the folder of that module on PYTHONPATH"
        ) from error
    adopt_entries(entries)
    return content


def _found_nowhere() -> list[ModuleType]:
    """The imported modules that another interpreter with the same path would not find.

    Plugins are not among them, since `unpack` loads them from their files.
    """
    folders = {os.path.abspath(folder) for folder in sys.path}
    found = []
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if "." in name or name == "__main__" or name.startswith(PLUGIN) or not file:
            continue
        inner = os.path.dirname(os.path.abspath(file))
        home = os.path.dirname(inner) if hasattr(module, "__path__") else inner
        if home not in folders and not _finds(name, file):
            found.append(module)
    return found


def _finds(name: str, file: str) -> bool:
    """Whether a finder of Python's (of an editable installation, say) gives this file."""
    for finder in sys.meta_path:
        with suppress(Exception):  # finders are other people's code
            spec = finder.find_spec(name, None)
            if spec is not None:
                return spec.origin == file
    return False


@contextmanager
def _by_value(modules: list[ModuleType]) -> Iterator[None]:
    """Let cloudpickle send the classes and functions of these modules by value."""
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)
