"""Names that people read: of a setting, of a run, of the folder of a run that was given none."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, Subset

from paceline.registry import Registry, Spec, models, sources, strategies
from paceline.request.config import Config

LONGEST = 24  # characters of each part
# shown without the option's name
NAMES_THEMSELVES = ("strategy", "parallel", "model", "optimizer", "data", "codec")
NOTHING = {("codec", "none"), ("parallel", "none"), ("parallel", "None"), ("grid", "None")}


def label_of(options: Mapping[str, str]) -> str:
    """Return the name of a setting, from the options that differ between settings: `allreduce,
    lr=0.1`.
    """
    said = {k: v for k, v in options.items() if (k, v) not in NOTHING}
    if "parallel" in said and said.get("strategy") == "allreduce":  # the default along the copies
        del said["strategy"]
    return ", ".join(
        value if name in NAMES_THEMSELVES else f"{name}={value}" for name, value in said.items()
    )


def default_out(config: Config) -> Path:
    """Return runs/20261115-203012-cnn-mnist-allreduce-2, or runs/...-Net-tensors-... for a model
    and data that were given in Python.
    """
    parts = [
        _word(config.model, models),
        _word(config.data, sources),
        _word(config.strategy, strategies)
        if config.parallel is None
        else Spec.of(config.parallel).name,
        str(config.workers),
    ]
    return Path("runs") / "-".join([time.strftime("%Y%m%d-%H%M%S"), *(p for p in parts if p)])


def kept_together(config: Mapping[str, Any]) -> str:
    """Return how a run's workers kept together, from its record: a strategy, or a form."""
    form = config.get("parallel")
    if form is None:
        return str(config["strategy"])
    several = not str(config.get("grid") or "data=1,").startswith("data=1,")
    return f"{form}, {config['strategy']}" if several else str(form)


def _word(value: Any, registry: Registry[Any]) -> str:
    """Return one word for what was chosen; "" where it has no name (a lambda)."""
    if isinstance(value, (Spec, str)):
        value = Spec.of(value)
        # `mynet:Net:hidden=5` is called Net
        own = value.rest.partition(":")[0].partition(",")[0]
        name = value.name if value.name in registry or not own else own
    else:
        name = _name_of(value)
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:LONGEST]


def _name_of(value: Any) -> str:
    """Return the name of an object: of a function or class its own, of data that of its content."""
    if isinstance(value, (tuple, list)) and value:
        return _name_of(value[0])  # (train, test), or (inputs, targets)
    if isinstance(value, (DataLoader, Subset)):
        return _name_of(value.dataset)
    if isinstance(value, Tensor):
        return "tensors"
    name = getattr(value, "__name__", None) or getattr(value, "name", None)
    name = name if isinstance(name, str) else type(value).__name__
    return "" if name == "<lambda>" else name
