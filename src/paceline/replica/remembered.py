"""Choices that were measured on this machine, kept so that a repeated run makes them again."""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from paceline.common.files import write_whole
from paceline.common.places import cache_folder

MOST = 1000  # choices that are kept
NAME = "memory_formats.json"


def key_of(model: nn.Module, inputs: Any, *more: object) -> str:
    """Identify a model, the shape of its inputs and what else a measurement depends on."""
    parameters = [(name, tuple(p.shape), str(p.dtype)) for name, p in model.named_parameters()]
    shape = tuple(inputs.shape) if isinstance(inputs, Tensor) else None
    said = repr((type(model).__qualname__, str(model), parameters, shape, more))
    return hashlib.sha256(said.encode()).hexdigest()[:20]


def recall(key: str) -> str | None:
    """Return a choice that was made before."""
    return _read().get(key)


def remember(key: str, choice: str) -> None:
    """Keep a choice. A cache that cannot be written is no error: the choice is measured again."""
    kept = {**_read(), key: choice}
    newest = dict(list(kept.items())[-MOST:])
    with contextlib.suppress(OSError):
        path = place()
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(newest, indent=0) + "\n")


def place() -> Path:
    """The file in which choices are kept."""
    return cache_folder("choices") / NAME


def count() -> int:
    """The number of choices that are kept."""
    return len(_read())


def _read() -> dict[str, str]:
    try:
        found = json.loads(place().read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {k: v for k, v in found.items() if v in ("contiguous", "channels_last")}
