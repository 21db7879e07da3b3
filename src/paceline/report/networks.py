"""At which bandwidth does what win: every way of training at every speed of the network, against
plain all-reduce there.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from paceline.common.links import Links
from paceline.errors import BadRequest
from paceline.report.comment import Comment
from paceline.report.lines import Line, Study
from paceline.report.marks import Row, Spec, tips
from paceline.report.noise import TO_ACCURACY, judge
from paceline.report.words import listed, seconds, times
from paceline.request.config import label_of

MAP_ROW, MAP_EDGE = 30, 8.0  # pixels; times as fast or as slow: the end of the colours
FAST, SLOW, EQUAL = "#2166AC", "#B2182B", "#F2F2F2"


def rate_of(network: str) -> float:
    """Bits per second, to be put in order; unlimited comes last."""
    try:
        rate = Links.read(network).rate
    except BadRequest:
        return math.inf
    return math.inf if rate is None else rate


def way_of(line: Line) -> str:
    """What a setting is called whatever the network."""
    own = {
        k: v
        for k, v in line.varied.items()
        if k != "network" and not (k == "codec" and v == "none")
    }
    return label_of(own) + (f" x {line.workers}" if line.workers > 1 else "")


def is_plain(line: Line) -> bool:
    """All-reduce with nothing left out."""
    config = line.completed[0].record["config"] if line.completed else {}
    whole = not any(word in line.strategy for word in ("exchange=weights", "when=epoch"))
    return (
        line.strategy.split(":")[0] == "allreduce"
        and whole
        and str(config.get("codec", "none")) == "none"
    )


def networks(study: Study) -> list[str]:
    """Those that were compared, from slow to fast."""
    return sorted(
        {line.varied["network"] for line in study.lines if "network" in line.varied}, key=rate_of
    )


def plain_at(study: Study, line: Line) -> Line | None:
    """Plain all-reduce with as many workers on the same network."""
    found = (x for x in study.lines if is_plain(x) and x.workers == line.workers and x.completed)
    return next((x for x in found if x.varied.get("network") == line.varied.get("network")), None)


def network_rows(study: Study) -> list[Row]:
    """One row per way and network: the time to the target accuracy, relative to plain all-reduce
    there.
    """
    order = networks(study)
    if len(order) < 2 or not any(is_plain(line) for line in study.lines):
        return []
    rows = []
    for line in study.lines:
        network, plain = line.varied.get("network"), plain_at(study, line)
        if network is None or plain is None or not line.completed:
            continue
        own, theirs = line.time_to_accuracy, plain.time_to_accuracy
        relative = own.mean / theirs.mean if own and theirs and theirs.mean else None
        rows.append(
            {
                "way": way_of(line),
                "network": network,
                "place": order.index(network),
                "seconds": float(f"{own.mean:.4g}") if own else None,
                "relative": float(f"{relative:.4g}") if relative else None,
                "shade": max(-1.0, min(1.0, math.log(relative, MAP_EDGE))) if relative else None,
                "text": f"{relative:.2f}" if relative else "never" if own is None else "–",
                "reached": "{} of {}".format(*line.reached),
            }
        )
    return rows


def map_layers(rows: list[Row]) -> list[Spec]:
    """Colour = time to accuracy relative to plain all-reduce: blue is sooner, red is later."""
    order = [r["network"] for r in sorted(rows, key=lambda r: r["place"])]
    axis: Spec = {"labelAngle": 0, "grid": False, "labelLimit": 260}
    x: Spec = {
        "field": "network",
        "type": "ordinal",
        "title": "each host's link",
        "sort": list(dict.fromkeys(order)),
        "axis": axis,
    }
    ways = list(dict.fromkeys(r["way"] for r in rows))
    y: Spec = {"field": "way", "type": "nominal", "title": None, "sort": ways, "axis": axis}
    scale: Spec = {"domain": [-1, 0, 1], "range": [FAST, EQUAL, SLOW]}
    known: Spec = {
        "test": "isValid(datum.shade)",
        "field": "shade",
        "type": "quantitative",
        "scale": scale,
        "legend": None,
    }
    colour: Spec = {"condition": known, "value": "#999999"}
    tooltip = tips(
        ("way", "setting", ""), ("network", "link", ""), ("seconds", "seconds to the accuracy", ".2f"),
        ("relative", "of plain all-reduce's", ".2f"), ("reached", "runs that reached it", ""),
    )  # fmt: skip
    dark = {
        "condition": {
            "test": "isValid(datum.shade) && abs(datum.shade) < 0.55",
            "value": "#222222",
        },
        "value": "#ffffff",
    }
    return [
        {
            "mark": {"type": "rect", "stroke": "white"},
            "encoding": {"x": x, "y": y, "color": colour, "tooltip": tooltip},
        },
        {
            "mark": {"type": "text", "fontSize": 12},
            "encoding": {"x": x, "y": y, "text": {"field": "text"}, "color": dark},
        },
    ]


def soonest(study: Study) -> str:
    """Which way was first at the accuracy on which links, in one sentence; nothing where networks
    were not compared.
    """
    won: dict[str, list[str]] = {}
    once = False
    for network in networks(study) if network_rows(study) else ():
        timed = [
            x
            for x in study.lines
            if x.varied.get("network") == network and x.time_to_accuracy and plain_at(study, x)
        ]
        if not timed:
            continue
        best = min(timed, key=_to_accuracy)
        verdicts = {way_of(x): judge(TO_ACCURACY, study)(x, best) for x in timed if x is not best}
        same = [way for way, v in verdicts.items() if v is not None and not v.told]
        once |= any(v is not None and v.runs < 2 for v in verdicts.values())
        won.setdefault(
            f"`{way_of(best)}`"
            + (f", from which {listed(same, 3)} cannot be told," if same else ""),
            [],
        ).append(network)
    told = "; ".join(f"{way} on links of {' and '.join(where)}" for way, where in won.items())
    return f"Soonest at the accuracy: {told}{' (seen in one run)' * once}." if told else ""


def _to_accuracy(line: Line) -> float:
    return line.time_to_accuracy.mean if line.time_to_accuracy else math.inf


def by_bandwidth(study: Study) -> Iterator[Comment]:
    """Which way wins where; and whether sending less pays at all where the network is fast."""
    rows = network_rows(study)
    counts = sorted({x.workers for x in study.lines if "network" in x.varied})
    for network, workers in itertools.product(networks(study) if rows else (), counts):
        here = [
            x
            for x in study.lines
            if x.varied.get("network") == network and x.workers == workers and x.completed
        ]
        plain = next((x for x in here if is_plain(x)), None)
        timed = sorted((x for x in here if x.time_to_accuracy is not None), key=_to_accuracy)
        if plain is None or plain.time_to_accuracy is None or len(timed) < 2:
            continue
        link = (
            f"With links of {network}" if network != "unlimited" else "Without a limit on the links"
        )
        yield _first_at(study, link, timed, plain)
        coded = [
            x
            for x in timed
            if x.varied.get("codec", "none") != "none" and x.strategy == plain.strategy
        ]
        if coded and network == networks(study)[-1]:
            yield _pays(study, link, coded, plain)


def _first_at(study: Study, link: str, timed: list[Line], plain: Line) -> Comment:
    """The first at the accuracy, where it is told from plain all-reduce."""
    figures = {way_of(x): seconds(_to_accuracy(x)) for x in timed[:6]}
    for best in timed:
        verdict = judge(TO_ACCURACY, study)(best, plain)
        if verdict is not None and verdict.lower:
            own, theirs = _to_accuracy(best), _to_accuracy(plain)
            each_time = f", sooner {verdict.each_time}" if verdict.split else ""
            text = (
                f"{link} `{way_of(best)}` reached the accuracy {times(theirs / own)} as soon as"
                " plain all-reduce"
            )
            return Comment(
                "network",
                f"{text} ({seconds(own)} against {seconds(theirs)}{each_time}){verdict.seen}.",
                figures,
            )
    once = any(len(x.completed) < 2 for x in timed)
    return Comment(
        "network",
        f"{link} nothing was clearly sooner at the accuracy than plain"
        f" all-reduce{' (seen in one run)' * once}.",
        figures,
    )


def _pays(study: Study, link: str, coded: list[Line], plain: Line) -> Comment:
    """Judged by what the sentence is about: the time to the accuracy."""
    verdicts = [(x, v) for x in coded if (v := judge(TO_ACCURACY, study)(x, plain)) is not None]
    paid = [(x, v) for x, v in verdicts if v.lower]
    if paid:
        return Comment(
            "network",
            f"{link} compression still pays:"
            f" {listed([way_of(x) for x, _ in paid])}{paid[0][1].seen}.",
            {},
        )
    fastest, verdict = verdicts[0]
    does = "does not pay" if verdict.higher else "makes no difference that these runs could tell"
    return Comment(
        "network",
        f"{link} compression {does}: the best codec, `{fastest.varied['codec']}`, took"
        f" {times(_to_accuracy(fastest) / _to_accuracy(plain))} the time of plain"
        f" all-reduce{verdict.seen}.",
        {way_of(x): seconds(_to_accuracy(x)) for x, _ in verdicts[:6]},
    )
