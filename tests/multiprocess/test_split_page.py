"""The pages of timetables and of split models in a real browser: play, steps, keys, a phone."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.browser import BROWSER
from tests.multiprocess.test_explain_page import look, look_in_a_frame

from paceline.parallel.draw.explain import explain_halo, explain_tensor, explain_timetables
from paceline.parallel.draw.facts import facts_of

STATES = """
const states = (state) => all(".panel").map((p) =>
  all(`.item[data-state="${state}"]`, p).map((i) => i.dataset.name).filter(Boolean).sort());
const said = () => ({ where: $("where").textContent, now: states("now"), later: states("later"),
  hidden: states("hidden"), phase: all(".phase").map((p) => p.textContent),
  sent: all(".sent").map((u) => all("li", u).map((l) => l.textContent)),
  current: all("[aria-current=true]").map((b) => b.textContent),
  state: all(".state tr").map((r) => [...r.children].map((c) => c.textContent)) });
"""


def named(name: str, at: float, stages: int = 3, micros: int = 6) -> tuple[list[str], list[str]]:
    """The tasks that are under way, and that are still to come, at a time."""
    spans = facts_of(name, stages, micros).spans
    now = [str(task) for task, (start, end) in spans.items() if start < at <= end]
    later = [str(task) for task, (start, _) in spans.items() if at <= start]
    return sorted(now), sorted(later)


@BROWSER
def test_two_timetables_play_on_one_clock(tmp_path: Path) -> None:
    names = ("1f1b", "interleaved")
    found = look(
        explain_timetables(names, 3, 6).html(),
        STATES
        + """
        const out = (found.out = {});
        out.opened = said();
        key("Home"); out.home = said();
        for (let i = 0; i < 3; i++) { key("ArrowRight"); await rest(); }
        out.third = said();
        key("ArrowLeft"); out.left = said();
        slide("scrub", 1000 * 12.25 / 24); out.scrubbed = said();
        key("End"); out.end = said();
        $("first").click(); $("speed").value = "4"; $("play").click(); await pause(700);
        $("play").click(); out.paused = said(); await pause(300); out.still = said();
        key(" "); await rest(); out.played = said();
        out.width = [document.documentElement.scrollWidth, innerWidth];
        out.rows = all("#facts tbody tr").map((r) => [...r.children].map((c) => c.textContent));
        """,
        tmp_path,
    )
    out = found["out"]
    for moment, at in (("opened", 24), ("home", 0), ("third", 1.5), ("left", 1), ("end", 24)):
        assert out[moment]["where"] == f"time {at:g} of 24", moment
        for panel, name in enumerate(names):
            now, later = named(name, at)
            assert (out[moment]["now"][panel], out[moment]["later"][panel]) == (now, later)
    now, later = named("1f1b", 12.25)
    assert (out["scrubbed"]["now"][0], out["scrubbed"]["later"][0]) == (now, later)
    assert out["third"]["sent"][1][0] == "worker 0: F2, stage 0; keeps 3"
    assert out["paused"]["where"] == out["still"]["where"]
    assert 0 < float(out["paused"]["where"].split()[1]) < 24
    assert out["played"]["where"] == "time 24 of 24"
    assert out["width"][0] <= out["width"][1]
    idle = {row[0]: row[2] for row in out["rows"]}
    for name in ("1f1b", "gpipe", "interleaved", "zero-bubble"):
        assert idle[name] == f"{100 * facts_of(name, 3, 6).timing.idle:.1f}%"


@BROWSER
def test_rows_move_to_the_workers_that_need_them(tmp_path: Path) -> None:
    found = look(
        explain_halo("cnn", (1, 28, 28), 3).html(),
        STATES
        + """
        const out = (found.out = {});
        const spot = () => all('.item[data-state="now"]')
          .map((i) => i.getAttribute("transform")).filter(Boolean);
        out.start = said();
        slide("scrub", 1000 * 0.5 / 5); out.half = said(); out.spots = spot();
        all("button[data-step='1']")[0].click(); out.one = said(); out.ends = spot();
        key("ArrowRight"); await rest(); out.two = said();
        key("End"); out.end = said();
        """,
        tmp_path,
    )
    out = found["out"]
    first = ["0 -> 1: row 8", "1 -> 0: rows 9-11", "1 -> 2: rows 16-17", "2 -> 1: rows 18-19"]
    assert (out["start"]["now"], out["start"]["where"]) == ([[]], "step 0 of 5")
    assert out["half"]["now"] == out["one"]["now"] == [first]
    assert sorted(out["spots"]) == ["translate(-35 0)"] * 2 + ["translate(35 0)"] * 2
    assert set(out["ends"]) == {"translate(0 0)"}
    assert out["one"]["state"][2] == ["1", "9-17", "8-19", "8-15"]
    assert out["one"]["current"] == ["1"]
    assert out["two"]["now"] == [[]]
    assert out["two"]["phase"] == ["step 2: 1 MaxPool2d 2x2/2: 24 -> 12 rows"]
    assert len(out["end"]["now"][0]) == 6
    assert out["end"]["phase"] == ["step 5: head (7 to 11) whole images: 4 -> 4 rows"]


@BROWSER
def test_a_clock_passes_the_layers_and_comes_back(tmp_path: Path) -> None:
    found = look(
        explain_tensor("cnn", (1, 28, 28), 2).html(),
        STATES
        + """
        const out = (found.out = []);
        const lit = (state) => all(`.item[data-state="${state}"] text`)
          .map((t) => t.textContent).filter((t) => t.startsWith("sum"));
        for (const step of [0, 4, 12, 15, 24]) {
          all(`button[data-step="${step}"]`)[0].click();
          out.push([step, said().phase[0], lit("now"), lit("later").length]);
        }
        """,
        tmp_path,
    )
    # 12 layers: the last one is step 12 forwards and step 13 backwards
    assert found["out"] == [
        [0, "step 0: the start", [], 3],
        [4, "step 4: forward, 3 Conv2d 5x5, 16->32, by inputs", ["sum 2,048 numbers, 8.19 kB"], 2],
        [12, "step 12: forward, 11 Linear 64->10, by inputs", ["sum 10 numbers, 40 B"], 1],
        [15, "step 15: backward, 9 Linear 128->64, by outputs", ["sum 128 numbers, 512 B"], 0],
        [24, "step 24: backward, 0 Conv2d 5x5, 1->16, by outputs", [], 0],
    ]


@BROWSER
@pytest.mark.parametrize("what", ["timetables", "halo", "tensor"])
def test_the_pages_fit_a_phone(tmp_path: Path, what: str) -> None:
    """The page in a frame of 390 pixels: what is wider scrolls by itself, the page does not."""
    page = {
        "timetables": lambda: explain_timetables(["1f1b", "zero-bubble"], 16, 32),
        "halo": lambda: explain_halo("cnn", (1, 28, 28), 8),
        "tensor": lambda: explain_tensor("transformer", (1, 28, 28), 4),
    }[what]().html()
    found = look_in_a_frame(
        page,
        """
        found.texts = [...inner.querySelectorAll(".drawing text")]
          .map((t) => t.getBoundingClientRect().height).filter((h) => h > 0);
        """,
        tmp_path,
    )
    assert found["wide"][0] <= found["wide"][1] == 390
    assert found["controls"] <= 800
    assert min(found["texts"]) > 5  # pixels
