"""The model of a finished run, built again from its record.

A run's folder may come from another person. So nothing in it is run: weights are safetensors, a
plugin is not loaded, and a name such as `mynet:Net` is imported only from the reader's own path,
never from the standard library and never from the run's folder.
"""

from __future__ import annotations

import copy
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from paceline.data.adopt import adopt
from paceline.errors import BadRequest, PacelineError
from paceline.registry import Spec, models, sources

Make = Callable[[], nn.Module]


def make_model(given: Any, record: dict[str, Any]) -> Make:
    """Return a function that builds the model that a person gave: a name, a Module, a class or a
    function.
    """
    if isinstance(given, nn.Module):
        return lambda: copy.deepcopy(given)
    if isinstance(given, str):
        spec = models.resolve(given)
        return lambda: _built(models.build(spec, **_shapes(record)), given)
    if callable(given):
        return lambda: _built(given(), given)
    raise BadRequest(
        f"model cannot be a {type(given).__name__}: give a name, a Module, a class or a function"
    )


def saved_model(record: dict[str, Any], out: Path) -> Make:
    """Return a function that builds the model that the record names. Refuses what has no name."""
    name = str(record["config"].get("model"))
    spec = Spec.of(name)
    if spec.name in models:
        return make_model(name, record)
    why = _not_importable(spec, out)
    if why is None:
        try:
            made = models.entry(spec).make
        except PacelineError as error:
            why = str(error.__cause__ or error)
        else:
            options = models.resolve(spec).options
            if options and not (isinstance(made, type) and issubclass(made, nn.Module)):
                why = "a saved name may set options of a class, not of a function"
            else:
                return make_model(name, record)
    raise BadRequest(
        f"the model of {out} cannot be built from its record: {name} is not a name that can be"
        f" imported here ({why}): give it with --model package.module:factory, or in Python as a"
        " class, a function or a Module"
    )


def _not_importable(spec: Spec, out: Path) -> str | None:
    """Return why a saved name must not or cannot be imported; None where it can."""
    attribute = spec.rest.partition(":")[0].partition(",")[0]
    if "<" in str(spec) or not attribute.isidentifier() or "=" in spec.rest.split(":")[0]:
        return "it was given in Python"
    package = spec.name.partition(".")[0]
    if package == "__main__":
        return "it was given in a script or a notebook"
    if package in sys.stdlib_module_names:
        return "it is in Python's standard library"
    # A name is also looked for in the current folder, which comes first on the path.
    here, folder = Path.cwd(), out.resolve()
    try:
        found = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        found = None
    places = [str(here)]
    if found is not None:
        places += [found.origin or "", *(found.submodule_search_locations or ())]
    elif not (here / f"{package}.py").is_file() and not (here / package).is_dir():
        return f"there is no module {package}"
    if any(place and Path(place).resolve().is_relative_to(folder) for place in places):
        return "that would run code from the run's folder"
    return None


def _shapes(record: dict[str, Any]) -> dict[str, Any]:
    """Return what a registered model is built for: the shape of an input, the number of classes.

    Records of 0.1.0 do not have it; for them the data is looked at, if Paceline itself has it.
    """
    known = record.get("model")
    if known:
        return {"input_shape": tuple(known["input_shape"]), "classes": known["classes"]}
    config = record["config"]
    name = str(config.get("data"))
    if Spec.of(name).name not in sources:
        return {}
    data = adopt(sources.build(name, data_dir=config.get("data_dir")), name, True)
    return {"input_shape": data.input_shape, "classes": data.classes}


def _built(model: Any, given: Any) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise BadRequest(f"model {given} gave a {type(model).__name__}, not a torch.nn.Module")
    return model


def filled(model: nn.Module, weights: dict[str, Any], out: Path) -> nn.Module:
    """Return the model with the weights, in evaluation mode. Refuses weights that do not fit."""
    inner = getattr(model, "_orig_mod", model)  # torch.compile's wrapper
    try:
        inner.load_state_dict(weights)
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines()]
        raise BadRequest(
            f"the weights of {out} do not fit this model: {' '.join(lines[1:2]) or lines[0]}"
        ) from None
    return model.eval()
