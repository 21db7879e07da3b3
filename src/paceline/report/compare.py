"""Two studies side by side: what changed from one to the other beyond noise."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

from paceline.errors import BadRequest
from paceline.record.writer import write_text
from paceline.report.charts import palette
from paceline.report.charts.base import ROW
from paceline.report.charts.marks import NEUTRAL, Spec, names, quantity, tips
from paceline.report.judge import SPEED, judge
from paceline.report.lines import Line, Spread, Study
from paceline.report.page.markup import code, document, header, prose, table
from paceline.report.reading import NOT_COMPARED, read_study
from paceline.report.render import library
from paceline.report.score import score_of
from paceline.report.words import count, times, with_range


def compare(one: str | Path, other: str | Path, path: str | Path) -> Path:
    """Write a page on the settings that two studies, runs or folders of runs have in common."""
    path = Path(path)
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
    write_text(path, _page(a, b, pairs))
    return path


def ratio(x: Line, y: Line) -> Spread:
    """Return the samples per second of the second setting divided by those of the first."""
    assert x.train_s is not None
    assert y.train_s is not None
    scale = y.samples / x.samples if x.samples else 1.0
    own, new = x.train_s, y.train_s
    return Spread(
        scale * own.mean / new.mean,
        scale * own.low / new.high,
        scale * own.high / new.low,
        min(own.n, new.n),
    )


def verdict(a: Study, b: Study, x: Line, y: Line) -> str:
    """Say what changed beyond noise in speed and in the score."""
    changes = []
    pace, score = judge(SPEED, a, b)(y, x), score_of(a, b)
    if pace is not None and pace.differs:
        changes.append(f"{times(ratio(x, y).mean)} as fast")
    change = judge(score.quantity, a, b)(y, x)
    own, new = score.spread(x), score.spread(y)
    if change is not None and own and new and change.differs:
        by = new.mean - own.mean
        changes.append(
            f"{score.name} {100 * by:+.2f} points"
            if score.is_accuracy
            else f"{score.name} {by:+.3g}"
        )
    if changes:
        return ", ".join(changes)
    once = pace is None or pace.runs < 2
    return "within noise" if not once else "run once: no difference above 10%"


def summary(a: Study, b: Study, pairs: list[tuple[Line, Line]]) -> list[str]:
    faster = [
        (x, y)
        for x, y in pairs
        if (found := judge(SPEED, a, b)(y, x)) is not None and found.differs
    ]
    up, down = [p for p in faster if ratio(*p).mean > 1], [p for p in faster if ratio(*p).mean < 1]
    sentences = [
        f"{count(len(pairs), 'setting')} {'are' if len(pairs) != 1 else 'is'} in both: {len(up)}"
        f" became faster, {len(down)} became slower, and {len(pairs) - len(faster)} did not change"
        " beyond noise."
    ]
    for name, group, pick in (("gain", up, max), ("loss", down, min)):
        if group:
            most = pick(group, key=lambda p: ratio(*p).mean)
            sentences.append(
                f"The largest {name} was `{most[0].id}`: {times(ratio(*most).mean)} as fast as"
                " before."
            )
    others = changed_options(pairs)
    if others:
        sentences.append(
            f"The studies also differ in options, which may explain changes: {', '.join(others)}."
        )
    machines = [
        f"{s.environment.get('cpu')}, {s.environment.get('cores')} cores, torch"
        f" {s.environment.get('torch')}"
        for s in (a, b)
    ]
    if machines[0] != machines[1]:
        sentences.append(
            f"The studies were measured on different machines ({machines[0]}; {machines[1]}), which"
            " may explain changes."
        )
    return sentences


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


def _page(a: Study, b: Study, pairs: list[tuple[Line, Line]]) -> str:
    title = f"{a.folder.name} and {b.folder.name}"
    score = score_of(a, b)
    rows: list[dict[str, Any]] = []
    cells: list[list[str]] = []
    for x, y in pairs:
        found = ratio(x, y)
        rows.append(
            {"id": x.id, "ratio": found.mean, "ratio_low": found.low, "ratio_high": found.high}
        )
        cells.append(
            [
                code(x.id),
                with_range(x.train_s, ".2f", 1, " s"),
                with_range(y.train_s, ".2f", 1, " s"),
                times(found.mean),
                *(score.text(own.mean if (own := score.spread(line)) else None) for line in (x, y)),
                html.escape(verdict(a, b, x, y)),
            ]
        )
    titles = [html.escape(s.folder.name) for s in (a, b)]
    head = ["setting", f"training<br>{titles[0]}", f"training<br>{titles[1]}", "times<br>as fast"]
    head += [*(f"{html.escape(score.name)}<br>{name}" for name in titles), "verdict"]
    both = {x.id for x, _ in pairs}
    missing = list(dict.fromkeys(x.id for x in (*a.lines, *b.lines) if x.id not in both))
    left_out = (
        "<p class=note>These settings were completed in one study only, or in none:"
        f" {prose(', '.join(f'`{m}`' for m in missing))}</p>"
        if missing
        else ""
    )
    body = (
        f"{header(title, html.escape(a.title))}<main><section class=answer id=answer>"
        + "".join(f"<p>{prose(s)}</p>" for s in summary(a, b, pairs))
        + f"</section><section><h2>Speed</h2><figure><h3>{titles[1]} against {titles[0]}</h3><div"
        " class=chart data-chart=ratio></div><figcaption>Samples per second of the second study"
        " divided by those of the first; 1 is no change. The lines show the range of the"
        f" runs.</figcaption></figure>{table(head, cells)}{left_out}</section></main>"
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
        ("ratio_low", "lowest", ".2f"),
        ("ratio_high", "highest", ".2f"),
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
