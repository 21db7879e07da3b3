"""Sentences of the report that must not be false: verdicts, the metric that was asked for, ties,
gains.
"""

from __future__ import annotations

import csv
import io
import json
import math
import random
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from tests.records import run, write_study

from paceline.cli.show import show_run
from paceline.report.answer import answer, best_lines, compared
from paceline.report.charts.marks import quantity
from paceline.report.commentary.all import comments
from paceline.report.compare import compare
from paceline.report.judge import SPEED, judge, speed
from paceline.report.lines import Line, RunRecord, Study
from paceline.report.origin import origin_table
from paceline.report.reading import read_study
from paceline.report.render import render, write
from paceline.report.results import write_results
from paceline.report.score import score_of, scored
from paceline.report.tables import line_rows, verdicts
from paceline.report.words import with_range
from paceline.terminal.results import show_study


@pytest.fixture
def study(tmp_path: Path):
    def make(*runs: dict[str, Any], folder: str = "s") -> Study:
        return read_study(write_study(tmp_path / folder, list(runs)))

    return make


def said(found: Study, kind: str = "") -> str:
    return " ".join(c.text for c in comments(found) if not kind or c.kind == kind)


def seeds(
    strategy: str, workers: int, times: tuple[float, ...], accuracy: float = 0.948, **known: Any
) -> list[dict[str, Any]]:
    return [run(strategy, workers, t, accuracy + 0.0005 * i, **known) for i, t in enumerate(times)]


# --- ranges that do not overlap are not noise

# standard deviation of log time by workers, on a shared machine
NOISY = {1: 0.15, 2: 0.23, 3: 0.20, 4: 0.34, 5: 0.20}


def shared_machine() -> list[dict[str, Any]]:
    """The study of a new user: every run of all-reduce x 2 was faster than every serial one, among
    settings with much noise.
    """
    ring = "allreduce:collective=ring"
    parts = [{"compute_s": 1.2, "sync_s": 0.4, "idle_s": 0.1, "payload_sent_bytes": 443_000}] * 2
    known: dict[str, Any] = {"target": 0.92, "batch_sizes": [120]}
    found = seeds("serial", 1, (2.60, 2.64, 2.68), reached_s=2.29, **known)
    found += seeds(ring, 1, (2.60, 2.80, 3.02), reached_s=2.4, **known)
    found += seeds(
        ring,
        2,
        (1.41, 1.79, 1.90),
        reached_s=1.5,
        each=parts,
        **(known | {"batch_sizes": [60, 60]}),
    )
    found += seeds(ring, 3, (2.70, 2.78, 2.85), reached_s=2.4, **known)
    known["batch_sizes"] = [60, 60]
    found += seeds("hogwild", 2, (1.60, 2.00, 2.70), 0.962, reached_s=1.03, **known)
    for strategy in ("psgd", "local-sgd:every=8", "ring-reduce", "stepwise"):
        for workers, deviation in NOISY.items():
            middle = 2.7 if workers == 1 else 2.2 if workers == 2 else 2.9
            times = tuple(middle * math.exp(1.2 * deviation * s) for s in (-1, 0.1, 0.9))
            found += seeds(strategy, workers, times, reached_s=2.0, **known)
    return found


def test_what_was_faster_in_every_round_is_told_with_its_interval(study) -> None:
    """Three noisy rounds of many settings do not settle it, but they do not say "no" either."""
    found = study(*shared_machine())
    first = answer(found)[0]
    assert "`allreduce:collective=ring` with 2 workers: 1.57x as fast as serial (95% inter" in first
    assert "faster in 3 of 3 rounds" in first
    assert "No setting" not in " ".join([*answer(found), said(found)])
    assert_true(found)
    assert [line.id for line in best_lines(found)][:2] == [
        "serial x 1",
        "allreduce:collective=ring x 2",
    ]


def confirmed(*ratios: tuple[float, ...], others: tuple[str, ...] = ("b x 2", "c x 2")) -> dict:
    """study.json's `confirm`: one tuple of speeds against serial per block."""
    blocks = [
        {
            "number": n,
            "order": ["serial x 1", *others],
            "samples_per_s": {
                "serial x 1": 1000.0,
                **{name: 1000.0 * r for name, r in zip(others, each, strict=True)},
            },
            "seconds": 30.0,
            "foreign": 0.01,
            "stolen": 0.0,
            "repeats": 0,
            "disturbed": False,
        }
        for n, each in enumerate(ratios)
    ]
    return {
        "serial": "serial x 1",
        "settings": list(others),
        "width": 0.1,
        "pilot": 5,
        "wanted": len(blocks),
        "block_s": 30.0,
        "ended": "enough",
        "blocks": blocks,
    }


SCREENED = [("serial", 1, 4.0), ("a", 2, 2.4), ("b", 2, 2.0), ("c", 2, 2.1)]


def screened(tmp_path: Path, confirm: dict[str, Any]) -> Study:
    runs = [r for name, p, t in SCREENED for r in seeds(name, p, (0.97 * t, t, 1.04 * t))]
    return read_study(write_study(tmp_path / "s", runs, confirm=confirm, spent_s=500.0))


def test_the_headline_is_made_from_the_confirming_blocks_alone(tmp_path: Path) -> None:
    found = screened(tmp_path, confirmed((1.50, 1.2), (1.55, 1.22), (1.45, 1.18), (1.52, 1.21)))
    first = answer(found)[0]
    assert first.startswith(
        "`b` with 2 workers was the fastest: 1.50x as fast as serial (95% inter"
    )
    assert "faster in 4 of 4 blocks" in first
    assert "than `c x 2` too" in first
    assert "rests on 4 blocks alone" in said(found, "confirmed")


def test_confirmed_settings_that_cannot_be_told_apart_are_tied(tmp_path: Path) -> None:
    found = screened(tmp_path, confirmed((1.5, 1.52), (1.55, 1.5), (1.45, 1.49), (1.52, 1.53)))
    first = answer(found)[0]
    assert first.startswith("`c` and `b` with 2 workers were tied for the fastest: 1.51x and 1.50x")
    assert_true(found)


def test_what_the_blocks_do_not_confirm_is_not_claimed(tmp_path: Path) -> None:
    found = screened(tmp_path, confirmed((1.0, 0.9), (1.1, 1.0), (0.9, 1.05), (1.02, 0.95)))
    first = answer(found)[0]
    assert "No setting with several workers was shown to be faster than serial" in first
    assert "faster in 2 of 4 blocks" in first or "slower in 2 of 4 blocks" in first


def test_a_budget_that_ended_says_which_one_would_do(tmp_path: Path) -> None:
    confirm = confirmed((1.5, 1.2), (1.9, 1.3), (1.2, 1.0), (1.6, 1.1))
    found = screened(tmp_path, {**confirm, "ended": "budget", "wanted": 20, "pilot": 3})
    told = said(found, "confirmed")
    assert "The budget ended after 4 of 20 blocks, with intervals of +-" in told
    assert "`--budget 17min` would give +-10%" in told  # 500 s and 16 blocks of 30 s
    few = {**confirm, "ended": "budget", "wanted": 5, "pilot": 5}
    told = said(screened(tmp_path / "few", few), "confirmed")
    assert "`--budget 9min` is enough for the first 5, which show how many are needed" in told
    assert "would give" not in told


def test_a_width_that_was_reached_asks_for_no_larger_budget(tmp_path: Path) -> None:
    confirm = confirmed((1.5, 1.2), (1.52, 1.21), (1.49, 1.2), (1.51, 1.19))
    found = screened(tmp_path, {**confirm, "ended": "budget", "wanted": 20})
    assert "--budget" not in said(found, "confirmed")


def test_the_pair_table_and_the_results_say_the_same(study, tmp_path: Path) -> None:
    found = study(*shared_machine())
    place = {line.id: i for i, line in enumerate(found.lines)}
    letters = verdicts(found)["train_s"]
    told = {True: "t", False: "n"}
    for line in found.lines:
        verdict = speed(found, line, found.serial(line))
        if verdict is not None and line is not found.lines[0]:
            assert letters[place[line.id]][place["serial x 1"]] == told[verdict.differs]
    write_results(found, tmp_path / "results.csv")
    with (tmp_path / "results.csv").open() as file:
        said_of = {
            row["label"] + row["workers"]: row["setting_against_serial"]
            for row in csv.DictReader(file)
        }
    assert said_of["serial1"] == ""
    assert said_of["psgd5"] == "not told apart"
    for line in found.lines:
        verdict = speed(found, line, found.serial(line))
        if verdict is not None:
            word = "faster" if verdict.lower else "slower" if verdict.higher else "not told apart"
            assert said_of[f"{line.label}{line.workers}"] == word


FASTNESS = re.compile(
    r"(\d+\.\d\d)x as fast as serial \(95% interval (\d+\.\d\d) to (\d+\.\d\d)"
    r"(?:, (faster|slower) in (\d+) of (\d+) (?:rounds|blocks))?\)"
)


def assert_true(found: Study) -> None:
    """Assert that no sentence of the page contradicts the verdicts or another sentence."""
    texts = [*answer(found), *(c.text for c in comments(found))]
    by_id = {line.id: line for line in found.lines}
    lines, serial = compared(found), by_id["serial x 1"]
    against = {x.id: speed(found, x, serial) for x in lines}
    rows = {row["id"]: row for row in line_rows(found)}
    for text in texts:
        names = [by_id[n] for n in re.findall(r"`([^`]+ x \d+)`", text) if n in by_id]
        labelled = [
            by_id[f"{label} x {p}"] for label, p in re.findall(r"`([^`]+)` with (\d+) worker", text)
        ]
        for gain, low, high, side, wins, of in FASTNESS.findall(text):
            assert float(low) <= float(gain) <= float(high), text
            if "tied" not in text:
                assert float(gain) == pytest.approx(
                    rows[labelled[0].id]["speedup_serial"], abs=0.006, rel=1e-3
                ), text
            if side:
                assert int(wins) <= int(of), text
                assert (float(gain) >= 1) if side == "faster" else (float(gain) <= 1), text
        if "No setting with several workers" in text:
            assert not against[labelled[0].id].lower, text
            assert labelled[0].id in found.confirmed or not any(v.lower for v in against.values())
        if re.search(r"All \d+ settings with several workers were slower", text):
            assert all(verdict.higher for verdict in against.values()), text
        if re.search(r"The fastest (beyond noise )?was|was the fastest", text):
            assert against[labelled[0].id].lower, text
        if "seems to be" in text:
            assert against[labelled[0].id].high < 0, text
            assert not any(v.lower for v in against.values()), text
        if "did not differ beyond noise from" in text:
            *others, best = names
            assert not any(speed(found, x, best).differs for x in others), text
        if counted := re.search(r"(\d+) other settings? did not differ from it", text):
            best = labelled[0]
            close = [x for x in lines if x is not best and not speed(found, x, best).differs]
            assert int(counted[1]) == len(close), text
        if "the speedup is within noise" in text:
            one = by_id.get(f"{labelled[0].label} x 1", serial)
            assert not speed(found, labelled[0], one).differs, text
        if "was slower:" in text:
            assert against[labelled[0].id].higher, text
        score = score_of(found)
        scores = {x.id: scored(found, x, serial) for x in lines}
        if "No strategy lost accuracy" in text:
            assert not any(
                v is not None and v.differs and score.worse(v) > score.tiny for v in scores.values()
            ), text
        if text.startswith("It ended") and "within noise" in text:
            best = re.findall(r"`([^`]+)` with (\d+) worker", answer(found)[0])[0]
            assert not scores[f"{best[0]} x {best[1]}"].differs, text
    done = [line for line in found.lines if line.completed]
    for column, asked in (("train_s", SPEED), ("accuracy", score_of(found).quantity)):
        for i, row in enumerate(verdicts(found).get(column, [])):
            for j, letter in enumerate(row):
                verdict = judge(asked, found)(done[i], done[j])
                assert (letter in "to") == (verdict is not None and verdict.differs)


def in_memory(runs: list[dict[str, Any]]) -> Study:
    lines: dict[str, Line] = {}
    for record in runs:
        strategy, workers = record["config"]["strategy"], record["config"]["workers"]
        line = lines.setdefault(
            f"{strategy} x {workers}", Line(strategy, workers, {"strategy": strategy})
        )
        line.runs.append(RunRecord(f"{line.id}-{len(line.runs)}", len(line.runs), record, Path()))
    return Study("made up", Path(), list(lines.values()), {"definition": {"title": "made up"}})


def heavy_tailed(luck: random.Random) -> float:
    """Student's t with two degrees of freedom: now and then a run takes very long."""
    return luck.gauss(0, 1) / math.sqrt(luck.expovariate(1.0) + 1e-9)


@settings(max_examples=60)
@given(
    st.integers(1, 4),
    st.lists(
        st.tuples(
            # the true time, of serial's: equal, 10% apart, more
            st.sampled_from([0.5, 0.9, 1.0, 1.0, 1.1, 1.5]),
            st.sampled_from([0.001, 0.02, 0.1, 0.3]),  # the noise
            st.sampled_from([-0.2, -0.01, -0.004, 0.0, 0.02]),  # accuracy, against serial's
            st.integers(1, 5),
            st.booleans(),  # heavy tails
            st.booleans(),  # one seed diverges
        ),
        min_size=1,
        max_size=7,
    ),
    st.integers(0, 6),  # confirming blocks
    st.integers(0, 2**32),
)
def test_no_sentence_contradicts_the_table(
    count: int, truths: list[tuple[float, float, float, int, bool, bool]], blocks: int, seed: int
) -> None:
    """The true times and noises are known; every setting has one to four runs."""
    luck = random.Random(seed)
    runs = [
        run("serial", 1, 4.0 * math.exp(luck.gauss(0, 0.02)), 0.9 + luck.gauss(0, 0.002))
        for _ in range(count)
    ]
    for number, (ratio, noise, points, workers, heavy, diverges) in enumerate(truths):
        for n in range(count):
            chance = heavy_tailed(luck) if heavy else luck.gauss(0, 1)
            time = 4.0 * ratio * math.exp(max(-3.0, min(3.0, noise * chance)))
            accuracy = 0.1 if diverges and n == 0 else 0.9 + points + luck.gauss(0, 0.002)
            runs.append(run(f"s{number % 5}", workers, time, accuracy))
    found = in_memory(runs)
    names = [x.id for x in compared(found)][:2]
    if blocks and names:
        ratios = [tuple(math.exp(luck.gauss(0.2, 0.1)) for _ in names) for _ in range(blocks)]
        found.about["confirm"] = confirmed(*ratios, others=tuple(names))
    assert_true(found)


def test_all_were_slower(study) -> None:
    once = study(run("serial", 1, 1.66), run("ps", 2, 2.94), run("allreduce", 2, 3.5))
    first = answer(once)[0]
    assert (
        "All 2 settings with several workers were slower than serial; the nearest was `ps` with 2"
        " workers: 0.56x as fast as serial (seen in one run), ending at" in first
    )
    three = study(
        *seeds("serial", 1, (1.6, 1.7, 1.8)), *seeds("ps", 2, (2.8, 2.9, 3.2)), folder="t"
    )
    assert "`ps` with 2 workers was slower than serial: 0.57x as fast as serial" in answer(three)[0]
    assert "slower in 3 of 3 rounds" in answer(three)[0]
    close = study(
        *seeds("serial", 1, (1.6, 1.7, 1.8)), *seeds("ps", 2, (1.7, 1.68, 1.85)), folder="u"
    )
    assert (
        "No setting with several workers was shown to be faster than serial; the nearest was `ps`"
        in answer(close)[0]
    )


def test_a_noisy_setting_is_judged_by_its_own_runs(study) -> None:
    calm = [r for i in range(8) for r in seeds(f"s{i}", 2, (1.992, 2.0, 2.008))]
    found = study(
        *seeds("serial", 1, (3.984, 4.0, 4.016)), *calm, *seeds("noisy", 2, (3.7, 3.8, 5.9))
    )
    assert "noisy" not in said(found, "slower")


def test_oversubscribed_settings_do_not_blur_the_others(study) -> None:
    """A t-test shows 1.2x between settings that fit the cores, however noisy the others are."""
    calm = [r for i in range(5) for r in seeds(f"s{i}", 2, (2.97, 3.0, 3.03))]
    crowded = [r for i in range(9) for r in seeds(f"s{i}", 4, (1.5, 3.0, 6.0))]
    found = study(*seeds("serial", 1, (3.56, 3.6, 3.64)), *calm, *crowded)
    noise = judge(SPEED, found).noise
    assert noise[False].deviation < 0.02 < 0.3 < noise[True].deviation
    assert judge(SPEED, found)(found.line("s0", 2), found.line("serial", 1)).differs
    assert "oversubscribed runs differed by" in said(found, "next")
    assert "runs that fit the cores differed" not in said(found, "next")


def test_a_small_loss_beyond_noise_is_told_as_such(study) -> None:
    def of(strategy: str, workers: int, time: float, accuracy: float) -> list[dict[str, Any]]:
        return [run(strategy, workers, time, accuracy + e) for e in (-1e-4, 0, 1e-4)]

    found = study(
        *of("serial", 1, 4.0, 0.970), *of("allreduce", 2, 2.0, 0.966), *of("psgd", 2, 2.5, 0.970)
    )
    assert answer(found)[1] == "It ended 0.4 points below serial, in 3 of 3 rounds."
    assert "`allreduce` lost accuracy against serial, but little: 0.4 points below serial" in said(
        found, "accuracy"
    )
    assert "noise" not in said(found, "accuracy")


def test_adding_workers_is_not_judged_within_noise(study) -> None:
    known = {"cores": 4}
    found = study(
        *seeds("serial", 1, (3.8, 4.0, 4.2), **known),
        *seeds("allreduce", 1, (3.8, 4.0, 4.2), **known),
        *seeds("allreduce", 2, (4.21, 3.81, 4.01), **known),
    )
    told = " ".join(answer(found))
    assert "Adding workers did not pay" not in told
    assert "do not show which number of workers is fastest for `allreduce`" in told


# --- networks


def on_links(study: Any, seconds: dict[tuple[str, str], float], **known: Any) -> Study:
    runs = [run("serial", 1, 5.0, 0.9, reached_s=4.0, target=0.85)]
    for (network, codec), reached in seconds.items():
        own = {"codec": codec, "network": network, "varied": {"network": network, "codec": codec}}
        runs.append(run("allreduce", 4, 10.0, 0.9, reached_s=reached, target=0.85, **own, **known))
    return study(*runs)


def test_one_seed_of_a_network_says_no_more_than_ten_per_cent(study) -> None:
    seconds = {
        ("10mbit", "none"): 4.0,
        ("10mbit", "sign"): 3.96,
        ("unlimited", "none"): 4.0,
        ("unlimited", "sign"): 3.96,
    }
    found = on_links(study, seconds)
    assert "(no clear difference to `allreduce x 4`)" in answer(found)[0]
    assert "(seen in one run)" in answer(found)[0]
    assert "as soon as plain" not in said(found, "network")
    assert "compression makes no clear difference" in said(found, "network")


def test_one_seed_that_is_far_apart_is_told_as_seen_once(study, tmp_path: Path) -> None:
    seconds = {
        ("10mbit", "none"): 9.0,
        ("10mbit", "sign"): 3.0,
        ("unlimited", "none"): 4.0,
        ("unlimited", "sign"): 8.0,
    }
    found = on_links(study, seconds)
    text = said(found, "network")
    assert (
        "reached the target accuracy 3.00x as soon as plain all-reduce (3.00 s against 9.00 s)"
        " (seen in one run)" in text
    )
    assert (
        "compression does not pay: the best codec, `sign`, took 2.00x the time of plain all-reduce"
        " (seen in one run)" in text
    )


# --- the metric that was asked for


def measured(
    strategy: str, workers: int, time: float, value: float, name: str = "auc", **known: Any
) -> dict[str, Any]:
    record = run(strategy, workers, time, known.pop("accuracy", 0.7638), **known)
    record["result"]["metric"] = {"name": name, "value": value}
    return record


def test_the_metric_that_was_asked_for_leads(study, tmp_path: Path) -> None:
    alone = study(measured("allreduce", 2, 12.62, 0.86631))
    assert (
        answer(alone)[0]
        == "`allreduce` with 2 workers trained for 12.62 s, to auc 0.8663 (76.38% accuracy)."
    )
    several = study(
        *(measured("serial", 1, 4.0 + s, 0.87 + s) for s in (0, 0.001)),
        *(measured("psgd", 2, 2.0 + s, 0.80 + s) for s in (0, 0.001)),
        folder="t",
    )
    assert "ending at auc 0.8005 (serial: 0.8705)" in answer(several)[0]
    assert answer(several)[1] == "Every setting that was faster than serial lost in auc."
    assert "`psgd` lost in auc against serial: up to 0.07 worse than serial" in said(
        several, "accuracy"
    )
    page = render(tmp_path / "t", figures=False).read_text()
    assert "<th>test<br>auc</th><th>test<br>accuracy</th>" in page
    assert '["metric","test auc","","high"]' in page
    assert "<h3>Test auc</h3>" in page
    console = Console(width=120, record=True, file=io.StringIO())
    show_study(read_study(tmp_path / "t"), console)
    printed = console.export_text()
    assert "auc" in printed
    assert "0.8705 (0.87-0.871)" in printed
    with (tmp_path / "t" / "results.csv").open() as file:
        assert {(row["metric"], row["metric_value"]) for row in csv.DictReader(file)} >= {
            ("auc", "0.87"),
            ("auc", "0.8"),
        }
    study(*(measured("serial", 1, 4.0, 0.60 + s) for s in (0, 0.001)), folder="u")
    assert (
        "<td>auc -0.27 (times 0.690, 95% interval 0.6"
        in compare(tmp_path / "t", tmp_path / "u", tmp_path / "c.html").read_text()
    )


def test_smaller_is_better_where_the_metric_says_so(study) -> None:
    def of(strategy: str, workers: int, time: float, value: float) -> list[dict[str, Any]]:
        return [
            measured(strategy, workers, time, value * (1 + s), "mse", accuracy=None)
            for s in (-0.001, 0.001)
        ]

    found = study(*of("serial", 1, 4.0, 0.5), *of("psgd", 2, 2.0, 0.7), *of("hogwild", 2, 2.5, 0.4))
    assert not score_of(found).higher_is_better
    assert "ending at mse 0.7 (serial: 0.5)" in answer(found)[0]
    assert "in mse was `hogwild` with 2 workers" in answer(found)[1]
    assert "with mse 0.1 better than serial's, in 2 of 2 rounds" in answer(found)[1]
    assert "`psgd` lost in mse against serial: up to 0.2 worse than serial" in said(
        found, "accuracy"
    )
    assert "`hogwild` gained in mse against serial" in said(found, "accuracy")
    unplanned = study(*of("psgd", 2, 2.0, 0.7), *of("hogwild", 2, 2.5, 0.4), folder="t")
    assert answer(unplanned)[0] == "`hogwild x 2` ended with the lowest mse, 0.4."


def test_a_metric_of_ones_own_says_which_way_is_better(study) -> None:
    own = measured("allreduce", 2, 2.0, 3.0, "words-wrong")
    own["result"]["metric"]["higher_is_better"] = False
    assert not score_of(study(own)).higher_is_better


def test_the_share_of_the_largest_class_is_called_that(
    study, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def of(accuracy: float) -> dict[str, Any]:
        record = measured("serial", 1, 2.0, 0.86, accuracy=accuracy)
        classes = {
            "<=50K": {"train": 24_720, "test": 12_435},
            ">50K": {"train": 7_841, "test": 3_846},
        }
        rows = {"train": 32_561, "test": 16_281}
        record["data"] = {
            "name": "adult",
            "engine": "polars",
            "master": None,
            "shards": 4,
            "rows": rows,
            "seconds": {},
        }
        record["data"]["report"] = {"classes": classes}
        return record

    found = answer(study(of(12_435 / 16_281)))
    assert (
        "The accuracy of `serial x 1`, 76.38%, is the share of the largest class (<=50K)"
        in found[1]
    )
    assert len(answer(study(of(12_436 / 16_281), folder="t"))) == 1
    record = of(12_435 / 16_281)
    record["config"] |= {
        "model": "mlp",
        "threads": 1,
        "batch_sizes": [64],
        "transport": "inproc",
        "epochs": 1,
    }
    show_run(record, tmp_path, to_stderr=False)
    assert "share of the largest class" in " ".join(capsys.readouterr().out.split())


# --- comments


def test_gains_are_told_with_their_reason(study) -> None:
    known: dict[str, Any] = {"target": 0.92, "batch_sizes": [120]}
    gained = seeds(
        "hogwild", 2, (2.0, 2.1, 2.2), 0.962, reached_s=1.03, target=0.92, batch_sizes=[60, 60]
    )
    found = study(*seeds("serial", 1, (2.60, 2.64, 2.68), reached_s=2.29, **known), *gained)
    text = said(found, "accuracy")
    assert "`hogwild` gained accuracy against serial: up to 1.4 points above serial" in text
    assert "96.25%, in 3 of 3 rounds" in text
    assert "It reached 92% in 1.03 s, serial in 2.29 s." in text
    assert "With the same global batch its 2 workers make 2 updates" in text
    assert answer(found)[1] == "It ended 1.4 points above serial, in 3 of 3 rounds."
    other = study(
        *seeds("serial", 1, (2.60, 2.64)), *seeds("allreduce", 2, (2.0, 2.1), 0.962), folder="t"
    )
    assert "updates" not in said(other, "accuracy")


def test_a_gain_is_compared_at_equal_updates_too(tmp_path: Path) -> None:
    """The made-up curves are straight lines: half of the accuracy after half of the steps."""
    runs = [
        *seeds("serial", 1, (2.60, 2.64, 2.68), 0.90, batch_sizes=[120]),
        *seeds("hogwild", 2, (1.6, 1.7, 1.65), 0.96, batch_sizes=[60, 60]),
    ]
    found = read_study(write_study(tmp_path / "s", runs, events=True))
    text = said(found, "accuracy")
    assert "After as many updates as serial makes in all it had 38.4%; serial ends at 90." in text
    silent = read_study(write_study(tmp_path / "t", runs))
    assert "After as many updates" not in said(silent, "accuracy")


@pytest.mark.parametrize(
    ("strategy", "sent", "spread"), [("psgd", 0, 0.005), ("allreduce", 1000, 0.2)]
)
def test_amdahl_is_left_out_where_it_says_nothing(
    study, strategy: str, sent: int, spread: float
) -> None:
    """The strategy sends nothing, or the noise is larger than the share."""
    each = [{"payload_sent_bytes": sent}] * 2
    times = tuple(2.6 * (1 + s * spread) for s in (1, 0, -1))
    alone = tuple(4.0 * (1 + s * spread) for s in (-1, 0, 1))
    found = study(
        *seeds("serial", 1, alone),
        *seeds(strategy, 1, alone),
        *seeds(strategy, 2, times, each=each),
    )
    assert "x as fast as with one worker" in said(found, "linear")
    assert "Amdahl" not in said(found, "linear")


def test_ties_in_bytes_are_ties_and_servers_count(study) -> None:
    def of(strategy: str, sent: int, server: int = 0) -> dict[str, Any]:
        record = run(strategy, 2, 2.0, each=[{"payload_sent_bytes": sent}] * 2)
        if server:
            record["workers"].append(
                {**record["workers"][0], "rank": 2, "role": "server", "payload_sent_bytes": server}
            )
        return record

    serial = run("serial", 1, 4.0)
    ring = study(
        serial,
        of("psgd", 0),
        of("allreduce", 886_000),
        of("ring-reduce", 886_000),
        of("gossip", 886_000),
    )
    assert "`psgd` sent the least (0 B per worker and step)" in said(ring, "bytes")
    assert "3 settings sent the most (88.6 kB: `allreduce`, `ring-reduce` and `gossip`)" in said(
        ring, "bytes"
    )
    served = study(serial, of("allreduce", 886_000), of("ps", 886_000, 1_772_000), folder="t")
    assert "`allreduce` sent the least (88.6 kB per worker and step, servers included)" in said(
        served, "bytes"
    )
    assert "`ps` sent the most (177 kB)" in said(served, "bytes")


def test_a_smaller_batch_is_not_a_slow_worker(study) -> None:
    uneven = [{"samples": 1500, "compute_s": 1.5}, {"samples": 500, "compute_s": 0.8}]
    found = study(run("serial", 1, 4.0), run("allreduce", 2, 3.0, each=uneven))
    assert said(found, "slow worker") == ""
    equal = [{"samples": 1000, "compute_s": 1.0}, {"samples": 1000, "compute_s": 2.0}]
    text = said(
        study(run("serial", 1, 4.0), run("allreduce", 2, 3.0, each=equal), folder="t"),
        "slow worker",
    )
    assert (
        "Worker 1 of `allreduce x 2` was slow: it took 2.00x as long for a sample as the others did"
        " (seen in one run)" in text
    )


def test_advice_has_the_runs_own_numbers(study) -> None:
    waiting = [{"compute_s": 1.0, "idle_s": 2.0, "sync_s": 0.0}, {"compute_s": 3.0, "sync_s": 0.0}]
    found = study(
        run("serial", 1, 4.0), run("allreduce", 2, 3.0, each=waiting, batch_sizes=[512, 512])
    )
    assert "(`--batch-size 768,256`)" in said(found, "next")
    equal = [{"compute_s": 1.0, "idle_s": 2.0, "sync_s": 0.0}] * 2
    found = study(
        run("serial", 1, 4.0),
        run("allreduce", 2, 3.0, each=equal, batch_sizes=[512, 512]),
        folder="t",
    )
    assert "--batch-size" not in said(found, "next")
    assert "96,32" not in said(found, "next")


# --- words and numbers


def test_a_range_is_written_as_a_range(study) -> None:
    found = study(*seeds("serial", 1, (1.41, 1.79, 1.90)))
    assert with_range(found.lines[0].train_s, ".2f", 1, " s") == "1.70 s (1.41-1.90)"
    assert with_range(study(run("serial", 1, 2.0), folder="t").lines[0].train_s) == "2.00"


def test_one_run_is_one_run(study, tmp_path: Path) -> None:
    study(run("serial", 1, 2.0))
    page = render(tmp_path / "s", figures=False).read_text()
    assert ": 1 run, 1 seed" in page
    assert "1 runs" not in page
    assert "±" not in page[: page.index("<script")]


def test_labels_of_an_axis_differ() -> None:
    """Ticks that are close need more digits than 83.3% 83.3% 83.4% 83.4%."""
    from vl_convert import vegalite_to_svg

    rows = [{"x": i, "y": 0.8331 + 0.0004 * i} for i in range(5)]
    x, y = quantity("x", "x"), quantity("y", "accuracy", ".2%", zero=False)
    svg = vegalite_to_svg(
        {"data": {"values": rows}, "mark": "point", "encoding": {"x": x, "y": y}, "height": 300}
    )
    labels = re.findall(r">([\d.]+%)<", svg)
    assert len(labels) >= 4
    assert all(a != b for a, b in pairwise(labels))


def test_numbers_of_a_hostile_record_are_escaped(study) -> None:
    record = run("serial", 1, 2.0)
    bad = "<img src=x onerror=alert(1)>"
    record["data"] = {
        "name": "d",
        "engine": "polars",
        "master": None,
        "rows": {"train": 1, "test": 1},
        "shards": bad,
        "seconds": {"read": 1.0},
    }
    found = study(record)
    found.lines[0].runs[0].record["config"]["workers"] = bad
    assert "<img" not in origin_table(found)


def test_the_pages_words_are_those_of_the_answer(study, tmp_path: Path) -> None:
    """The page of the shared machine's study, without figures."""
    found = study(*shared_machine())
    text = write(found, tmp_path / "s", False, lambda _: None).read_text()
    assert "faster in 3 of 3 rounds" in text
    assert "No setting" not in text
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.S)[1])
    assert set(data["verdicts"]) >= {"train_s", "accuracy", "speedup_serial"}
