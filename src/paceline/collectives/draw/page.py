"""The page that plays schedules: one HTML file without a network, a framework or a server."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from paceline.collectives.base import SCHEDULES
from paceline.collectives.cost import loads, sent_shares
from paceline.collectives.draw.frames import counted
from paceline.collectives.draw.scene import LABEL, MESSAGE_HEIGHT, MOST_RANKS, scene
from paceline.collectives.schedule import Schedule
from paceline.errors import BadRequest
from paceline.look import worker
from paceline.look.picture import ink_on
from paceline.look.player import player
from paceline.registry import operations

LATENCY_S, BANDWIDTH, SIZE_BYTES = 50e-6, 1e9, 4e6
MOST_SCHEDULES = 2
DIGITS = (1, 2, 5)
LEAD = """Each colour is one rank's contribution. A chunk shows the contributions
that it holds; a <span class="good">green frame or line</span> means all. The receiver adds what a
solid arrow brings; what a dashed arrow brings replaces its own."""
CLOCKS = """<span id="clocks" class="clocks" role="group" aria-label="clock">clock:
<button data-clock="seconds">seconds</button><button data-clock="rounds">rounds</button></span>
"""


def html(
    *schedules: Schedule,
    latency_s: float = LATENCY_S,
    bandwidth: float = BANDWIDTH,
    size_bytes: float = SIZE_BYTES,
    s_per_byte_added: float = 0.0,
) -> str:
    """Return a page that plays one schedule, or two side by side on one clock.

    `latency_s`, `bandwidth` (bits per second) and `size_bytes` are where the sliders stand at
    first. Nothing outside the file is needed.
    """
    if not 1 <= len(schedules) <= MOST_SCHEDULES:
        raise BadRequest(f"a page shows one or two schedules, not {len(schedules)}")
    if len({schedule.ranks for schedule in schedules}) > 1:
        raise BadRequest("two schedules on one page must have the same number of ranks")
    if not (bandwidth > 0 and size_bytes > 0 and latency_s >= 0):
        raise BadRequest(
            f"latency_s={latency_s:g}, bandwidth={bandwidth:g}, size_bytes={size_bytes:g}:"
            " bandwidth and size must be above 0, the latency 0 or more"
        )
    scenes = [scene(schedule) for schedule in schedules]
    choices, chosen = {}, {}
    for name, (value, low, high, words) in {
        "latency": (latency_s, -6, -1, seconds_words),
        "bandwidth": (bandwidth, 6, 11, rate_words),
        "size": (size_bytes, 3, 9, bytes_words),
    }.items():
        values = sorted({value, *(float(f"{d}e{e}") for e in range(low, high) for d in DIGITS)})
        choices[name] = [{"value": v, "label": words(v)} for v in values]
        chosen[name] = values.index(value)
    data = {
        "scenes": scenes,
        "rows": _rows(schedules),
        "choices": choices,
        "chosen": chosen,
        "s_per_byte_added": s_per_byte_added,
        "inks": [ink_on(worker(rank)) for rank in range(MOST_RANKS)],
        "label": LABEL,
        "message_height": MESSAGE_HEIGHT,
    }
    names = [schedule.name for schedule in schedules]
    return player(
        f"{' and '.join(names)}, {counted(schedules[0].ranks, 'rank')}",
        f"paceline explain {' '.join(names)} --workers {schedules[0].ranks}",
        data,
        script=_read("page.js"),
        style=_read("page.css"),
        lead=LEAD,
        clocks=CLOCKS,
        body=_read("page.html"),
    )


def comparable(schedules: tuple[Schedule, ...]) -> dict[str, Schedule]:
    """The schedules of a table of costs: these, and all all-reduces if all of these are."""
    plain = {schedule.name.partition(":")[0] for schedule in schedules}
    all_reduces = all(name not in operations or name == "stepwise" for name in plain)
    others = {n: make(schedules[0].ranks) for n, make in SCHEDULES.items()} if all_reduces else {}
    return dict(sorted({**others, **{s.name: s for s in schedules}}.items()))


def _rows(schedules: tuple[Schedule, ...]) -> list[dict[str, Any]]:
    drawn = {schedule.name for schedule in schedules}
    return [
        {"name": name, "drawn": name in drawn, "loads": loads(s), "sent": sent_shares(s)}
        for name, s in comparable(schedules).items()
    ]


def _read(name: str) -> str:
    return files("paceline.collectives.draw").joinpath(name).read_text("utf-8")


def _with_unit(value: float, units: dict[str, float]) -> str:
    for word, unit in units.items():
        if value >= unit * (1 - 1e-9):
            return f"{value / unit:.3g} {word}"
    word, unit = list(units.items())[-1]
    return f"{value / unit:.3g} {word}"


def seconds_words(seconds: float) -> str:
    """Seconds with a unit, in three digits: 48.3 ms."""
    return _with_unit(seconds, {"s": 1, "ms": 1e-3, "µs": 1e-6})


def rate_words(bits_per_s: float) -> str:
    """A rate with a unit: 1 Gbit/s."""
    return _with_unit(bits_per_s, {"Gbit/s": 1e9, "Mbit/s": 1e6, "kbit/s": 1e3, "bit/s": 1})


def bytes_words(size: float) -> str:
    """A size with a unit: 4 MB."""
    return _with_unit(size, {"GB": 1e9, "MB": 1e6, "kB": 1e3, "B": 1})
