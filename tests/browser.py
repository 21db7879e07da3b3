"""A report in a real browser that reaches no network."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
BROWSER = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium here (Debian: apt-get install chromium)"
)

LOOK = """<script>
const found = { errors: [] };
addEventListener("error", (e) => found.errors.push(e.message));
addEventListener("unhandledrejection", (e) => found.errors.push(String(e.reason)));
const pause = (ms) => new Promise((f) => setTimeout(f, ms));
const all = (what) => [...document.querySelectorAll(what)];
const marks = (name) => all(`[data-chart=${name}] svg .mark-symbol path`).length;
(async () => {
  const charts = all(".chart");
  for (let i = 0; i < 400 && charts.some((c) => !c.dataset.drawn); i++) await pause(50);
  const count = (chart, what) => chart.querySelectorAll(what).length;
  found.charts = charts.map((c) => [c.dataset.chart, count(c, "svg"), count(c, "svg path")]);
  found.width = [document.documentElement.scrollWidth, innerWidth];
  const box = document.querySelector("input[data-series='psgd']");
  if (box) {
    found.before = marks("train_s");
    box.click(); await pause(300);
    found.without = marks("train_s");
    document.querySelector("button[data-choose=none]").click(); await pause(300);
    found.none = marks("train_s");
    document.querySelector("button[data-choose=all]").click(); await pause(300);
    found.all = marks("train_s");
    const bars = () => all("[data-chart=time_per_worker] svg .mark-rect path").length;
    const line = document.getElementById("line");
    const choose = async (what) => {
      line.value = what; line.dispatchEvent(new Event("change")); await pause(300);
    };
    await choose("serial x 1"); found.serial_bars = bars();
    await choose("allreduce x 4"); found.four_bars = bars();
    const one = document.getElementById("one"), other = document.getElementById("other");
    one.value = "serial x 1"; other.value = "psgd x 2"; other.dispatchEvent(new Event("change"));
    found.pair = all("#pair tr").map((r) => [...r.children].map((c) => c.textContent));
    found.ground = getComputedStyle(document.body).backgroundColor;
    document.getElementById("theme").click(); await pause(500);
    found.other_ground = getComputedStyle(document.body).backgroundColor;
  }
  found.requests = performance.getEntriesByType("resource").length;
  const out = document.createElement("pre");
  out.id = "found"; out.textContent = JSON.stringify(found); document.body.append(out);
})();
</script></body>"""


def look(page: Path, profile: Path, width: int = 1280) -> dict[str, Any]:
    """Open a page in a browser without a network, click, and return what it shows."""
    copy = page.with_name("looked-at.html")
    before, _, after = page.read_text().rpartition("</body>")
    copy.write_text(before + LOOK + after)
    done = subprocess.run(
        [
            str(CHROMIUM),
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--enable-logging=stderr",
            "--host-resolver-rules=MAP * ~NOTFOUND",
            f"--user-data-dir={profile}",
            f"--window-size={width},900",
            "--virtual-time-budget=60000",
            "--dump-dom",
            copy.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert not console, console[:3]
    match = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.S)
    assert match is not None, "the script on the page did not finish"
    found: dict[str, Any] = json.loads(unescape(match[1]))
    assert found["errors"] == []
    assert found["requests"] == 0
    assert found["charts"]
    assert all(svgs == 1 and paths > 0 for _, svgs, paths in found["charts"]), found["charts"]
    return found
