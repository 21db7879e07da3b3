"""Two studies side by side: what changed from one to the other beyond noise.

Their runs are no pairs, so the comparison is Welch's test on logarithms, and says so.
"""

from __future__ import annotations

import html
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from paceline.errors import BadRequest
from paceline.record.writer import write_text
from paceline.report.charts import palette
from paceline.report.charts.base import ROW
from paceline.report.charts.marks import NEUTRAL, Spec, names, quantity, tips
from paceline.report.judge import SPEED, Quantity, Verdict, corrected, judge
from paceline.report.lines import Line, Study
from paceline.report.page.markup import code, document, header, prose, table
from paceline.report.reading import NOT_COMPARED, read_study
from paceline.report.render import library
from paceline.report.score import Score, score_of
from paceline.report.words import as_fast, count, times

UNPAIRED = (
    "The comparison is unpaired: the studies were made apart, so a change of the machine between"
    " them looks like a change of the settings, and no interval shows that. The intervals are those"
    " of Welch's test on logarithms. To compare two versions of Paceline in paired blocks, use"
    " `paceline study --against CHECKOUT`."
)


@dataclass(frozen=True)
class Comparison:
    """Two studies, and the settings that both have completed."""

    a: Study
    b: Study
    pairs: list[tuple[Line, Line]]

    @classmethod
    def of(cls, one: str | Path, other: str | Path) -> Comparison:
        """Read two studies, runs or folders of runs."""
        a, b = read_study(one), read_study(other)
        pairs = [
            (x, y)
            for x in a.lines
            if (y := b.line(x.label, x.workers)) is not None and x.train_s and y.train_s
        ]
        if not pairs:
            raise BadRequest(
                f"{one} and {other} have no completed setting in common: nothing can be compared"
            )
        return cls(a, b, pairs)

    @cached_property
    def score(self) -> Score:
        return score_of(self.a, self.b)

    @cached_property
    def speeds(self) -> list[Verdict | None]:
        """The seconds per sample of each pair, the second study against the first."""
        return self._judged(SPEED)

    @cached_property
    def scores(self) -> list[Verdict | None]:
        return self._judged(self.score.quantity)

    def _judged(self, quantity: Quantity) -> list[Verdict | None]:
        """Welch's test for each pair, with Holm's correction for their number."""
        found = [judge(quantity, self.a, self.b)(y, x) for x, y in self.pairs]
        known = iter(corrected([v for v in found if v is not None]))
        return [next(known) if v is not None else None for v in found]

    def verdict(self, number: int) -> str:
        """Say what changed beyond noise in the speed and the score of a pair."""
        pace, change = self.speeds[number], self.scores[number]
        changes = []
        if pace is not None and pace.differs:
            changes.append(("faster" if pace.apart < 0 else "slower") + pace.seen)
        if change is not None and change.differs:
            changes.append(self._changed_score(number, change))
        if changes:
            return ", ".join(changes)
        once = pace is None or pace.runs < 2
        return "not told apart" if not once else "run once: no difference above 10%"

    def _changed_score(self, number: int, change: Verdict) -> str:
        """`accuracy -0.52 points (95% interval -0.60 to -0.44)`"""
        own, new = (self.score.spread(line) for line in self.pairs[number])
        by = (new.mean if new else 0.0) - (own.mean if own else 0.0)
        name = self.score.name
        if self.score.is_accuracy:
            text, ends = f"{name} {100 * by:+.2f} points", (100 * change.low, 100 * change.high)
            interval = f"95% interval {ends[0]:+.2f} to {ends[1]:+.2f}"
        elif self.score.quantity.relative:
            text, ends = f"{name} {by:+.3g}", (math.exp(change.low), math.exp(change.high))
            times = math.exp(change.apart)
            interval = f"times {times:.3f}, 95% interval {ends[0]:.3f} to {ends[1]:.3f}"
        else:
            text = f"{name} {by:+.3g}"
            interval = f"95% interval {change.low:+.3g} to {change.high:+.3g}"
        return text + (f" ({interval})" if change.estimate is not None else change.seen)

    @property
    def sentences(self) -> list[str]:
        """What changed, what else may explain it, and that nothing was paired."""
        known = [(x, v) for (x, _), v in zip(self.pairs, self.speeds, strict=True) if v is not None]
        up, down = [e for e in known if e[1].lower], [e for e in known if e[1].higher]
        same = len(self.pairs) - len(up) - len(down)
        found = [
            f"{count(len(self.pairs), 'setting')} {'are' if len(self.pairs) != 1 else 'is'} in"
            f" both: {len(up)} became faster, {len(down)} became slower, and {same} cannot be told"
            " from before."
        ]
        for name, group, pick in (("gain", up, min), ("loss", down, max)):
            if group:
                line, verdict = pick(group, key=lambda e: e[1].apart)
                found.append(f"The largest {name} was `{line.id}`: {as_fast(verdict, 'before')}.")
        if others := changed_options(self.pairs):
            found.append(
                "The studies also differ in options, which may explain changes:"
                f" {', '.join(others)}."
            )
        machines = [
            f"{s.environment.get('cpu')}, {s.environment.get('cores')} cores, torch"
            f" {s.environment.get('torch')}"
            for s in (self.a, self.b)
        ]
        if machines[0] != machines[1]:
            found.append(
                f"The studies were measured on different machines ({machines[0]}; {machines[1]}),"
                " which may explain changes."
            )
        return [*found, UNPAIRED]

    def write(self, path: str | Path) -> Path:
        """Write the page."""
        path = Path(path)
        write_text(path, _page(self))
        return path


def compare(one: str | Path, other: str | Path, path: str | Path) -> Path:
    """Write a page on the settings that two studies, runs or folders of runs have in common."""
    return Comparison.of(one, other).write(path)


def _per_s(line: Line) -> str:
    """The speed, as a geometric mean over the runs: the ratio of two is what the verdict says."""
    values = SPEED.values(line)
    return f"{math.exp(-fmean(map(math.log, values))):,.0f}" if values else "–"


def changed_options(pairs: list[tuple[Line, Line]]) -> list[str]:
    """Return the options that differ between the studies, with both values."""
    found: dict[str, tuple[str, str]] = {}
    for x, y in pairs:
        configs = [line.completed[0].record["config"] for line in (x, y)]
        for key in configs[0].keys() | configs[1].keys():
            one, other = (str(c.get(key)) for c in configs)
            if key not in NOT_COMPARED and one != other:
                found.setdefault(key, (one, other))
    return [f"`{key}` ({one}, then {other})" for key, (one, other) in sorted(found.items())]


def _page(found: Comparison) -> str:
    a, b, score = found.a, found.b, found.score
    title = f"{a.folder.name} and {b.folder.name}"
    rows: list[dict[str, Any]] = []
    cells: list[list[str]] = []
    for number, ((x, y), pace) in enumerate(zip(found.pairs, found.speeds, strict=True)):
        speedup, span = "–", "–"
        if pace is not None:
            ratio, low, high = (math.exp(-v) for v in (pace.apart, pace.high, pace.low))
            rows.append({"id": x.id, "ratio": ratio, "ratio_low": low, "ratio_high": high})
            speedup = times(ratio)
            span = f"{low:.2f} to {high:.2f}" if pace.estimate is not None else "one run"
        cells.append(
            [
                code(x.id),
                _per_s(x),
                _per_s(y),
                speedup,
                span,
                *(score.text(own.mean if (own := score.spread(line)) else None) for line in (x, y)),
                html.escape(found.verdict(number)),
            ]
        )
    titles = [html.escape(s.folder.name) for s in (a, b)]
    head = ["setting", *(f"samples/s<br>{name}" for name in titles), "times<br>as fast"]
    head += ["95%<br>interval", *(f"{html.escape(score.name)}<br>{name}" for name in titles)]
    head.append("verdict")
    both = {x.id for x, _ in found.pairs}
    missing = list(dict.fromkeys(x.id for x in (*a.lines, *b.lines) if x.id not in both))
    left_out = (
        "<p class=note>These settings were completed in one study only, or in none:"
        f" {prose(', '.join(f'`{m}`' for m in missing))}</p>"
        if missing
        else ""
    )
    body = (
        f"{header(title, html.escape(a.title))}<main><section class=answer id=answer>"
        + "".join(f"<p>{prose(s)}</p>" for s in found.sentences)
        + f"</section><section><h2>Speed</h2><figure><h3>{titles[1]} against {titles[0]}</h3><div"
        " class=chart data-chart=ratio></div><figcaption>Samples per second of the second study"
        " divided by those of the first; 1 is no change. The lines are 95% intervals"
        f" (unpaired).</figcaption></figure>{table(head, cells)}{left_out}</section></main>"
    )
    data: dict[str, Any] = {
        "series": [],
        "default_workers": 1,
        "default_line": "",
        "compared": [],
        "charts": {"ratio": {"table": "ratios", "spec": _chart([r["id"] for r in rows])}},
        "tables": {"ratios": rows, "lines": []},
    }
    return document(title, body, data, library())


def _chart(order: list[str]) -> Spec:
    y = names("id", order)
    x, colour = quantity("ratio", "times as fast", zero=False), {"value": palette.COLOURS[0]}
    tooltip = tips(
        ("id", "setting", ""),
        ("ratio", "times as fast", ".2f"),
        ("ratio_low", "95% interval from", ".2f"),
        ("ratio_high", "to", ".2f"),
    )
    span = {
        "x": {**x, "field": "ratio_low"},
        "x2": {"field": "ratio_high"},
        "y": y,
        "color": colour,
    }
    layers: list[Spec] = [
        {
            "data": {"values": [{}]},
            "mark": {"type": "rule", "color": NEUTRAL, "strokeDash": [4, 4]},
            "encoding": {"x": {"datum": 1}},
        },
        {"mark": "rule", "encoding": span},
        {
            "mark": {"type": "point", "filled": True, "size": 70},
            "encoding": {"x": x, "y": y, "color": colour, "tooltip": tooltip},
        },
    ]
    return {"width": "container", "height": ROW * len(order), "params": [], "layer": layers}
