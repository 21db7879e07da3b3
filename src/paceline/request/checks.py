"""The value of an option as a person gave it, checked and converted."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date, time
from pathlib import Path
from typing import Any

from paceline.common.intervals import interval, interval_or_time
from paceline.common.units import LONG_TIMES, parse_unit
from paceline.common.values import convert, format_value, is_path, shortened
from paceline.errors import BadRequest
from paceline.registry import Spec
from paceline.request.callbacks import as_given
from paceline.request.groups import read_groups

CHOICES = (
    "model",
    "data",
    "loss",
    "metric",
    "strategy",
    "parallel",
    "codec",
    "optimizer",
    "lr_schedule",
    "transport",
)


def checked(name: str, value: Any, kind: Any, default: Any) -> Any:
    """Return the value of an option as its kind. Refuses what cannot be one."""
    if value is None:
        if default is not None:
            raise BadRequest(f"{name} needs a value")
        return None
    if name == "metric" and (several := _several(value)):
        return tuple(_choice(name, each, default) for each in several)
    if name in ("privacy", "parallel") and value == "none":
        return None
    if name in CHOICES:
        return _choice(name, value, default)
    if name == "privacy" and isinstance(value, Mapping):
        return ",".join(f"{key}={format_value(v)}" for key, v in value.items())
    if name == "step":
        return value
    if name == "groups":
        return read_groups(value)
    if name == "compile":
        if not isinstance(value, (str, bool)):
            raise BadRequest(f"compile={shortened(value)}: it must be true, or a backend's name")
        return {"True": "inductor", "true": "inductor"}.get(
            str(value), None if str(value).lower() == "false" else str(value)
        )
    if name in ("plugin", "faults"):
        if not isinstance(value, (str, list, tuple)):
            raise BadRequest(f"{name}={value!r} is not text or a list of texts")
        return (value,) if isinstance(value, str) else tuple(str(v) for v in value)
    if name == "callbacks":
        return as_given(value)
    if name in ("batch_size", "global_batch_size"):
        return _batch_sizes(name, value)
    if name == "threads" and value != "auto":
        return convert(value, int, name)
    if name == "evaluate_every":
        return interval(name, value)
    if name == "checkpoint_every":
        return interval_or_time(name, value)
    if name == "max_time":
        if not parse_unit(str(value), LONG_TIMES, name) > 0:
            raise BadRequest(f"max_time={value}: it must be more than 0 s")
        return str(value).strip()
    if name == "validation":
        return _validation(value)
    if name in ("out", "data_dir", "resume"):
        if not isinstance(value, (str, Path)) or not is_path(str(value)):
            raise BadRequest(f"{name}={shortened(value)} is not a path")
        return str(value)
    return convert(value, kind, name)


def _validation(value: Any) -> Any:
    """Return a share of the training set as a number; a data set, given in Python, as it is."""
    plain = (type(None), bool, int, float, str, date, time)
    listed = isinstance(value, (list, tuple)) and all(isinstance(each, plain) for each in value)
    if listed or isinstance(value, (Mapping, bool)):
        raise BadRequest(
            f"validation={shortened(value)}: it must be a share of the training set, or, in Python,"
            " a data set"
        )
    if not isinstance(value, (str, int, float)):
        return value
    share = convert(value, float, "validation")
    if not 0.0 < share < 1.0:
        raise BadRequest(
            f"validation={share:g}: it must be a share of the training set, more than 0 and less"
            " than 1"
        )
    return share


def _several(value: Any) -> list[Any]:
    """Return the metrics of a list, or of a text like `accuracy,auc`; empty: it is one metric."""
    if isinstance(value, str) and "," in value and ":" not in value:
        return [word.strip() for word in value.split(",")]
    return list(value) if isinstance(value, (list, tuple)) else []


def _choice(name: str, value: Any, default: Any) -> Any:
    """Return a name with its options; or, given in Python, the object itself."""
    if isinstance(value, (str, Mapping, Spec)):
        return Spec.of(value)
    # request/job.py refuses wrong ones with a better sentence
    if name in ("model", "optimizer", "metric", "strategy"):
        return value
    plain = (type(None), bool, int, float, str, date, time)
    wrong = isinstance(value, plain)
    if isinstance(value, (list, tuple)):
        wrong = name != "data" or all(isinstance(each, plain) for each in value)
    if wrong or name in ("transport", "codec"):
        objects = " (in Python: or tensors, a Dataset, a DataLoader)" if name == "data" else ""
        raise BadRequest(
            f'{name}={shortened(value)} is not a name: write it as text, {name} = "{default}", say'
            f"{objects}"
        )
    return value


def _batch_sizes(name: str, value: Any) -> int | str | tuple[int, ...]:
    if value == "all":
        return "all"
    parts = value if isinstance(value, (list, tuple)) else str(value).split(",")
    sizes: tuple[int, ...] = tuple(convert(p, int, name) for p in parts)
    if not sizes:
        raise BadRequest(f"{name}={value!r}: it must be a number of samples, 64, say, or all")
    if len(sizes) > 1 and name == "batch_size":
        if any(s < 0 for s in sizes) or not any(sizes):
            raise BadRequest(f"{name}={value}: sizes are 0 or more, and not all 0")
        return sizes
    positive(name, sizes[0])
    if len(sizes) > 1:
        raise BadRequest(f"{name}={value}: one number; a list goes into batch_size")
    return sizes[0]


def positive(name: str, value: int) -> None:
    if value < 1:
        raise BadRequest(f"{name}={value}: it must be 1 or more")


def in_range(name: str, value: float | None, low: float, high: float | None) -> None:
    if value is None:
        return
    if not (value >= low and (high is None or value <= high) and value < float("inf")):
        span = f"between {low:g} and {high:g}" if high is not None else f"{low:g} or more"
        raise BadRequest(f"{name}={value}: it must be {span}")
