"""The report: its figures recomputed from run.json, and its page in a real browser."""

import json
import re
from pathlib import Path

import pytest
from tests.browser import BROWSER, look
from tests.live_browser import Page, open_page
from tests.records import recompute, run, write_study

from paceline.errors import BadRequest
from paceline.report.charts.all import all_charts
from paceline.report.charts.base import ChartData
from paceline.report.compare import compare
from paceline.report.reading import read_study
from paceline.report.render import render, tables_of

pytestmark = pytest.mark.native_threads  # vl-convert's V8 stays in this process


def made_up(folder: Path) -> Path:
    """Two seeds of three strategies with 1 to 4 workers, every kind of chart filled."""
    runs = []
    for seed in (0, 1):
        for strategy, speed, accuracy in (
            ("serial", 1.0, 0.97),
            ("allreduce", 0.9, 0.97),
            ("psgd", 1.0, 0.9),
        ):
            for workers in (1, 2, 3, 4) if strategy != "serial" else (1,):
                train_s = 4.0 / (speed * min(workers, 2)) + 0.01 * seed
                parts = {
                    "compute_s": 0.7 * train_s,
                    "sync_s": 0.2 * train_s,
                    "idle_s": 0.1 * train_s,
                    "payload_sent_bytes": 1000,
                }
                extra = (
                    {"staleness_mean": 0.5, "replica_distance_max": 0.1 * workers}
                    if strategy == "psgd"
                    else {}
                )
                runs.append(
                    run(
                        strategy,
                        workers,
                        train_s,
                        accuracy - 0.001 * seed,
                        reached_s=train_s / 2,
                        target=0.8,
                        each=[{**parts, **extra}] * workers,
                        seed=seed,
                    )
                )
    return write_study(folder, runs, events=True)


def test_a_target_does_not_stretch_the_axis_of_accuracy(tmp_path: Path) -> None:
    """A dashed line without the scale of its chart draws it from 0: curves and names in a heap."""
    study = read_study(made_up(tmp_path / "s"))
    charts = all_charts(ChartData(study, tables_of(study)))
    chart = next(c for c in charts if c.name == "accuracy_over_train_s")
    scales = {
        json.dumps(layer["encoding"]["y"].get("scale"))
        for layer in chart.spec["layer"]
        if "y" in layer["encoding"]
    }
    assert len(scales) == 1
    low, high = json.loads(scales.pop())["domain"]
    assert 0.1 < low < 0.8 < high  # 0.8 is the target


@BROWSER
def test_the_page_draws_filters_and_needs_nothing(tmp_path: Path) -> None:
    page = render(made_up(tmp_path / "s"), figures=False)
    text = page.read_text()
    assert not re.search(r"""(?:src|href)=["']?(?:https?:)?//""", text)
    found = look(page, tmp_path / "profile")
    names = {name for name, _, _ in found["charts"]}
    assert names >= {
        "speedup",
        "speedup_serial",
        "efficiency",
        "train_s",
        "accuracy",
        "time_to_accuracy_s",
        "steps_to_accuracy",
        "sent_bytes",
        "sync_ms",
        "staleness",
        "distance",
        "accuracy_over_train_s",
        "accuracy_over_samples",
        "loss_over_train_s",
        "time_per_step",
        "time_per_worker",
        "cpu_percent",
        "memory_mb",
        "net_mb_per_s",
        "disk_mb_per_s",
    }
    assert (found["before"], found["without"], found["none"], found["all"]) == (9, 5, 0, 9)
    assert (found["serial_bars"], found["four_bars"]) == (3, 12)
    pair = {row[0]: row[1:] for row in found["pair"]}
    assert pair["training time"][-1] == "psgd x 2 is better"
    assert pair["test accuracy"][-1] == "serial x 1 is better"
    assert found["ground"] != found["other_ground"]
    assert found["width"][0] <= found["width"][1]


def press(page: Page, selector: str) -> None:
    """Click with the mouse, as a person does: the clipboard and downloads need that."""
    x, y = page.run(
        f"""(() => {{
          const it = document.querySelector({json.dumps(selector)});
          it.scrollIntoView({{ block: "center" }});
          const box = it.getBoundingClientRect();
          return [box.x + box.width / 2, box.y + box.height / 2];
        }})()"""
    )
    for kind in ("mousePressed", "mouseReleased"):
        page.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)


def pasted(page: Page) -> str:
    """Paste into a field of the page, and return what came."""
    page.run("document.body.append(Object.assign(document.createElement('textarea'), {id: 'in'}))")
    page.run("document.getElementById('in').focus()")
    page.ask("Input.dispatchKeyEvent", type="keyDown", commands=["paste"])
    found = str(page.run("document.getElementById('in').value"))
    page.run("document.getElementById('in').remove()")
    return found


@BROWSER
def test_a_person_copies_downloads_and_unfolds(tmp_path: Path) -> None:
    report = render(made_up(tmp_path / "s"), figures=False)
    (tmp_path / "down").mkdir()
    with open_page(tmp_path / "profile") as page:
        page.ask("Page.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path / "down"))
        page.visit(report.as_uri())
        page.until("document.querySelector('[data-chart=speedup_serial]')?.dataset.drawn")

        press(page, "#command button")
        page.until("document.querySelector('#command button').textContent == 'copied'")
        assert pasted(page) == "paceline train --strategy psgd --workers 2"

        press(page, "button[data-copy=markdown]")
        page.until("document.querySelector('button[data-copy=markdown]').textContent == 'copied'")
        head, rule, first, *rest = pasted(page).splitlines()
        assert head.startswith("| setting | workers | times as fast as serial | test accuracy |")
        assert set(rule) <= set("|-: ")
        assert first.startswith("| `psgd`")
        assert len(rest) == 8
        assert {line.count("|") for line in (head, rule, first, *rest)} == {head.count("|")}

        for kind, magic in (("svg", b"<svg"), ("png", b"\x89PNG")):
            press(page, f"figure:has([data-chart=speedup_serial]) [data-save={kind}]")
            saved = tmp_path / "down" / f"speedup_serial.{kind}"
            for _ in range(200):
                if saved.exists():
                    break
                page.run("new Promise((f) => setTimeout(f, 50))")
            assert saved.read_bytes().startswith(magic)
            assert len(saved.read_bytes()) > 2000

        links = page.run("[...document.querySelectorAll('nav a')].map((a) => a.hash)")
        assert {"#speed", "#accuracy", "#resources", "#repeat"} <= set(links)
        assert page.run(f"{json.dumps(links)}.every((h) => document.querySelector(h))")
        panels = "document.querySelectorAll('[data-chart=speedup_serial] .row-header, "
        panels += "[data-chart=speedup_serial] .mark-group.role-scope .background').length"
        assert page.run(panels) > 0
        assert page.errors == []


@BROWSER
def test_the_table_is_whole_at_1280_and_becomes_cards_on_a_phone(tmp_path: Path) -> None:
    report = render(made_up(tmp_path / "s"), figures=False)
    cut = """[...document.querySelectorAll('.scroll')]
      .filter((e) => e.scrollWidth > e.clientWidth + 1).map((e) => e.closest('section').id)"""
    with open_page(tmp_path / "profile") as page:
        page.visit(report.as_uri())
        page.until("!!document.querySelector('#main')")
        assert page.run(cut) == []
        page.visit(report.as_uri(), width=390, dark=True)
        page.until("innerWidth == 390 && !!document.querySelector('#main')")
        assert "answer" not in page.run(cut)
        assert page.run("getComputedStyle(document.querySelector('#main tr.serial')).display") == (
            "grid"
        )
        assert page.run("document.documentElement.scrollWidth") == 390
        bar = "document.querySelector('.controls')"
        assert page.run(f"getComputedStyle({bar}).position") == "static"  # it covers no chart
        assert page.run(f"{bar}.scrollHeight <= {bar}.clientHeight + 1")
        dots = page.run(
            "[...document.querySelectorAll('#main svg.dot')].map((s) => s.classList[1])"
        )
        assert dots.count("base") == 2  # serial's speed and accuracy
        assert {"good", "same"} <= set(dots)


@BROWSER
def test_the_page_fits_a_phone(tmp_path: Path) -> None:
    found = look(render(made_up(tmp_path / "s"), figures=False), tmp_path / "profile", width=500)
    assert found["width"][0] <= found["width"][1]


@BROWSER
def test_a_comparison_is_a_page_too(tmp_path: Path) -> None:
    found = look(
        compare(made_up(tmp_path / "a"), made_up(tmp_path / "b"), tmp_path / "c.html"),
        tmp_path / "profile",
    )
    assert [name for name, _, _ in found["charts"]] == ["ratio"]


def test_figures_are_what_run_json_says(tmp_path: Path) -> None:
    folder = made_up(tmp_path / "s")
    render(folder, figures=False)
    assert recompute(folder) == 9


@pytest.mark.slow
def test_a_report_over_200_runs_is_small(tmp_path: Path) -> None:
    runs = []
    for number in range(40):
        for workers in (1, 2, 4, 8, 16):
            runs.append(
                run(
                    "allreduce",
                    workers,
                    4.0 / workers,
                    varied={"lr": 0.001 * (number + 1)},
                    cores=16,
                )
            )
    folder = write_study(tmp_path / "s", runs, events=True)
    page = render(folder)  # 20 s on a quiet machine: `benchmarks/report.py` measures it
    assert page.stat().st_size < 4e6


def test_records_that_cannot_be_read_are_told(tmp_path: Path) -> None:
    folder = made_up(tmp_path / "s")
    first = next((folder / "runs").iterdir())
    events = first / "events" / "worker-0.jsonl"
    whole = read_study(folder)
    points = len([r for r in tables_of(whole)["curves"] if r["run"] == first.name])
    # a half-written line
    events.write_text(events.read_text().replace('"kind": "evaluation"', '"kind": "evalu', 1))
    assert (
        len([r for r in tables_of(read_study(folder))["curves"] if r["run"] == first.name])
        == points - 1
    )
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
        with pytest.raises(
            BadRequest, match=r"not a study's record|holds no finished run|cannot be read"
        ):
            read_study(folder)
    with pytest.raises(BadRequest, match="holds no run"):
        read_study(tmp_path / "nowhere")


def test_runs_without_a_study_are_grouped_by_the_options_that_differ(tmp_path: Path) -> None:
    for number, (transport, batch, seed) in enumerate(
        (("gloo", 64, 0), ("shm", 64, 0), ("shm", 64, 1), ("shm", 512, 0))
    ):
        folder = tmp_path / "all" / str(number)
        folder.mkdir(parents=True)
        record = run("allreduce", 2, 1.0 + number, transport=transport, batch_size=batch)
        record["config"]["seed"] = seed
        (folder / "run.json").write_text(json.dumps(record))
    damaged = tmp_path / "all" / "damaged"
    damaged.mkdir()
    (damaged / "run.json").write_text("{")
    found = read_study(tmp_path / "all")
    assert sorted(len(line.runs) for line in found.lines) == [1, 1, 2]
    assert any("transport=gloo" in line.label for line in found.lines)
    assert any("batch_size=512" in line.label for line in found.lines)
    assert "damaged" in found.unreadable[0]
    assert "A record is left out" in render(tmp_path / "all", figures=False).read_text()


def test_a_comparison_says_what_else_differs(tmp_path: Path) -> None:
    one = write_study(tmp_path / "a", [run("psgd", 2, 4.0, 0.95, lr=0.1), run("hogwild", 2)])
    other = write_study(
        tmp_path / "b", [run("psgd", 2, 1.0, 0.45, lr=0.2), run("hogwild", 2, error="broken")]
    )
    text = compare(one, other, tmp_path / "c.html").read_text()
    assert "<code>lr</code> (0.1, then 0.2)" in text
    assert "accuracy -50.00 points" in text
    assert "completed in one study only, or in none: <code>hogwild x 2</code>" in text
