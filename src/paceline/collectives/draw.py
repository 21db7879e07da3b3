"""Draws a schedule: for each round, the transfers and the contributions in every rank's chunks.

`frames` describes the rounds. The terminal, the SVG and the page are made from that description,
and a test compares it with the symbolic state.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from html import escape

from paceline.collectives.schedule import Schedule, Transfer, states


@dataclass(frozen=True)
class Frame:
    """The state after round `step` (0: the start) and the transfers of that round."""

    step: int
    phase: str
    cells: tuple[tuple[str, ...], ...]  # [rank][chunk]: the contributions, as "0-2,4"
    complete: tuple[tuple[bool, ...], ...]
    changed: frozenset[tuple[int, int]]  # (rank, chunk) that this round wrote
    transfers: tuple[Transfer, ...]


def frames(schedule: Schedule) -> list[Frame]:
    drawn = []
    for step, state in enumerate(states(schedule)):
        transfers = schedule.rounds[step - 1] if step else ()
        drawn.append(
            Frame(
                step,
                schedule.phases[step - 1] if step else "start",
                tuple(tuple(contributions(c) for c in row) for row in state),
                tuple(tuple(min(c) > 0 for c in row) for row in state),
                frozenset((t.target, c) for t in transfers for c in range(t.start, t.stop)),
                transfers,
            )
        )
    return drawn


def contributions(holding: tuple[int, ...]) -> str:
    """The ranks whose contributions a chunk holds, as text: (1, 1, 1, 0, 1) is "0-2,4".

    "x2" marks contributions that it holds twice.
    """
    runs: list[str] = []
    rank = 0
    while rank < len(holding):
        if not holding[rank]:
            rank += 1
            continue
        last = rank
        while last + 1 < len(holding) and holding[last + 1] == holding[rank]:
            last += 1
        times = f"x{holding[rank]}" if holding[rank] > 1 else ""
        runs.append((str(rank) if last == rank else f"{rank}-{last}") + times)
        rank = last + 1
    return ",".join(runs) or "-"


def describe(transfer: Transfer, chunks: int) -> str:
    if transfer.stop - transfer.start == chunks:
        what = "everything" if chunks > 1 else "the buffer"
    elif transfer.stop - transfer.start == 1:
        what = f"chunk {transfer.start}"
    else:
        what = f"chunks {transfer.start}-{transfer.stop - 1}"
    then = (
        "added"
        if transfer.adds
        else "kept"
        if transfer.at is None
        else f"becomes chunk {transfer.at}"
    )
    return f"{transfer.source} -> {transfer.target}: {what}, {then}"


# --- SVG

CELL, HEIGHT, LEFT, TOP = 64, 26, 70, 46
COLOURS = {"own": "#e8e8e8", "some": "#9ecae1", "all": "#2b8a3e"}


def colour(frame: Frame, rank: int, chunk: int) -> tuple[str, str]:
    if frame.complete[rank][chunk]:
        return COLOURS["all"], "#ffffff"
    own = frame.cells[rank][chunk] == str(rank)
    return (COLOURS["own"] if own else COLOURS["some"]), "#111111"


def panel(frame: Frame, schedule: Schedule, y: int = 0) -> tuple[str, int]:
    """One step as an SVG group, and its height."""
    width = column_width([frame])
    parts = [_text(8, y + 18, f"step {frame.step}: {frame.phase}", "h")]
    parts += [
        _text(LEFT + (c + 0.5) * width, y + 38, f"chunk {c}", "s m") for c in range(schedule.chunks)
    ]
    for rank in range(schedule.ranks):
        top = y + TOP + rank * HEIGHT
        parts.append(_text(8, top + 17, f"rank {rank}", "s"))
        for chunk in range(schedule.chunks):
            fill, ink = colour(frame, rank, chunk)
            edge = (
                'stroke="#d9480f" stroke-width="2.5"'
                if (rank, chunk) in frame.changed
                else 'stroke="#ffffff"'
            )
            left = LEFT + chunk * width
            box = f'x="{left + 1}" y="{top + 1}" width="{width - 3}" height="{HEIGHT - 3}"'
            parts.append(f'<rect {box} rx="3" fill="{fill}" {edge}/>')
            parts.append(_text(left + width / 2, top + 17, frame.cells[rank][chunk], "s m", ink))
    right = LEFT + schedule.chunks * width + 16
    for line, transfer in enumerate(frame.transfers):
        parts.append(
            _text(right, y + TOP + 14 + 16 * line, describe(transfer, schedule.chunks), "s")
        )
    height = TOP + max(schedule.ranks * HEIGHT, 16 * len(frame.transfers)) + 18
    return "\n".join(parts), height


def column_width(drawn: list[Frame]) -> int:
    return max(CELL, min(140, 12 + 8 * max(len(c) for f in drawn for row in f.cells for c in row)))


def panel_width(schedule: Schedule, drawn: list[Frame]) -> int:
    return LEFT + schedule.chunks * column_width(drawn) + 260


def _text(x: float, y: float, words: str, kind: str, ink: str = "#111111") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" fill="{ink}">{escape(words)}</text>'


STYLE = (
    "text{font-family:ui-monospace,Menlo,Consolas,monospace}"
    ".h{font-size:15px;font-weight:700}.s{font-size:12px}.m{text-anchor:middle}"
)


def svg(schedule: Schedule) -> str:
    """An SVG with all steps below each other."""
    drawn = frames(schedule)
    y, parts = 30, [f'<text x="8" y="20" class="h">{escape(title(schedule))}</text>']
    for frame in drawn:
        part, height = panel(frame, schedule, y)
        parts.append(part)
        y += height
    width = panel_width(schedule, drawn)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{y}" viewBox="0 0 {width}'
        f' {y}"><style>{STYLE}</style><rect width="100%" height="100%" fill="#ffffff"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def title(schedule: Schedule) -> str:
    return f"{schedule.name}, {schedule.ranks} ranks: {len(schedule.rounds)} rounds"


# --- the page

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>@TITLE@</title>
<style>
body{font-family:system-ui,sans-serif;margin:1.5rem;max-width:1200px;color:#111;background:#fff}
h1{font-size:1.3rem}button{font-size:1rem;padding:.35rem .9rem;margin-right:.4rem;cursor:pointer}
#steps svg{max-width:100%;height:auto;display:none}#steps svg.on{display:block}
.legend span{display:inline-block;padding:.1rem .5rem;margin-right:.5rem;border-radius:3px}
</style></head><body>
<h1>@TITLE@</h1>
<p class="legend"><span style="background:#e8e8e8">own contribution</span>
<span style="background:#9ecae1">partial sum</span>
<span style="background:#2b8a3e;color:#fff">sum of all ranks</span>
<span style="border:2.5px solid #d9480f">written in this round</span></p>
<p><button id="back" title="left arrow">Back</button>
<button id="next" title="right arrow">Next</button>
<button id="play" title="space">Play</button> <span id="where" aria-live="polite"></span></p>
<div id="steps">@STEPS@</div>
<script>
const names=@NAMES@, pictures=[...document.querySelectorAll("#steps svg")];
let at=0, timer=null;
function show(i){at=Math.max(0,Math.min(pictures.length-1,i));
 pictures.forEach((p,n)=>p.classList.toggle("on",n===at));
 document.getElementById("where").textContent=`step ${at} of ${pictures.length-1}: ${names[at]}`;}
function stop(){clearInterval(timer);timer=null;document.getElementById("play").textContent="Play";}
function play(){if(timer){stop();return;} if(at===pictures.length-1)show(0);
 document.getElementById("play").textContent="Pause";
 timer=setInterval(()=>{if(at===pictures.length-1){stop();}else{show(at+1);}},1000);}
document.getElementById("back").onclick=()=>{stop();show(at-1);};
document.getElementById("next").onclick=()=>{stop();show(at+1);};
document.getElementById("play").onclick=play;
document.onkeydown=e=>{if(e.key==="ArrowLeft"){stop();show(at-1);}
 else if(e.key==="ArrowRight"){stop();show(at+1);}
 else if(e.key===" "){e.preventDefault();play();}};
show(parseInt(location.hash.slice(1))||0);
</script></body></html>
"""


def html(schedule: Schedule) -> str:
    """A self-contained page with buttons to step forward, step back and play."""
    drawn = frames(schedule)
    width = panel_width(schedule, drawn)
    pictures = []
    for frame in drawn:
        part, height = panel(frame, schedule)
        size = f'width="{width}" viewBox="0 0 {width} {height}"'
        pictures.append(
            f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{STYLE}</style>{part}</svg>'
        )
    return (
        PAGE.replace("@TITLE@", escape(title(schedule)))
        .replace("@STEPS@", "\n".join(pictures))
        .replace("@NAMES@", json.dumps([f.phase for f in drawn]))
    )
