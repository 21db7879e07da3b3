"""A study as a person writes it (`study.toml`), and the grid of settings that follows from it.

title = "Which strategy is best here?"
seeds = 3                       # or a list of seeds; every setting is run once with each
target_accuracy = 0.95
[base]                          # options of `train` that all runs share
model = "cnn"
global_batch_size = 120
[axes]                          # options to vary: every combination of their values is a setting
strategy = ["allreduce", "local-sgd:every=8"]       # "strategy.every" varies a strategy's option
workers = [1, 2, 4]
[[also]]                        # further settings beside the grid; a list is an axis of this group
strategy = "ddp"
workers = 2
[short]                         # what `--short` replaces
seeds = 1
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from paceline.common.files import read_toml
from paceline.errors import BadRequest, UnknownName
from paceline.record.machine import cores
from paceline.registry import Spec, load_plugin, strategies
from paceline.request.checks import CHOICES
from paceline.request.config import (
    SERIAL_DOES_NOT_KNOW,
    Config,
    apply_settings,
    label_of,
    strategy_for,
)
from paceline.request.names import resolve_names

BUILTIN = Path(__file__).parent / "builtin.toml"
DEFAULT_GLOBAL_BATCH = 120  # divides by 1 to 6
NOT_AN_AXIS = ("out", "resume", "seed", "plugin", "data_dir", "target_accuracy")
MOST_RUNS = 10_000


@dataclass(frozen=True)
class Setting:
    """One point of the grid: the options of its runs except the seed."""

    options: dict[str, Any]
    varied: dict[str, str]  # the options that differ between settings, as text
    baseline: bool = False  # the study added this serial setting to compare with

    @property
    def strategy(self) -> str:
        return str(self.options["strategy"])

    @property
    def workers(self) -> int:
        return int(self.options["workers"])

    @property
    def label(self) -> str:
        """The setting's name, without the number of workers."""
        return label_of(self.varied) or self.strategy

    @property
    def slug(self) -> str:
        return re.sub(r"[^A-Za-z0-9._=-]+", "-", f"{self.label} p{self.workers}").strip("-")


@dataclass(frozen=True)
class StudySpec:
    """A study as a person wrote it."""

    title: str = ""
    question: str = ""
    base: dict[str, Any] = field(default_factory=dict)
    axes: dict[str, list[Any]] = field(default_factory=dict)
    also: list[dict[str, Any]] = field(default_factory=list)
    seeds: tuple[int, ...] = (0,)
    scaling: Literal["strong", "weak"] = "strong"
    target_accuracy: float | None = None
    budget_s: float | None = None  # a further round begins only if it fits into this time
    all_cores: bool = True  # add a serial setting with a thread for every core
    cut: str = ""  # what the study leaves out to be quick, in words, for the report
    name: str = "study"

    @classmethod
    def read(cls, path: str | Path, variant: Literal["", "short", "full"] = "") -> StudySpec:
        path = Path(path)
        return cls.make(read_toml(path), path.stem if path != BUILTIN else "study", variant)

    @classmethod
    def make(
        cls,
        given: Mapping[str, Any],
        name: str = "study",
        variant: Literal["", "short", "full"] = "",
    ) -> StudySpec:
        """Return the study of a TOML table; refuse unknown names and values out of range."""
        table = dict(given)
        if not table:
            raise BadRequest(
                f"study {name} is empty: it needs [axes], the options to vary and their values"
                " (docs/studies.md)"
            )
        variants = {key: _table(key, table.pop(key, None)) for key in ("short", "full")}
        known = [k for k in cls.__dataclass_fields__ if k != "name"]
        for part in (table, *(v for v in variants.values() if v)):
            for key in part:
                if key not in known:
                    raise UnknownName("part of a study", key, [*known, *variants])
            for key in ("base", "axes"):
                _table(key, part.get(key))
            if not isinstance(part.get("also", []), list) or not all(
                isinstance(e, dict) for e in part.get("also", [])
            ):
                raise BadRequest("also: write it as [[also]], once for each group of settings")
        chosen = variants.get(variant)
        if variant and not chosen:
            raise BadRequest(f"study {name} has no [{variant}] setting")
        for key, value in (chosen or {}).items():
            table[key] = {**table.get(key, {}), **value} if key in ("base", "axes") else value
        if variant == "full" and "cut" not in (chosen or {}):
            table["cut"] = ""
        study = cls(**{**table, "seeds": _seeds(table.get("seeds", 1))}, name=name)
        study._check()
        return study

    def changed(
        self, settings: Iterable[str] = (), *, seeds: int | None = None, **base: Any
    ) -> StudySpec:
        """Return the study with other options for all runs, such as `lr=0.1` or
        `strategy.every=8`.

        An option that is given here is no longer an axis.
        """
        settings = list(settings)
        given = {k: v for k, v in base.items() if v is not None}
        options = apply_settings({**self.base, **given}, settings)
        # names of the options that are set, such as `workers` and `strategy.every`
        whole = {*given, *(s.partition("=")[0].strip().replace("-", "_") for s in settings)}

        def kept(table: dict[str, Any]) -> dict[str, Any]:
            return {
                k: v
                for k, v in table.items()
                if k not in whole and k.partition(".")[0] not in whole
            }

        study = replace(
            self,
            base={k: v for k, v in options.items() if k != "target_accuracy"},
            axes=kept(self.axes),
            also=[kept(e) for e in self.also],
            seeds=self.seeds if seeds is None else _seeds(seeds),
            target_accuracy=(
                float(options["target_accuracy"])
                if "target_accuracy" in options
                else self.target_accuracy
            ),
        )
        study._check()
        return study

    def _check(self) -> None:
        options = Config.options()
        for name, values in self.axes.items():
            _check_option(name, options, "axis")
            if not isinstance(values, list):
                raise BadRequest(f"axis {name} is {values!r}: write a list of values")
            if not values:
                raise BadRequest(f"axis {name} has no values: the grid is empty")
            for value in values if "." not in name else ():
                Config.make({name: value})
        for table in (self.base, *self.also):
            for name, value in table.items():
                _check_option(name, options, "option")
                for each in (
                    value if isinstance(value, list) and table is not self.base else [value]
                ):
                    if "." not in name:
                        Config.make({name: each})
        for name in ("title", "question", "cut"):
            if not isinstance(getattr(self, name), str):
                raise BadRequest(f"{name}={getattr(self, name)!r} is not text")
        if not isinstance(self.all_cores, bool):
            raise BadRequest(f"all_cores={self.all_cores!r} is not true or false")
        if self.scaling not in ("strong", "weak"):
            raise BadRequest(
                f"scaling={self.scaling}: use strong (the same work for every number of workers) or"
                " weak (the same work for each worker)"
            )
        for name, low, high in (("target_accuracy", 0.0, 1.0), ("budget_s", 1.0, 1e9)):
            value = getattr(self, name)
            fits = (
                isinstance(value, (int, float))
                and not isinstance(value, bool)
                and low <= value <= high
            )
            if value is not None and not fits:
                raise BadRequest(
                    f"{name}={value}: it must be a number between {low:g} and {high:g}"
                )
        for plugin in Config.make({"plugin": self.base.get("plugin", ())}).plugin:
            load_plugin(plugin)
        for setting in self.settings():
            resolve_names(Config.make({**setting.options, "seed": self.seeds[0]}))

    # --- the grid

    def settings(self) -> list[Setting]:
        """Return every setting once: the serial baselines, the grid, and `also`."""
        points = [*_product(self.base, self.axes)] if self.axes or not self.also else []
        for extra in self.also:
            axes = {k: v for k, v in extra.items() if isinstance(v, list)}
            points += _product(
                {**self.base, **{k: v for k, v in extra.items() if k not in axes}}, axes
            )
        points = [self._completed(p) for p in points]
        baselines = [self._serial(p, 1) for p in points]
        if self.all_cores and cores() > 1:
            baselines += [self._serial(p, cores()) for p in points]
        asked, all_points = _once(points), _once([*baselines, *points])
        if len(all_points) * len(self.seeds) > MOST_RUNS:
            raise BadRequest(
                f"the study has {len(all_points) * len(self.seeds):,} runs; at most"
                f" {MOST_RUNS:,} are allowed: give fewer values or seeds"
            )
        names = sorted({k for p in all_points for k in p}, key=list(Config.options()).index)
        varied = [
            n
            for n in names
            if n not in ("workers", "threads") and len({_text(p.get(n)) for p in asked}) > 1
        ]
        threads_differ = len({p["threads"] for p in all_points}) > 1

        def differs(point: dict[str, Any]) -> dict[str, str]:
            shown = {
                n: _text(point[n])
                for n in varied
                if n in point and (n == "strategy" or not _beside_the_point(n, point))
            }
            if _is_serial(point) and "strategy" not in shown:
                shown = {"strategy": "serial", **shown}
            elif "strategy" not in shown and any(
                _is_serial(p) != _is_serial(point) for p in all_points
            ):
                shown = {"strategy": _text(point["strategy"]), **shown}
            if threads_differ and point["threads"] != 1:
                shown["threads"] = str(point["threads"])
            return shown

        return [Setting(p, differs(p), p not in asked) for p in all_points]

    def _completed(self, point: dict[str, Any]) -> dict[str, Any]:
        """Add a study's defaults: one thread per worker and a global batch."""
        workers = Config.make({"workers": point.get("workers", 1)}).workers
        whole = {
            "strategy": "allreduce" if workers > 1 else "serial",
            "threads": 1,
            **point,
            "workers": workers,
        }
        if self.target_accuracy is not None:
            whole["target_accuracy"] = self.target_accuracy
        if "batch_size" not in whole and "global_batch_size" not in whole:
            whole["global_batch_size"] = DEFAULT_GLOBAL_BATCH
        return alone(whole) if _is_serial(whole) else whole

    def _serial(self, point: dict[str, Any], threads: int) -> dict[str, Any]:
        return {**alone(point), "threads": threads}

    def described(self) -> dict[str, Any]:
        """Return the study as JSON values."""
        return {
            name: getattr(self, name) if name != "seeds" else list(self.seeds)
            for name in self.__dataclass_fields__
            if name not in ("name", "base", "axes", "also")
        } | {
            "base": {k: _text(v) for k, v in self.base.items()},
            "axes": {k: [_text(v) for v in values] for k, values in self.axes.items()},
            "also": [
                {
                    k: [_text(x) for x in v] if isinstance(v, list) else _text(v)
                    for k, v in e.items()
                }
                for e in self.also
            ],
        }


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


def _table(name: str, given: Any) -> dict[str, Any]:
    if given is not None and not isinstance(given, dict):
        raise BadRequest(f"{name} is {given!r}: write it as a table, [{name}]")
    return given or {}


def _check_option(name: str, options: Mapping[str, Any], kind: str) -> None:
    outer, dot, _ = name.partition(".")
    if (
        outer not in options
        or (outer in NOT_AN_AXIS and kind == "axis")
        or outer in ("out", "resume", "seed")
    ):
        hint = " (seeds are given by `seeds`)" if outer == "seed" else ""
        raise UnknownName(kind, name + hint, [o for o in options if o not in NOT_AN_AXIS])
    if dot and outer not in CHOICES:
        raise BadRequest(
            f"{kind} {name}: {outer} has no options of its own; these have: {', '.join(CHOICES)}"
        )


def _seeds(given: Any) -> tuple[int, ...]:
    if isinstance(given, bool) or not isinstance(given, (int, list, tuple)):
        raise BadRequest(f"seeds={given!r}: write a number of seeds, or a list of seeds")
    if isinstance(given, int) and given > MOST_RUNS:
        raise BadRequest(f"seeds={given}: a study has at most {MOST_RUNS:,} runs; give fewer seeds")
    seeds = tuple(range(given)) if isinstance(given, int) else tuple(given)
    plain = all(isinstance(s, int) and not isinstance(s, bool) for s in seeds)
    if not seeds or not plain or len(set(seeds)) < len(seeds):
        raise BadRequest(f"seeds={given!r}: write one or more different whole numbers")
    return seeds


def _product(base: dict[str, Any], axes: dict[str, list[Any]]) -> list[dict[str, Any]]:
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
            point[outer] = _with(chosen, inner, value) if dot else value
        points.append(point)
    return points


def _with(choice: Any, key: str, value: Any) -> Spec:
    """Set an option of a choice: `local-sgd:every=8` with every=16 is `local-sgd:every=16`."""
    spec = Spec.of(choice)
    pairs = [p.partition("=") for p in spec.rest.split(",")] if "=" in spec.rest else []
    options = {**{k.strip(): v for k, _, v in pairs}, **spec.options, key: value}
    return Spec(spec.name, options, "" if pairs else spec.rest)


def _is_serial(point: dict[str, Any]) -> bool:
    spec = Spec.of(point["strategy"])
    return (
        spec.name in strategies
        and getattr(strategies.entry(spec.name).make, "most_workers", None) == 1
    )


def _beside_the_point(name: str, point: dict[str, Any]) -> bool:
    return name in SERIAL_DOES_NOT_KNOW and _is_serial(point)


def _once(points: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for point in points:
        found.setdefault(repr(sorted((k, _text(v)) for k, v in point.items())), point)
    return list(found.values())


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value))
    if isinstance(value, Mapping):
        return str(Spec.of(value))
    return f"{value:g}" if isinstance(value, float) else str(value)
