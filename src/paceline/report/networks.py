"""At which bandwidth does what win: every way of training at every speed of the network, against plain all-reduce there."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from paceline.config import label_of
from paceline.errors import BadRequest
from paceline.report.comment import Comment
from paceline.report.lines import Line, Study
from paceline.report.marks import Row, Spec, tips
from paceline.report.noise import differ, time_noise
from paceline.report.words import listed, seconds, times
from paceline.testbed.links import Links

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
    own = {k: v for k, v in line.varied.items() if k != "network" and not (k == "codec" and v == "none")}
    return label_of(own) + (f" x {line.workers}" if line.workers > 1 else "")


def is_plain(line: Line) -> bool:
    """All-reduce with nothing left out."""
    config = line.completed[0].record["config"] if line.completed else {}
    whole = not any(word in line.strategy for word in ("exchange=weights", "when=epoch"))
    return line.strategy.split(":")[0] == "allreduce" and whole and str(config.get("codec", "none")) == "none"


def networks(study: Study) -> list[str]:
    """Those that were compared, from slow to fast."""
    return sorted({line.varied["network"] for line in study.lines if "network" in line.varied}, key=rate_of)


def plain_at(study: Study, line: Line) -> Line | None:
    """Plain all-reduce with as many workers on the same network."""
    found = (x for x in study.lines if is_plain(x) and x.workers == line.workers and x.completed)
    return next((x for x in found if x.varied.get("network") == line.varied.get("network")), None)


def network_rows(study: Study) -> list[Row]:
    """One row per way and network: the time to the target accuracy, relative to plain all-reduce there."""
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
    known: Spec = {"test": "isValid(datum.shade)", "field": "shade", "type": "quantitative", "scale": scale, "legend": None}
    colour: Spec = {"condition": known, "value": "#999999"}
    tooltip = tips(
        ("way", "setting", ""), ("network", "link", ""), ("seconds", "seconds to the accuracy", ".2f"),
        ("relative", "of plain all-reduce's", ".2f"), ("reached", "runs that reached it", ""),
    )  # fmt: skip
    dark = {"condition": {"test": "isValid(datum.shade) && abs(datum.shade) < 0.55", "value": "#222222"}, "value": "#ffffff"}
    return [
        {"mark": {"type": "rect", "stroke": "white"}, "encoding": {"x": x, "y": y, "color": colour, "tooltip": tooltip}},
        {"mark": {"type": "text", "fontSize": 12}, "encoding": {"x": x, "y": y, "text": {"field": "text"}, "color": dark}},
    ]


def soonest(study: Study) -> str:
    """Who was first at the accuracy on which links, in one sentence; nothing where networks were not compared."""
    won: dict[str, list[str]] = {}
    rows = network_rows(study)
    for network in networks(study) if rows else ():
        timed = [r for r in rows if r["network"] == network and r["seconds"] is not None]
        if timed:
            won.setdefault(min(timed, key=lambda r: r["seconds"])["way"], []).append(network)
    told = "; ".join(f"`{way}` on links of {' and '.join(where)}" for way, where in won.items())
    return f"Soonest at the accuracy: {told}." if told else ""


def by_bandwidth(study: Study) -> Iterator[Comment]:
    """Who wins where; and whether sending less pays at all where the network is fast."""
    rows = network_rows(study)
    noise = time_noise(study)
    counts = sorted({x.workers for x in study.lines if "network" in x.varied})
    for network, count in itertools.product(networks(study) if rows else (), counts):
        here = [x for x in study.lines if x.varied.get("network") == network and x.workers == count and x.completed]
        plain = next((x for x in here if is_plain(x)), None)
        timed = [x for x in here if x.time_to_accuracy is not None]
        if plain is None or plain.time_to_accuracy is None or len(timed) < 2:
            continue
        own = {x.id: x.time_to_accuracy.mean for x in timed if x.time_to_accuracy}
        best = min(timed, key=lambda x: own[x.id])
        theirs = plain.time_to_accuracy.mean
        figures = {way_of(x): seconds(own[x.id]) for x in sorted(timed, key=lambda x: own[x.id])[:6]}
        link = f"With links of {network}" if network != "unlimited" else "Without a limit on the links"
        gain = theirs / own[best.id]
        if best is plain or (
            noise is not None and abs(math.log(gain)) < noise.threshold(len(best.completed), len(plain.completed))
        ):
            yield Comment("network", f"{link} nothing was clearly sooner at the accuracy than plain all-reduce.", figures)
        else:
            text = f"{link} `{way_of(best)}` reached the accuracy {times(gain)} as soon as plain all-reduce"
            yield Comment("network", f"{text} ({seconds(own[best.id])} against {seconds(theirs)}).", figures)
        coded = [x for x in timed if x.varied.get("codec", "none") != "none" and x.strategy == plain.strategy]
        if coded and network == networks(study)[-1]:
            paid = [x for x in coded if own[x.id] < theirs and differ(noise, x, plain)]
            fastest = min(coded, key=lambda x: own[x.id])
            if not paid:
                yield Comment(
                    "network",
                    f"{link} compression does not pay: the best codec, `{fastest.varied['codec']}`, took "
                    f"{times(own[fastest.id] / theirs)} the time of plain all-reduce.",
                    {way_of(x): seconds(own[x.id]) for x in coded[:6]},
                )
            else:
                yield Comment("network", f"{link} compression still pays: {listed([way_of(x) for x in paid])}.", {})
