"""Measure two versions of Paceline against each other: a regression check.

A block runs one setting from this checkout and from the other one, in random order, one after the
other. Each run is a `paceline train` in a fresh interpreter with PYTHONPATH=CHECKOUT/src, so both
versions start in the same way, with the same Python and packages. The statistic is the mean log
ratio of their speeds with a paired t interval. Every setting has as many blocks as the variance of
its first blocks asks for (Stein's rule), as far as the budget goes.

"Slower by 5%" means that a sample takes 1.05 times as long. The check fails for settings whose
interval lies wholly beyond the limit, with Holm's correction for the number of settings.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import harmonic_mean
from typing import Any

from paceline.common.estimates import Estimate, holm, paired
from paceline.errors import BadRequest, PacelineError
from paceline.record.lock import LOCK, alone_in
from paceline.record.machine import environment
from paceline.record.writer import write_json
from paceline.studies.candidates import Candidate
from paceline.studies.confirm import DROPPED, PILOT, Confirmation
from paceline.studies.grid import Setting, StudySpec
from paceline.studies.plan import scaled
from paceline.studies.versions import LEAST_DEADLINE_S, OTHER, THIS, Version

MOST_SETTINGS = 4  # without confirmed ones
LEAST_BLOCKS = 2  # for an interval, whatever the budget
TRIAL_STEPS = 30
CLAIMED = 0.05

Record = dict[str, Any]
Say = Callable[[str], None]


class Pair(Confirmation):
    """Blocks of one setting, from two versions."""

    def __init__(
        self, spec: StudySpec, setting: Setting, versions: Sequence[Version], folder: Path
    ) -> None:
        self.versions = {version.name: version for version in versions}
        self.setting = f"{setting.label} x {setting.workers}"
        self._deadline_s = max(LEAST_DEADLINE_S, 20 * spec.block_s)
        options = {k: v for k, v in scaled(setting.options, spec).items() if k not in DROPPED}
        trials = {}
        for version in versions:
            trial = {**options, "steps": TRIAL_STEPS, "evaluate_samples": 1}
            trials[version.name] = version.train(trial, folder / "trial", self._deadline_s)
            chosen = trials[version.name]["config"].get("memory_format")
            if chosen and "memory_format" not in options:  # the first one's, for both
                options["memory_format"] = chosen
        results = [trial["result"] for trial in trials.values()]
        # a version may be older than this number: then the plain speed counts for both
        self.steady = all(result.get("steady_samples_per_s") for result in results)
        # both make the same steps, and together they fill a block
        speed = harmonic_mean(result["samples_per_s"] for result in results)
        outside_s = min(result["wall_s"] - result["train_s"] for result in results)
        both = [
            Candidate(name, name, options, speed, max(0.0, outside_s)) for name in (OTHER, THIS)
        ]
        super().__init__(spec, both, folder)

    def _run(self, candidate: Candidate, number: int, listen: Any) -> Record:
        out = self.folder / candidate.slug
        steps = self._config(candidate, number, out).steps
        options = {**candidate.options, "steps": steps, "evaluate_samples": 1, "seed": number}
        record = self.versions[candidate.name].train(options, out, self._deadline_s)
        if not self.steady:
            record["result"]["steady_samples_per_s"] = None
        return record

    @property
    def differences(self) -> list[float]:
        """log(speed of this / speed of the other version) of every block."""
        return [block.log_ratio(THIS, OTHER) for block in self.blocks]


@dataclass(frozen=True)
class Compared:
    """One setting: log ratios of this version's speed to the other's, a number per block."""

    setting: str
    differences: Sequence[float]
    estimate: Estimate
    p: float  # that they are equal; with Holm's correction
    p_beyond: float  # that it is slower by the limit at most; with Holm's correction
    limit: float | None  # the log of 1.05

    @property
    def enough(self) -> bool:
        """Whether there are as many blocks as a claim needs: the variance of fewer is not known."""
        return len(self.differences) >= PILOT

    @property
    def differs(self) -> bool:
        return self.enough and self.p <= CLAIMED

    @property
    def fails(self) -> bool:
        return self.enough and self.limit is not None and self.p_beyond <= CLAIMED

    @property
    def excluded(self) -> bool:
        """Whether the interval excludes a slowdown by the limit."""
        return self.limit is not None and self.estimate.low > -self.limit

    @property
    def ratios(self) -> tuple[float, float, float]:
        """How many times as fast this version is, and the ends of the 95% interval."""
        found = self.estimate
        return math.exp(found.mean), math.exp(found.low), math.exp(found.high)

    @property
    def side(self) -> str:
        return "slower" if self.estimate.mean < 0 else "faster"

    @property
    def counted(self) -> str:
        """`slower in 7 of 9 blocks`"""
        wins = sum(d * self.estimate.mean > 0 for d in self.differences)
        return f"{self.side} in {wins} of {len(self.differences)} blocks"

    @property
    def verdict(self) -> str:
        if not self.enough:
            return f"no claim, because that needs {PILOT} blocks"
        what = self.side if self.differs else "no difference is shown"
        if self.limit is None:
            return what
        percent = _percent(self.limit)
        if self.fails:
            return f"slower by more than {percent}"
        known = "is excluded" if self.excluded else "is not excluded"
        return f"{what}; a slowdown of {percent} {known}"

    @property
    def sentence(self) -> str:
        ratio, low, high = self.ratios
        return (
            f"`{self.setting}` is {ratio:.3f}x as fast as in the other checkout (95% interval"
            f" {low:.3f} to {high:.3f}, {self.counted}): {self.verdict}."
        )


@dataclass
class Found:
    """What two versions' blocks show. `ended` is "enough" or "budget"."""

    versions: Sequence[Version]
    pairs: Sequence[Pair]
    limit: float | None = None
    ended: str = "interrupted"
    spent_s: float = 0.0
    began: float = field(default_factory=time.monotonic)

    @property
    def settings(self) -> list[Compared]:
        """The settings that have an interval."""
        return judged({p.setting: p.differences for p in self.pairs}, self.limit)

    @property
    def failure(self) -> str | None:
        """One sentence on the settings that became slower by more than the limit."""
        slow = [each for each in self.settings if each.fails]
        if not slow or self.limit is None:
            return None
        names = ", ".join(
            f"{each.setting} ({each.ratios[0]:.2f}x as fast, 95% interval {each.ratios[1]:.2f} to"
            f" {each.ratios[2]:.2f})"
            for each in slow
        )
        return f"slower than the other checkout by more than {_percent(self.limit)}: {names}"

    @property
    def sentences(self) -> list[str]:
        found = [each.sentence for each in self.settings]
        open_ones = [e for e in self.settings if self.limit and not (e.fails or e.excluded)]
        if open_ones and self.limit:
            found.append(
                f"The interval of {', '.join(f'`{e.setting}`' for e in open_ones)} is too wide to"
                f" exclude that this checkout is {_percent(self.limit)} slower."
            )
        if self.ended == "budget":
            left_s = sum((p.wanted - len(p.blocks)) * p.block_s for p in self.pairs)
            minutes = math.ceil((self.spent_s + left_s) / 60)
            gives = f"would give +-{100 * self.pairs[0].spec.width:g}%"
            if any(len(p.blocks) < PILOT for p in self.pairs):
                gives = f"would give the {PILOT} blocks that tell how many are needed"
            found.append(f"The budget ended first: `--budget {minutes}min` {gives}.")
        if not all(pair.steady for pair in self.pairs):
            found.append(
                "One of the checkouts does not record the speed after the first steps, so the"
                " speed of all steps is compared."
            )
        return found

    def write(self, path: Path) -> None:
        judged_by = {each.setting: each for each in self.settings}
        settings = []
        for pair in self.pairs:
            kept: dict[str, Any] = {"setting": pair.setting, **pair.described(self.ended)}
            kept |= {"steady": pair.steady}
            if (each := judged_by.get(pair.setting)) is not None:
                ratio, low, high = each.ratios
                kept |= {"ratio": ratio, "low": low, "high": high, "p": each.p}
                kept |= {"verdict": each.verdict, "fails": each.fails}
            settings.append(kept)
        content = {
            "schema": 1,
            "environment": environment(),
            **{version.name: version.described() for version in self.versions},
            "slower_limit": None if self.limit is None else math.expm1(self.limit),
            "ended": self.ended,
            "spent_s": self.spent_s,
            "sentences": self.sentences,
            "settings": settings,
        }
        write_json(path, content)


def judged(
    differences: Mapping[str, Sequence[float]], limit: float | None = None
) -> list[Compared]:
    """Judge log ratios of speeds by setting; one with fewer than two blocks is left out."""
    known = {name: (d, e) for name, d in differences.items() if (e := paired(d)) is not None}
    beyond = [replace(e, mean=e.mean + (limit or 0.0)) for _, e in known.values()]
    equal = holm([e.p for _, e in known.values()])
    farther = holm([e.p if e.mean < 0 else 1.0 for e in beyond])
    return [
        Compared(name, d, e, p, p_beyond, limit)
        for (name, (d, e)), p, p_beyond in zip(known.items(), equal, farther, strict=True)
    ]


def limit_of(text: str) -> float:
    """Read `slower=5%`, and return the log of 1.05."""
    found = re.fullmatch(r"\s*slower\s*=\s*(\d+(?:\.\d*)?)\s*%\s*", text)
    share = float(found[1]) / 100 if found else 0.0
    if not 0.001 <= share <= 10:
        raise BadRequest(f"--fail-if {text}: write slower=5%, with 0.1% to 1000%")
    return math.log1p(share)


def _percent(limit: float) -> str:
    return f"{100 * math.expm1(limit):g}%"


def chosen_settings(spec: StudySpec, out: Path) -> list[Setting]:
    """Return those that a study in `out` has confirmed, else all that the study asks for."""
    if any(setting.options.get("privacy") is not None for setting in spec.settings()):
        raise BadRequest("--against repeats runs many times, and each private run spends privacy")
    asked = [setting for setting in spec.settings() if not setting.baseline]
    if (out / "study.json").is_file():
        kept = json.loads((out / "study.json").read_text()).get("confirm") or {}
        names = [kept["serial"], *kept["settings"]] if kept.get("blocks") else []
        found = [s for s in spec.settings() if f"{s.label} x {s.workers}" in names]
        if found:
            return found
    if len(asked) > MOST_SETTINGS:
        raise BadRequest(
            f"--against takes the settings that a study in --out has confirmed, or all if there are"
            f" at most {MOST_SETTINGS}; here are {len(asked)}, and {out} has confirmed none: choose"
            " with --set strategy=serial --set workers=1"
        )
    return asked


def measure_against(
    spec: StudySpec,
    checkout: str | Path,
    out: Path,
    *,
    limit: float | None = None,
    say: Say = lambda text: None,
) -> Found:
    """Measure this version against the one in `checkout`, and write `out/against.json`.

    With a limit, which is the log of 1.05 for 5%, blocks are made for an interval of half of it.
    """
    settings, versions = chosen_settings(spec, out), (Version.this(), Version.at(checkout))
    if limit is not None:
        spec = replace(spec, width=max(0.001, min(spec.width, math.expm1(limit) / 2)))
    _claim(out)
    with alone_in(out, "this folder is in use by another process"):
        found = Found(versions, [], limit)
        budget_s = math.inf if spec.budget_s is None else spec.budget_s
        pairs = []
        for setting in settings:
            say(f"{setting.label} x {setting.workers}: a trial from each checkout")
            try:
                pairs.append(Pair(spec, setting, versions, out / "against" / setting.slug))
            except PacelineError as error:
                shutil.rmtree(out / "against", ignore_errors=True)
                raise type(error)(f"{setting.label} x {setting.workers}: {error}") from None
        found.pairs = pairs
        while open_ones := [p for p in pairs if len(p.blocks) < p.wanted]:
            left_s = budget_s - (time.monotonic() - found.began)
            round_s = sum(p.block_s for p in open_ones)
            if round_s > left_s and all(len(p.blocks) >= LEAST_BLOCKS for p in pairs):
                break
            for pair in open_ones:
                block = pair.next(left_s / len(open_ones), say, None)
                ratio = math.exp(block.log_ratio(THIS, OTHER))
                say(f"{pair.setting}, block {len(pair.blocks)} of {pair.wanted}: {ratio:.3f}x")
            found.spent_s = time.monotonic() - found.began
            found.write(out / "against.json")
        found.ended = "budget" if open_ones else "enough"
        shutil.rmtree(out / "against", ignore_errors=True)
        found.write(out / "against.json")
    return found


def _claim(out: Path) -> None:
    """Create the folder. Refuse one that holds neither a study nor an earlier comparison."""
    known = {"study.json", "against.json"}
    try:
        out.mkdir(parents=True, exist_ok=True)
        held = set(os.listdir(out)) - {LOCK, "against"}
    except OSError as error:
        raise BadRequest(f"out={out} cannot be written: {error.strerror}") from None
    if held and not held & known:
        raise BadRequest(f"out={out} is not empty and holds no study: choose another folder")
