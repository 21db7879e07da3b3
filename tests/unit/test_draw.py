"""The drawings show the states of symbolic execution."""

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from xml.etree import ElementTree

import pytest

from paceline.collectives.base import SCHEDULES, schedule_of
from paceline.collectives.draw import contributions, describe, frames, html, svg
from paceline.collectives.schedule import Transfer, states
from paceline.errors import UnknownName


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_frames_are_the_symbolic_states(name: str) -> None:
    """P = 5: every cell of every step, read back from the drawing."""
    schedule = SCHEDULES[name](5)
    drawn = frames(schedule)
    assert [f.step for f in drawn] == list(range(len(schedule.rounds) + 1))
    for frame, state in zip(drawn, states(schedule), strict=True):
        for rank in range(5):
            for chunk in range(schedule.chunks):
                held = {r for r in range(5) if state[rank][chunk][r]}
                assert parsed(frame.cells[rank][chunk]) == held
                assert frame.complete[rank][chunk] == (held == set(range(5)))
    assert all(all(row) for row in drawn[-1].complete)


def parsed(text: str) -> set[int]:
    found: set[int] = set()
    for part in text.split(","):
        low, _, high = part.partition("-")
        found |= set(range(int(low), int(high or low) + 1))
    return found


def test_a_ring_of_five_has_steps_0_to_8() -> None:
    drawn = frames(SCHEDULES["ring"](5))
    assert [f.phase for f in drawn] == ["start"] + ["share-reduce"] * 4 + ["share-only"] * 4


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize("ranks", [1, 2, 5, 16])
def test_pictures_are_well_formed_and_stand_alone(name: str, ranks: int) -> None:
    schedule = SCHEDULES[name](ranks)
    picture = ElementTree.fromstring(svg(schedule))
    words = [t.text for t in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert sum(bool(w and w.startswith("step ")) for w in words) == len(schedule.rounds) + 1
    page = html(schedule)
    assert page.count("<svg") == len(schedule.rounds) + 1
    assert not re.search(r'(src|href)="', page)
    assert "@" not in re.sub(r"<style>.*?</style>", "", page, flags=re.DOTALL)


def test_words() -> None:
    assert contributions((1, 1, 1, 0, 1)) == "0-2,4"
    assert contributions((0, 2, 0)) == "1x2"
    assert contributions((0, 0)) == "-"
    assert describe(Transfer(0, 1, 2, 3, True), 4) == "0 -> 1: chunk 2, added"
    assert describe(Transfer(0, 1, 0, 4, False), 4) == "0 -> 1: everything, kept"
    assert describe(Transfer(0, 1, 0, 2, False), 4) == "0 -> 1: chunks 0-1, kept"


def test_names() -> None:
    assert schedule_of("hierarchical:group=4", 8).ranks == 8
    with pytest.raises(UnknownName, match="native has none"):
        schedule_of("native", 4)


CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)


@pytest.mark.processes
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_the_page_in_a_real_browser(tmp_path: Path) -> None:
    """Press Next, Back and the keys on a ring of five ranks: the page shows the symbolic state."""
    schedule = schedule_of("ring", 5)
    clicks = """<script>
    const said = [], look = () => said.push([document.getElementById("where").textContent,
      document.querySelectorAll("#steps svg.on").length,
      [...document.querySelectorAll("#steps svg.on text.m")].map(t => t.textContent).join("|")]);
    look();
    for (let i = 0; i < 9; i++) { document.getElementById("next").click(); look(); }
    document.getElementById("back").click(); look();
    document.onkeydown({key: "ArrowLeft"}); look();
    const out = document.createElement("pre");
    out.id = "said"; out.textContent = JSON.stringify(said);
    document.body.append(out);
    </script></body>"""
    page = tmp_path / "ring.html"
    page.write_text(html(schedule).replace("</body>", clicks))
    done = subprocess.run(
        [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic",
         "--no-first-run", "--disable-background-networking", "--disable-component-update",
         "--disable-sync", "--enable-logging=stderr", f"--user-data-dir={tmp_path / 'profile'}",
         "--virtual-time-budget=2000", "--dump-dom", page.as_uri()],
        capture_output=True, text=True, timeout=100, check=True,
    )  # fmt: skip
    assert "Uncaught" not in done.stderr
    found = re.search(r'<pre id="said">(.*?)</pre>', done.stdout, re.S)
    assert found is not None
    said = json.loads(unescape(found[1]))
    assert [row[1] for row in said] == [1] * 12  # one picture at a time
    steps = [int(re.match(r"step (\d+) of 8", row[0])[1]) for row in said]
    assert steps == [*range(9), 8, 7, 6]
    history = states(schedule)
    for step, (_, _, cells) in zip(steps, said, strict=True):
        shown = cells.split("|")[-25:]
        assert shown == [contributions(chunk) for rank in history[step] for chunk in rank]
