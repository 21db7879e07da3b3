"""What is fastest at which bandwidth: every way of training on every network, against plain
all-reduce on the same network.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from paceline.common.links import Links
from paceline.errors import BadRequest
from paceline.report.commentary.comment import Comment
from paceline.report.judge import TO_ACCURACY, judge
from paceline.report.lines import Line, Study
from paceline.report.words import listed, seconds, times
from paceline.request.naming import label_of


def rate_of(network: str) -> float:
    """Return a network's bits per second, to sort by; unlimited comes last."""
    try:
        rate = Links.read(network).rate
    except BadRequest:
        return math.inf
    return math.inf if rate is None else rate


def way_of(line: Line) -> str:
    """Return a setting's name without its network."""
    own = {
        k: v
        for k, v in line.varied.items()
        if k != "network" and not (k == "codec" and v == "none")
    }
    return label_of(own) + (f" x {line.workers}" if line.workers > 1 else "")


def is_plain(line: Line) -> bool:
    """Whether this is all-reduce of uncompressed gradients in every step."""
    config = line.completed[0].record["config"] if line.completed else {}
    whole = not any(word in line.strategy for word in ("exchange=weights", "when=epoch"))
    return (
        line.strategy.split(":")[0] == "allreduce"
        and whole
        and str(config.get("codec", "none")) == "none"
    )


def networks(study: Study) -> list[str]:
    """Return the networks of a study, from slow to fast."""
    return sorted(
        {line.varied["network"] for line in study.lines if "network" in line.varied}, key=rate_of
    )


def plain_at(study: Study, line: Line) -> Line | None:
    """Return plain all-reduce with as many workers on the same network."""
    found = (x for x in study.lines if is_plain(x) and x.workers == line.workers and x.completed)
    return next((x for x in found if x.varied.get("network") == line.varied.get("network")), None)


def compares_networks(study: Study) -> bool:
    """Whether there are several networks and a plain all-reduce to compare with."""
    return len(networks(study)) > 1 and any(is_plain(line) for line in study.lines)


def soonest(study: Study) -> str:
    """Say which way reached the accuracy first on which links; empty without several networks."""
    first: dict[str, list[str]] = {}
    once = False
    for network in networks(study) if compares_networks(study) else ():
        timed = [
            x
            for x in study.lines
            if x.varied.get("network") == network and x.time_to_accuracy and plain_at(study, x)
        ]
        if not timed:
            continue
        best = min(timed, key=_to_accuracy)
        verdicts = {way_of(x): judge(TO_ACCURACY, study)(x, best) for x in timed if x is not best}
        same = [way for way, v in verdicts.items() if v is not None and not v.differs]
        once |= any(v is not None and v.runs < 2 for v in verdicts.values())
        tied = f" (no clear difference to {listed(same, 3)})" if same else ""
        first.setdefault(f"`{way_of(best)}`{tied}", []).append(network)
    if not first:
        return ""
    ways = "; ".join(f"{way} on links of {' and '.join(where)}" for way, where in first.items())
    return f"The first to reach the target accuracy was {ways}{' (seen in one run)' * once}."


def _to_accuracy(line: Line) -> float:
    return line.time_to_accuracy.mean if line.time_to_accuracy else math.inf


def by_bandwidth(study: Study) -> Iterator[Comment]:
    """Say which way is first on each network, and whether compression pays on the fastest."""
    counts = sorted({x.workers for x in study.lines if "network" in x.varied})
    compared = networks(study) if compares_networks(study) else []
    for network, workers in itertools.product(compared, counts):
        here = [
            x
            for x in study.lines
            if x.varied.get("network") == network and x.workers == workers and x.completed
        ]
        plain = next((x for x in here if is_plain(x)), None)
        timed = sorted((x for x in here if x.time_to_accuracy is not None), key=_to_accuracy)
        if plain is None or plain.time_to_accuracy is None or len(timed) < 2:
            continue
        link = f"On links of {network}" if network != "unlimited" else "On unlimited links"
        yield _first_at(study, link, timed, plain)
        coded = [
            x
            for x in timed
            if x.varied.get("codec", "none") != "none" and x.strategy == plain.strategy
        ]
        if coded and network == compared[-1]:
            yield _pays(study, link, coded, plain)


def _first_at(study: Study, link: str, timed: list[Line], plain: Line) -> Comment:
    """Name the first at the accuracy that differs clearly from plain all-reduce."""
    figures = {way_of(x): seconds(_to_accuracy(x)) for x in timed[:6]}
    for best in timed:
        verdict = judge(TO_ACCURACY, study)(best, plain)
        if verdict is not None and verdict.lower:
            own, theirs = _to_accuracy(best), _to_accuracy(plain)
            each_time = f", sooner {verdict.counted}" if verdict.counted else ""
            return Comment(
                "network",
                f"{link}, `{way_of(best)}` reached the target accuracy {times(theirs / own)} as"
                f" soon as plain all-reduce ({seconds(own)} against"
                f" {seconds(theirs)}{each_time}){verdict.seen}.",
                figures,
            )
    once = any(len(x.completed) < 2 for x in timed)
    return Comment(
        "network",
        f"{link}, no setting reached the target accuracy clearly sooner than plain"
        f" all-reduce{' (seen in one run)' * once}.",
        figures,
    )


def _pays(study: Study, link: str, coded: list[Line], plain: Line) -> Comment:
    """Say whether compression shortens the time to the accuracy."""
    verdicts = [(x, v) for x in coded if (v := judge(TO_ACCURACY, study)(x, plain)) is not None]
    paid = [(x, v) for x, v in verdicts if v.lower]
    if paid:
        return Comment(
            "network",
            f"{link}, compression still pays:"
            f" {listed([way_of(x) for x, _ in paid])} reached the target accuracy sooner than"
            f" plain all-reduce{paid[0][1].seen}.",
        )
    fastest, verdict = verdicts[0]
    does = "does not pay" if verdict.higher else "makes no clear difference"
    return Comment(
        "network",
        f"{link}, compression {does}: the best codec, `{fastest.varied['codec']}`, took"
        f" {times(_to_accuracy(fastest) / _to_accuracy(plain))} the time of plain"
        f" all-reduce{verdict.seen}.",
        {way_of(x): seconds(_to_accuracy(x)) for x, _ in verdicts[:6]},
    )
