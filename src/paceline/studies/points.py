"""Points of a study's grid: the options of one setting, as a dictionary."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from paceline.common.cores import cores
from paceline.errors import BadRequest
from paceline.registry import Spec, strategies, transports
from paceline.request.config import SERIAL_DOES_NOT_KNOW, Config, strategy_for
from paceline.strategies.base import traits_of

NOT_AN_AXIS = (
    *("out", "resume", "max_time", "seed", "plugin", "data_dir", "target_accuracy", "callbacks"),
)


def alone(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of the serial run on the same work.

    Its batch is the sum of the workers' batches where those are given one by one.
    """
    kept = {k: v for k, v in options.items() if k not in SERIAL_DOES_NOT_KNOW} | {
        "strategy": "serial",
        "workers": 1,
    }
    sizes = kept.get("batch_size")
    if isinstance(sizes, (list, tuple)) or (isinstance(sizes, str) and "," in sizes):
        each = sizes.split(",") if isinstance(sizes, str) else sizes
        kept["batch_size"] = sum(int(size) for size in each)
    return kept


def product(base: dict[str, Any], axes: dict[str, list[Any]]) -> list[dict[str, Any]]:
    # an option inside a choice, such as `strategy.every`, is an axis with one value
    inside = {name: [value] for name, value in base.items() if "." in name}
    base, axes = (
        {name: value for name, value in base.items() if name not in inside},
        {**inside, **axes},
    )
    points = []
    for values in itertools.product(*axes.values()):
        point = dict(base)
        for name, value in sorted(zip(axes, values, strict=True), key=lambda pair: "." in pair[0]):
            outer, dot, inner = name.partition(".")
            chosen = point.get(outer) or Config.options()[outer].default or strategy_for(2)
            point[outer] = with_option(chosen, inner, value) if dot else value
        points.append(point)
    return points


def with_option(choice: Any, key: str, value: Any) -> Spec:
    """Set an option of a choice: `local-sgd:every=8` with every=16 is `local-sgd:every=16`."""
    spec = Spec.of(choice)
    pairs = [p.partition("=") for p in spec.rest.split(",")] if "=" in spec.rest else []
    options = {**{k.strip(): v for k, _, v in pairs}, **spec.options, key: value}
    return Spec(spec.name, options, "" if pairs else spec.rest)


def refuse_simulated(point: dict[str, Any]) -> None:
    """Refuse a transport with virtual time: the serial runs of a study are measured."""
    name = Spec.of(point.get("transport") or "auto").name
    if name in transports and transports.entry(name).make.traits.virtual_time:
        raise BadRequest(
            f"transport={name} in a study: the study's serial runs are measured, and simulated"
            " times cannot be compared with them; simulate single runs by paceline train"
        )


def is_serial(point: dict[str, Any]) -> bool:
    spec = Spec.of(point["strategy"])
    return spec.name in strategies and traits_of(strategies.entry(spec.name).make).most_workers == 1


def beside_the_point(name: str, point: dict[str, Any]) -> bool:
    return name in SERIAL_DOES_NOT_KNOW and is_serial(point)


def each_once(points: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for point in points:
        found.setdefault(repr(sorted((k, as_text(v)) for k, v in point.items())), point)
    return list(found.values())


def as_text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value))
    if isinstance(value, Mapping):
        return str(Spec.of(value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def workers_of(point: dict[str, Any]) -> int:
    """Return the workers of a point: as given, or as many as its form and grid need."""
    shape = ("workers", "parallel", "grid", "cut")
    return Config.make({k: point[k] for k in shape if point.get(k) is not None}).workers


def counted(options: dict[str, Any]) -> dict[str, Any]:
    """Return options with `cores` in the number of workers replaced by a number."""
    if "workers" not in options:
        return options
    return {**options, "workers": worker_counts(options["workers"])}


def worker_counts(values: Any) -> Any:
    """Replace `cores` and `2*cores` by numbers, in a value or a list of values."""
    if isinstance(values, list):
        return list(dict.fromkeys(worker_counts(value) for value in values))
    text = str(values).replace(" ", "") if isinstance(values, str) else ""
    if not text.endswith("cores"):
        return values
    times = text.removesuffix("cores").removesuffix("*") or "1"
    if not (times.isascii() and times.isdecimal() and int(times) > 0):
        raise BadRequest(f"workers={values!r}: write a number, cores, or 2*cores")
    return int(times) * cores()
