"""A study as a person writes it (`study.toml`), and the grid of settings that follows from it.

title = "Which strategy is best here?"
seeds = 3                       # or a list of seeds; every setting is run once with each
budget = "10min"                # what is left of it goes into confirming the best two settings
target_accuracy = 0.95
[base]                          # options of `train` that all runs share
model = "cnn"
global_batch_size = 120
[axes]                          # options to vary: every combination of their values is a setting
strategy = ["allreduce", "local-sgd:every=8"]       # "strategy.every" varies a strategy's option
workers = [1, 2, "cores"]
[[also]]                        # further settings beside the grid; a list is an axis of this group
strategy = "ddp"
workers = 2
[short]                         # what `--short` replaces
seeds = 1
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from paceline.common.cores import cores
from paceline.common.files import read_toml
from paceline.common.units import LONG_TIMES, parse_unit
from paceline.errors import BadRequest, UnknownName
from paceline.registry import load_plugin
from paceline.request.checks import CHOICES
from paceline.request.config import Config
from paceline.request.names import resolve_names
from paceline.request.naming import label_of
from paceline.request.settings import apply_settings
from paceline.studies import preparing
from paceline.studies.points import (
    NOT_AN_AXIS,
    alone,
    as_text,
    beside_the_point,
    counted,
    each_once,
    is_serial,
    product,
    refuse_simulated,
    workers_of,
)

TABLES = ("base", "axes", "prepare")  # of a file; what is added to one is merged
BUILTIN = Path(__file__).parent / "builtin.toml"
DEFAULT_GLOBAL_BATCH = 120  # divides by 1 to 6
MOST_RUNS, CONFIRMED, MOST_CONFIRMED = 10_000, 2, 5  # the last two: settings


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
    budget: str | None = None  # the time that the study may take: 10min
    confirm: int | None = None  # how many settings to confirm; by default 2 with a budget
    width: float = 0.1  # the half of an interval that confirming blocks are made for
    block: str = "30s"  # the time that one confirming block takes
    all_cores: bool = True  # add a serial setting with a thread for every core
    cut: str = ""  # what the study leaves out to be quick, in words, for the report
    prepare: dict[str, Any] = field(default_factory=dict)  # see preparing.py
    name: str = "study"

    @classmethod
    def read(cls, path: str | Path, variant: Literal["", "short", "full"] = "") -> StudySpec:
        path = Path(path)
        hint = "a study is a TOML file, such as those in studies/; docs/studies.md shows one"
        return cls.make(read_toml(path, hint), path.stem if path != BUILTIN else "study", variant)

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
            if "budget_s" in part:
                raise BadRequest(
                    f"budget_s = {part['budget_s']}: write it with a unit, budget ="
                    f' "{part["budget_s"]}s" or budget = "10min"'
                )
            for key in part:
                if key not in known:
                    raise UnknownName("part of a study", key, [*known, *variants])
            for key in TABLES:
                _table(key, part.get(key))
            if not isinstance(part.get("also", []), list) or not all(
                isinstance(e, dict) for e in part.get("also", [])
            ):
                raise BadRequest("also: write it as [[also]], once for each group of settings")
        chosen = variants.get(variant)
        if variant and not chosen:
            raise BadRequest(f"study {name} has no [{variant}] setting")
        for key, value in (chosen or {}).items():
            table[key] = {**table.get(key, {}), **value} if key in TABLES else value
        if variant == "full" and "cut" not in (chosen or {}):
            table["cut"] = ""
        for key in ("base", "axes"):
            table[key] = counted(table.get(key, {}))
        table["also"] = [counted(group) for group in table.get("also", [])]
        study = cls(**{**table, "seeds": _seeds(table.get("seeds", 1))}, name=name)
        study._check()
        return study

    def changed(
        self,
        settings: Iterable[str] = (),
        *,
        seeds: int | None = None,
        budget: str | None = None,
        confirm: int | None = None,
        **base: Any,
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
            budget=self.budget if budget is None else budget,
            confirm=self.confirm if confirm is None else confirm,
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
                    if "." not in name and name != "master":  # it needs the launcher
                        Config.make({name: each})
        preparing.check(self.prepare)
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
        for name, low, high in (("target_accuracy", 0.0, 1.0), ("width", 0.01, 1.0)):
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
        for name in ("budget", "block"):
            value = getattr(self, name)
            if value and not 1 <= parse_unit(value, LONG_TIMES, name) <= 1e9:
                raise BadRequest(f"{name}={value!r}: it must be 1 second or more")
        if self.confirm is not None and (
            isinstance(self.confirm, bool)
            or not isinstance(self.confirm, int)
            or not 0 <= self.confirm <= MOST_CONFIRMED
        ):
            raise BadRequest(
                f"confirm={self.confirm!r}: write how many settings to confirm, 0 to"
                f" {MOST_CONFIRMED}"
            )
        for plugin in Config.make({"plugin": self.base.get("plugin", ())}).plugin:
            load_plugin(plugin)
        for setting in self.settings():
            resolve_names(Config.make({**setting.options, "seed": self.seeds[0]}))

    @property
    def budget_s(self) -> float | None:
        return parse_unit(self.budget, LONG_TIMES, "budget") if self.budget else None

    @property
    def block_s(self) -> float:
        return parse_unit(self.block, LONG_TIMES, "block")

    @property
    def confirms(self) -> int:
        """How many settings are confirmed after all have been screened."""
        return self.confirm if self.confirm is not None else CONFIRMED * bool(self.budget)

    # --- the grid

    def _refuse_many(self, points: int, repeated: int = 1) -> None:
        """Refuse too many points; `repeated` times more while some may be the same."""
        if points * len(self.seeds) > MOST_RUNS * repeated:
            raise BadRequest(
                f"the study has {points * len(self.seeds):,} runs; at most {MOST_RUNS:,} are"
                " allowed: give fewer values or seeds"
            )

    def settings(self) -> list[Setting]:
        """Return every setting once: the serial baselines, the grid, and `also`."""
        tables = [
            self.axes,
            *({k: v for k, v in e.items() if isinstance(v, list)} for e in self.also),
        ]
        self._refuse_many(sum(math.prod(len(v) for v in table.values()) for table in tables), 10)
        points = [*product(self.base, self.axes)] if self.axes or not self.also else []
        for extra in self.also:
            axes = {k: v for k, v in extra.items() if isinstance(v, list)}
            points += product(
                {**self.base, **{k: v for k, v in extra.items() if k not in axes}}, axes
            )
        points = [self._completed(p) for p in points]
        baselines = [self._serial(p, 1) for p in points]
        if self.all_cores and cores() > 1:
            baselines += [self._serial(p, cores()) for p in points]
        asked, all_points = each_once(points), each_once([*baselines, *points])
        self._refuse_many(len(all_points))
        names = sorted({k for p in all_points for k in p}, key=list(Config.options()).index)
        varied = [
            n
            for n in names
            if n not in ("workers", "threads") and len({as_text(p.get(n)) for p in asked}) > 1
        ]
        threads_differ = len({p["threads"] for p in all_points}) > 1

        def differs(point: dict[str, Any]) -> dict[str, str]:
            shown = {
                n: as_text(point[n])
                for n in varied
                if n in point and (n == "strategy" or not beside_the_point(n, point))
            }
            if is_serial(point) and "strategy" not in shown:
                shown = {"strategy": "serial", **shown}
            elif "strategy" not in shown and any(
                is_serial(p) != is_serial(point) for p in all_points
            ):
                shown = {"strategy": as_text(point["strategy"]), **shown}
            if threads_differ and point["threads"] != 1:
                shown["threads"] = str(point["threads"])
            return shown

        return [Setting(p, differs(p), p not in asked) for p in all_points]

    def _completed(self, point: dict[str, Any]) -> dict[str, Any]:
        """Add a study's defaults: one thread per worker and a global batch."""
        refuse_simulated(point)
        workers = workers_of(point)
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
        return alone(whole) if is_serial(whole) else whole

    def _serial(self, point: dict[str, Any], threads: int) -> dict[str, Any]:
        return {**alone(point), "threads": threads}

    def described(self) -> dict[str, Any]:
        """Return the study as JSON values."""
        return {
            name: getattr(self, name) if name != "seeds" else list(self.seeds)
            for name in self.__dataclass_fields__
            if name not in ("name", "base", "axes", "also")
        } | {
            "base": {k: as_text(v) for k, v in self.base.items()},
            "axes": {k: [as_text(v) for v in values] for k, values in self.axes.items()},
            "also": [
                {
                    k: [as_text(x) for x in v] if isinstance(v, list) else as_text(v)
                    for k, v in e.items()
                }
                for e in self.also
            ],
        }


def _table(name: str, given: Any) -> dict[str, Any]:
    if given is not None and not isinstance(given, dict):
        raise BadRequest(f"{name} is {given!r}: write it as a table, [{name}]")
    return given or {}


def _check_option(name: str, options: Mapping[str, Any], kind: str) -> None:
    outer, dot, _ = name.partition(".")
    if (
        outer not in options
        or (outer in NOT_AN_AXIS and kind == "axis")
        or outer in ("out", "resume", "seed", "max_time")
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
