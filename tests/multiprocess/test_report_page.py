"""The report: its figures recomputed from run.json, and its page in a real browser."""

import csv
import json
import re
import shutil
import subprocess
import time
from html import unescape
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from tests.records import run, write_study

from paceline.errors import BadRequest
from paceline.report.compare import compare
from paceline.report.lines import read_study
from paceline.report.render import render, tables_of

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
BROWSER = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (Debian: apt-get install chromium)")

LOOK = """<script>
const found = { errors: [] };
addEventListener("error", (e) => found.errors.push(e.message));
addEventListener("unhandledrejection", (e) => found.errors.push(String(e.reason)));
const pause = (ms) => new Promise((f) => setTimeout(f, ms));
const marks = (name) => document.querySelectorAll(`[data-chart=${name}] svg .mark-symbol path`).length;
(async () => {
  const charts = [...document.querySelectorAll(".chart")];
  for (let i = 0; i < 400 && charts.some((c) => !c.dataset.drawn); i++) await pause(50);
  found.charts = charts.map((c) => [c.dataset.chart, c.querySelectorAll("svg").length, c.querySelectorAll("svg path").length]);
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
    const bars = () => document.querySelectorAll("[data-chart=time_per_worker] svg .mark-rect path").length;
    const line = document.getElementById("line");
    const choose = async (what) => { line.value = what; line.dispatchEvent(new Event("change")); await pause(300); };
    await choose("serial x 1"); found.serial_bars = bars();
    await choose("allreduce x 4"); found.four_bars = bars();
    const one = document.getElementById("one"), other = document.getElementById("other");
    one.value = "serial x 1"; other.value = "psgd x 2"; other.dispatchEvent(new Event("change"));
    found.pair = [...document.querySelectorAll("#pair tr")].map((r) => [...r.children].map((c) => c.textContent));
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
    """What a browser that reaches no network makes of a page, after some clicks."""
    copy = page.with_name("looked-at.html")
    before, _, after = page.read_text().rpartition("</body>")
    copy.write_text(before + LOOK + after)
    done = subprocess.run(
        [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync", "--enable-logging=stderr",
         "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={profile}", f"--window-size={width},900",
         "--virtual-time-budget=60000", "--dump-dom", copy.as_uri()],
        capture_output=True, text=True, timeout=100, check=True,
    )  # fmt: skip
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert not console, console[:3]
    match = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.S)
    assert match is not None, "the page did not come to its end"
    found: dict[str, Any] = json.loads(unescape(match[1]))
    assert found["errors"] == []
    assert found["requests"] == 0
    assert found["charts"]
    assert all(svgs == 1 and paths > 0 for _, svgs, paths in found["charts"]), found["charts"]
    return found


def made_up(folder: Path) -> Path:
    """Two seeds of three strategies with 1 to 4 workers, every kind of chart filled."""
    runs = []
    for seed in (0, 1):
        for strategy, speed, accuracy in (("serial", 1.0, 0.97), ("allreduce", 0.9, 0.97), ("psgd", 1.0, 0.9)):
            for workers in (1, 2, 3, 4) if strategy != "serial" else (1,):
                train_s = 4.0 / (speed * min(workers, 2)) + 0.01 * seed
                parts = {
                    "compute_s": 0.7 * train_s,
                    "sync_s": 0.2 * train_s,
                    "idle_s": 0.1 * train_s,
                    "payload_sent_bytes": 1000,
                }
                extra = {"staleness_mean": 0.5, "replica_distance_max": 0.1 * workers} if strategy == "psgd" else {}
                runs.append(
                    run(strategy, workers, train_s, accuracy - 0.001 * seed, reached_s=train_s / 2, target=0.8,
                        each=[{**parts, **extra}] * workers)
                )  # fmt: skip
    return write_study(folder, runs, events=True)


@BROWSER
def test_the_page_draws_filters_and_needs_nothing(tmp_path: Path) -> None:
    page = render(made_up(tmp_path / "s"), figures=False)
    text = page.read_text()
    assert not re.search(r"""(?:src|href)=["']?(?:https?:)?//""", text)
    found = look(page, tmp_path / "profile")
    names = {name for name, _, _ in found["charts"]}
    assert names >= {
        "speedup", "speedup_serial", "efficiency", "train_s", "accuracy", "time_to_accuracy_s", "steps_to_accuracy",
        "sent_bytes", "sync_ms", "staleness", "distance", "accuracy_over_train_s", "accuracy_over_samples",
        "loss_over_train_s", "time_per_step", "time_per_worker", "cpu_percent", "memory_mb", "net_mb_per_s", "disk_mb_per_s",
    }  # fmt: skip
    assert (found["before"], found["without"], found["none"], found["all"]) == (9, 5, 0, 9)
    assert (found["serial_bars"], found["four_bars"]) == (3, 12)
    pair = {row[0]: row[1:] for row in found["pair"]}
    assert pair["training time"][-1] == "psgd x 2 is better"
    assert pair["test accuracy"][-1] == "serial x 1 is better"
    assert found["ground"] != found["other_ground"]
    assert found["width"][0] <= found["width"][1]


@BROWSER
def test_the_page_fits_a_phone(tmp_path: Path) -> None:
    found = look(render(made_up(tmp_path / "s"), figures=False), tmp_path / "profile", width=500)
    assert found["width"][0] <= found["width"][1]


@BROWSER
def test_a_comparison_is_a_page_too(tmp_path: Path) -> None:
    found = look(compare(made_up(tmp_path / "a"), made_up(tmp_path / "b"), tmp_path / "c.html"), tmp_path / "profile")
    assert [name for name, _, _ in found["charts"]] == ["ratio"]


def test_figures_are_what_run_json_says(tmp_path: Path) -> None:
    """Speedup, efficiency, bytes and the parts of a step, computed here from the files alone."""
    folder = made_up(tmp_path / "s")
    render(folder, figures=False)
    records = [json.loads(f.read_text()) for f in (folder / "runs").glob("*/run.json")]

    def times(strategy: str, workers: int) -> list[float]:
        return [
            r["result"]["train_s"] for r in records if (r["config"]["strategy"], r["config"]["workers"]) == (strategy, workers)
        ]

    study = read_study(folder)
    rows = {(r["strategy"], r["workers"]): r for r in tables_of(study)["lines"]}
    assert len(rows) == 9
    for (strategy, workers), row in rows.items():
        own = fmean(times(strategy, 1)) / fmean(times(strategy, workers))
        assert row["speedup"] == pytest.approx(own, rel=1e-4)
        assert row["speedup_serial"] == pytest.approx(fmean(times("serial", 1)) / fmean(times(strategy, workers)), rel=1e-4)
        assert row["efficiency"] == pytest.approx(own / workers, rel=1e-4)
        assert row["sent_bytes"] == pytest.approx(100)
        total = row["compute_ms"] + row["sync_ms"] + row["idle_ms"]
        assert total == pytest.approx(1e3 * fmean(times(strategy, workers)) / 10, rel=1e-3)
    with (folder / "results.csv").open() as file:
        table = list(csv.DictReader(file))
    assert len(table) == len(records)
    for line in table:
        base = fmean(times("serial", 1))
        assert float(line["speedup_serial"]) == pytest.approx(base / float(line["train_s"]), rel=1e-6)


def test_a_report_over_200_runs_is_quick_and_small(tmp_path: Path) -> None:
    runs = []
    for number in range(40):
        for workers in (1, 2, 4, 8, 16):
            runs.append(run("allreduce", workers, 4.0 / workers, varied={"lr": 0.001 * (number + 1)}, cores=16))
    folder = write_study(tmp_path / "s", runs, events=True)
    started = time.monotonic()
    page = render(folder)
    assert time.monotonic() - started < 60  # 20 on a quiet machine: `benchmarks/report.py` measures it
    assert page.stat().st_size < 15e6


def test_records_that_cannot_be_read_are_told(tmp_path: Path) -> None:
    folder = made_up(tmp_path / "s")
    first = next((folder / "runs").iterdir())
    events = first / "events" / "worker-0.jsonl"
    whole = read_study(folder)
    points = len([r for r in tables_of(whole)["curves"] if r["run"] == first.name])
    events.write_text(events.read_text().replace('"kind": "evaluation"', '"kind": "evalu', 1))  # a half-written line
    assert len([r for r in tables_of(read_study(folder))["curves"] if r["run"] == first.name]) == points - 1
    record = json.loads((first / "run.json").read_text())
    (first / "run.json").write_text(json.dumps({**record, "schema": 99}))
    with pytest.raises(BadRequest, match="schema 99"):
        read_study(folder)
    about = json.loads((folder / "study.json").read_text())
    (folder / "study.json").write_text(json.dumps({**about, "schema": 99}))
    with pytest.raises(BadRequest, match="schema 99"):
        read_study(folder)
    for broken in ("{", "[]", '{"schema": 1}', '{"schema": 1, "runs": [{}]}'):
        (folder / "study.json").write_text(broken)
        with pytest.raises(BadRequest, match=r"not a study's record|holds no finished run"):
            read_study(folder)
    with pytest.raises(BadRequest, match="holds no run"):
        read_study(tmp_path / "nowhere")
