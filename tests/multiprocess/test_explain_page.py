"""The page of `paceline explain` in a real browser: play, steps, keys, sliders."""

import json
import re
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from tests.browser import BROWSER, CHROMIUM

from paceline.collectives.base import schedule_of
from paceline.collectives.cost import cost
from paceline.collectives.draw import contributions, html
from paceline.collectives.schedule import Schedule, Transfer, states

TOOLS = """
const found = { errors: [] };
addEventListener("error", (e) => found.errors.push(e.message));
const all = (what, root) => [...(root ?? document).querySelectorAll(what)];
const pause = (ms) => new Promise((f) => setTimeout(f, ms));
const rest = async () => { do await pause(60); while (before !== null); };
const key = (key) => document.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
const slide = (id, to) => { $(id).value = to; $(id).dispatchEvent(new Event("input")); };
const table = () => Object.fromEntries(
  all("#table tbody tr").map((r) => [r.dataset.name, Number(r.dataset.seconds)]));
const shown = () => all(".panel").map((p) => ({
  step: Number(p.dataset.step), moving: p.dataset.moving,
  cells: all(".state tr", p).slice(1).map((r) => all("td", r).slice(1).map((c) => c.textContent)),
  current: all("[aria-current=true]", p).map((b) => b.textContent),
  phase: all(".phase", p)[0].textContent, rule: all(".words", p)[0].textContent,
  arrows: all(".arrow", p).length, messages: all(".message", p).length,
  nodes: all(".node", p).length, where: $("where").textContent,
}));
"""


# With virtual time a headless browser paints hardly any frame: timers take their place.
FRAMES = """<script>
window.requestAnimationFrame = (f) => setTimeout(() => f(performance.now()), 16);
</script>"""


def look(page: str, clicks: str, folder: Path, width: int = 1280) -> dict[str, Any]:
    """Open a page without a network, run `clicks` in it, and return what they found."""
    script = (
        f"<script>{TOOLS}(async () => {{ {clicks} }})()"
        ".catch((e) => found.errors.push(String(e))).then(() => {"
        "found.requests = performance.getEntriesByType('resource').length;"
        "const out = document.createElement('pre'); out.id = 'found';"
        "out.textContent = JSON.stringify(found); document.body.append(out); });</script></body>"
    )
    file = folder / "page.html"
    file.write_text(page.replace("<head>", "<head>" + FRAMES).replace("</body>", script))
    done = subprocess.run(
        [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic",
         "--no-first-run", "--disable-background-networking", "--disable-component-update",
         "--disable-sync", "--enable-logging=stderr", "--host-resolver-rules=MAP * ~NOTFOUND",
         f"--user-data-dir={folder / 'profile'}", f"--window-size={width},900",
         "--virtual-time-budget=60000", "--dump-dom", file.as_uri()],
        capture_output=True, text=True, timeout=100, check=True,
    )  # fmt: skip
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert not console, console[:3]
    match = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert match is not None, "the script on the page did not finish"
    found: dict[str, Any] = json.loads(unescape(match[1]))
    assert (found["errors"], found["requests"]) == ([], 0)
    return found


def look_in_a_frame(page: str, clicks: str, folder: Path) -> dict[str, Any]:
    """Open a page in a frame as wide as a phone: a browser's window is wider."""
    source = json.dumps(page).replace("</", "<\\/")  # inside a script element
    return look(
        "<html><body><script>const $ = 0, before = null;</script>"
        "<iframe id=f style='width:390px;height:800px' srcdoc=''></iframe></body></html>",
        f"""
        const f = document.getElementById("f"); f.srcdoc = {source};
        await new Promise((done) => (f.onload = done));
        const inner = f.contentDocument;
        found.wide = [inner.documentElement.scrollWidth, f.contentWindow.innerWidth];
        found.controls = inner.querySelector("#play").getBoundingClientRect().bottom;
        {clicks}
        """,
        folder,
    )


def cells(schedule: Schedule, step: int) -> list[list[str]]:
    return [[contributions(chunk) for chunk in rank] for rank in states(schedule)[step]]


@BROWSER
def test_play_step_keys_and_jumps(tmp_path: Path) -> None:
    """A ring of five ranks: after each action the page shows the symbolic state."""
    schedule = schedule_of("ring", 5)
    found = look(
        html(schedule),
        """
        const said = (found.said = {});
        said.start = shown()[0];
        const all_steps = (found.all_steps = []);
        for (let i = 0; i < 8; i++) { $("next").click(); await rest(); all_steps.push(shown()[0]); }
        $("next").click(); await rest(); said.end = shown()[0];
        $("back").click(); said.back = shown()[0];
        key("ArrowLeft"); said.left = shown()[0];
        key("ArrowRight"); await rest(); said.right = shown()[0];
        key("Home"); said.home = shown()[0];
        key("End"); said.last = shown()[0];
        all("[data-step='3']")[0].click(); said.jump = shown()[0];
        $("next").click(); $("next").click(); await rest(); said.hasty = shown()[0];
        $("first").click(); $("next").click(); await pause(500); said.under_way = shown()[0];
        const spot = () => all(".message")[0].getAttribute("transform");
        const one = spot(); await pause(200); said.moved = one !== spot(); await rest();
        slide("scrub", 1000 * 2.5 / 8); said.scrubbed = shown()[0];
        $("first").click(); $("speed").value = "4"; $("play").click();
        said.button = $("play").textContent; await pause(700); $("play").click();
        said.paused = shown()[0].step; await pause(500); said.still = shown()[0].step;
        key(" "); await rest(); said.played = shown()[0]; said.idle = $("play").textContent;
        key(" "); await pause(100); said.again = shown()[0].step; key(" ");
        """,
        tmp_path,
    )
    said = found["said"]
    steps = {
        "start": 0, "end": 8, "back": 7, "left": 6, "right": 7, "home": 0, "last": 8, "jump": 3,
        "hasty": 5, "under_way": 0, "scrubbed": 2, "played": 8,
    }  # fmt: skip
    assert {name: said[name]["step"] for name in steps} == steps
    for name, step in steps.items():
        assert said[name]["cells"] == cells(schedule, step), name
    assert [s["step"] for s in found["all_steps"]] == list(range(1, 9))
    for step, shown in enumerate(found["all_steps"], 1):
        phase = schedule.phases[step - 1]
        place = step - 1 if step <= 4 else step - 5
        assert shown["cells"] == cells(schedule, step)
        assert shown["phase"] == f"step {step} of 8: {phase}, r = {place}"
        assert shown["rule"] == schedule.rules[phase]
        assert shown["current"] == [str(step)]
        assert (shown["nodes"], shown["arrows"], shown["messages"]) == (5, 5, 0)
        assert shown["where"] == f"step {step} of 8"
    assert said["under_way"]["current"] == ["1"]
    assert said["under_way"]["messages"] == said["scrubbed"]["messages"] == 5
    assert said["moved"]
    assert "pause" in said["button"]
    assert "play" in said["idle"]
    assert 0 < said["paused"] == said["still"] < 8
    assert said["again"] == 0


@BROWSER
def test_two_on_one_clock_cost_what_python_says(tmp_path: Path) -> None:
    ring, tree = schedule_of("ring", 4), schedule_of("tree", 4)
    page = html(ring, tree, latency_s=3e-4, s_per_byte_added=2e-10)
    found = look(
        page,
        """
        found.tables = [];
        const all_of = (id) => [...Array(Number($(id).max) + 1).keys()];
        const keep = () => found.tables.push({ seconds: table(),
          latency: of("latency"), bandwidth: of("bandwidth"), size: of("size") });
        keep();
        for (const id of ["latency", "bandwidth", "size"]) {
          const began = $(id).value;
          for (const at of all_of(id)) { slide(id, at); keep(); }
          slide(id, began);
        }
        found.labels = ["latency-is", "bandwidth-is", "size-is"].map((id) => $(id).textContent);
        $("last").click(); found.end = shown();
        // when the ring is complete, the tree is in its second round
        all(".panel")[0].querySelector("[data-step='6']").click(); found.ring_done = shown();
        all("[data-clock=rounds]")[0].click(); $("first").click();
        for (let i = 0; i < 5; i++) { $("next").click(); await rest(); }
        found.rounds = shown();
        found.width = [document.documentElement.scrollWidth, innerWidth];
        """,
        tmp_path,
    )
    assert len(found["tables"]) > 40
    for row in found["tables"]:
        for name, seconds in row["seconds"].items():
            expected = cost(
                schedule_of(name, 4), row["size"], row["latency"], 8 / row["bandwidth"], 2e-10
            )
            assert seconds == pytest.approx(expected.seconds, rel=1e-12), (name, row)
    assert found["labels"] == ["300 µs", "1 Gbit/s", "4 MB"]
    assert [p["step"] for p in found["end"]] == [6, 4]
    assert [p["step"] for p in found["ring_done"]] == [6, 1]
    assert [p["moving"] for p in found["ring_done"]] == ["false", "true"]
    assert [p["step"] for p in found["rounds"]] == [5, 4]
    assert found["rounds"][0]["where"] == "step 5 of 6"
    assert found["rounds"][1]["cells"] == cells(tree, 4)
    assert found["width"][0] <= found["width"][1]


@BROWSER
def test_the_slowest_rank_counts_on_the_page_too(tmp_path: Path) -> None:
    """In this round one rank moves most and another one adds most."""
    transfers = (Transfer(0, 1, 0, 1, True), Transfer(2, 3, 0, 4, False))
    schedule = Schedule("own <&> odd", 4, 4, (transfers,), ("<one>",))
    for gamma in (1e-9, 1e-7):
        found = look(
            html(schedule, s_per_byte_added=gamma),
            "found.table = table(); found.head = document.querySelector('h1').textContent;"
            "found.phase = all('.steps i')[1].textContent;",
            tmp_path,
        )
        expected = cost(schedule, 4e6, 50e-6, 8 / 1e9, gamma).seconds
        assert found["table"]["own <&> odd"] == pytest.approx(expected, rel=1e-12)
        assert (found["head"], found["phase"]) == ("own <&> odd, 4 ranks", "<one>")


@BROWSER
def test_one_rank_has_nothing_to_play(tmp_path: Path) -> None:
    found = look(
        html(schedule_of("ring", 1), schedule_of("tree", 1)),
        "$('play').click(); $('next').click(); $('back').click(); await pause(100);"
        "found.button = $('play').textContent; found.shown = shown();"
        "found.text = document.body.innerText;",
        tmp_path,
    )
    assert "play" in found["button"]
    assert [p["step"] for p in found["shown"]] == [0, 0]
    assert "ring and tree, 1 rank\n" in found["text"]
    assert "NaN" not in found["text"]


@BROWSER
def test_sixteen_ranks_fit_a_phone(tmp_path: Path) -> None:
    """The page in a frame of 390 pixels: a browser's window is wider."""
    page = html(schedule_of("ring", 16), schedule_of("hierarchical:group=4", 16))
    found = look_in_a_frame(
        page,
        """
        found.texts = [...inner.querySelectorAll(".name")]
          .map((t) => t.getBoundingClientRect().height);
        """,
        tmp_path,
    )
    assert found["wide"][0] <= found["wide"][1] == 390
    assert len(found["texts"]) == 32
    assert min(found["texts"]) > 8  # pixels
    assert found["controls"] <= 800  # playback is in reach of a thumb
