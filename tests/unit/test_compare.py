"""Two studies made apart: estimates with intervals, and that the comparison is unpaired."""

import html
import json
import math
import random
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.records import run, write_study

from paceline.common.estimates import unpaired
from paceline.errors import BadRequest
from paceline.report.compare import UNPAIRED, Comparison, compare
from paceline.report.judge import SPEED
from paceline.report.reading import read_study


def runs(
    name: str, workers: int, times: tuple[float, ...], accuracy: float = 0.95
) -> list[dict[str, Any]]:
    return [run(name, workers, t, accuracy + 0.0005 * i) for i, t in enumerate(times)]


@pytest.fixture
def compared(tmp_path: Path):
    def make(one: list[dict[str, Any]], other: list[dict[str, Any]], **confirm: Any) -> Comparison:
        write_study(tmp_path / "a", one, **confirm)
        write_study(tmp_path / "b", other, **confirm)
        return Comparison.of(tmp_path / "a", tmp_path / "b")

    return make


SLOW, FAST = (4.0, 4.1, 3.9, 4.05), (2.0, 2.05, 1.95, 2.02)


def page_of(found: Comparison, tmp_path: Path) -> str:
    return found.write(tmp_path / "c.html").read_text()


def test_the_page_and_the_sentences_say_that_nothing_is_paired(compared, tmp_path: Path) -> None:
    found = compared(runs("psgd", 2, SLOW), runs("psgd", 2, FAST))
    assert found.sentences[-1] == UNPAIRED
    assert UNPAIRED.startswith("The comparison is unpaired")
    text = html.unescape(page_of(found, tmp_path))
    assert "The comparison is unpaired" in text
    assert "Welch's test on logarithms" in text
    assert "95% intervals (unpaired)" in text


def test_the_estimate_is_welchs_on_logs(compared, tmp_path: Path) -> None:
    found = compared(runs("psgd", 2, SLOW), runs("psgd", 2, FAST))
    wanted = unpaired([math.log(t) for t in FAST], [math.log(t) for t in SLOW])
    verdict = found.speeds[0]
    assert (verdict.apart, verdict.low, verdict.high) == pytest.approx(
        (wanted.mean, wanted.low, wanted.high)
    )
    assert verdict.pairs == 0
    low, high = math.exp(-wanted.high), math.exp(-wanted.low)
    gain = f"{math.exp(-wanted.mean):.2f}x as fast as before (95% interval {low:.2f} to {high:.2f})"
    assert found.sentences[0] == (
        "1 setting is in both: 1 became faster, 0 became slower, and 0 cannot be told from before."
    )
    assert found.sentences[1] == f"The largest gain was `psgd x 2`: {gain}."
    text = page_of(found, tmp_path)
    assert f"<td>{low:.2f} to {high:.2f}</td>" in text
    rows = json.loads(re.search(r'id="data">(.*?)</script>', text, re.S)[1])["tables"]["ratios"]
    assert rows[0]["ratio"] == pytest.approx(math.exp(-wanted.mean), rel=1e-3)
    assert (rows[0]["ratio_low"], rows[0]["ratio_high"]) == pytest.approx((low, high), rel=1e-3)


def test_a_loss_and_a_tie(compared) -> None:
    found = compared(
        runs("psgd", 2, FAST) + runs("hogwild", 2, (2.0, 2.4, 1.7)),
        runs("psgd", 2, SLOW) + runs("hogwild", 2, (2.1, 1.8, 2.3)),
    )
    told = {x.label: found.verdict(n) for n, (x, _) in enumerate(found.pairs)}
    assert told == {"psgd": "slower", "hogwild": "not told apart"}
    assert (
        "0 became faster, 1 became slower, and 1 cannot be told from before" in found.sentences[0]
    )
    assert "The largest loss was `psgd x 2`: 0.50x as fast as before (95%" in found.sentences[1]


def test_confirming_blocks_of_both_are_no_pairs(compared) -> None:
    """A setting is not compared with itself in the blocks of one study."""
    blocks = [
        {
            "number": n, "order": ["serial x 1", "psgd x 2"], "seconds": 30.0, "foreign": 0.0,
            "stolen": 0.0, "repeats": 0, "disturbed": False,
            "samples_per_s": {"serial x 1": 500.0, "psgd x 2": 900.0 + n},
        }
        for n in range(5)
    ]  # fmt: skip
    confirm = {
        "serial": "serial x 1", "settings": ["psgd x 2"], "blocks": blocks, "width": 0.1,
        "wanted": 5, "block_s": 30.0, "ended": "enough",
    }  # fmt: skip
    found = compared(
        runs("serial", 1, SLOW) + runs("psgd", 2, SLOW),
        runs("serial", 1, SLOW) + runs("psgd", 2, FAST),
        confirm=confirm,
    )
    told = {x.label: found.verdict(n) for n, (x, _) in enumerate(found.pairs)}
    assert told == {"serial": "not told apart", "psgd": "faster"}


def test_single_runs_are_called_that(compared, tmp_path: Path) -> None:
    found = compared([run("psgd", 2, 4.0, 0.95)], [run("psgd", 2, 1.0, 0.45)])
    assert found.verdict(0) == (
        "faster (seen in one run), accuracy -50.00 points (seen in one run)"
    )
    assert "4.00x as fast as before (seen in one run)" in found.sentences[1]
    assert "<td>one run</td>" in page_of(found, tmp_path)


def test_single_runs_that_are_close_show_nothing(compared) -> None:
    close = compared([run("psgd", 2, 2.0)], [run("psgd", 2, 2.1)])
    assert close.verdict(0) == "run once: no difference above 10%"


def test_an_accuracy_has_its_interval(compared) -> None:
    found = compared(runs("psgd", 2, FAST, 0.95), runs("psgd", 2, FAST, 0.85))
    text = found.verdict(0)
    by, low, high = map(
        float, re.match(r"accuracy (\S+) points \(95% interval (\S+) to (\S+)\)$", text).groups()
    )
    assert by == pytest.approx(-10)
    assert low < by < high < 0


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(st.sampled_from([0.5, 0.9, 1.0, 1.0, 1.1]), st.sampled_from([0.001, 0.05, 0.3])),
        min_size=1,
        max_size=6,
    ),
    st.integers(1, 4),
    st.integers(0, 2**32),
)
def test_no_sentence_contradicts_the_table(
    tmp_path_factory: pytest.TempPathFactory,
    truths: list[tuple[float, float]],
    count: int,
    seed: int,
) -> None:
    luck, folder = random.Random(seed), tmp_path_factory.mktemp("pair")
    for name in ("a", "b"):
        made = []
        for number, (ratio, noise) in enumerate(truths):
            middle = 4.0 * (ratio if name == "b" else 1.0)
            times = tuple(middle * math.exp(luck.gauss(0, noise)) for _ in range(count))
            made += runs(f"s{number}", 2, times)
        write_study(folder / name, made)
    found = Comparison.of(folder / "a", folder / "b")
    up, down, same = map(
        int, re.search(r"(\d+) became faster, (\d+) became slower, and (\d+)", found.sentences[0])
        .groups(),
    )  # fmt: skip
    told = [found.verdict(n) for n in range(len(found.pairs))]
    assert up == sum(t.startswith("faster") for t in told)
    assert down == sum(t.startswith("slower") for t in told)
    assert up + down + same == len(truths)
    for verdict, text in zip(found.speeds, told, strict=True):
        low, high = math.exp(-verdict.high), math.exp(-verdict.low)
        assert low <= math.exp(-verdict.apart) <= high
        if verdict.estimate is not None and text.startswith(("faster", "slower")):
            assert low > 1 or high < 1  # a claim's interval excludes "no change"
    gains = re.findall(r"largest (gain|loss) was .*?: ([\d.]+)x", " ".join(found.sentences))
    assert all((float(by) >= 1) == (kind == "gain") for kind, by in gains)


def test_nothing_in_common(tmp_path: Path) -> None:
    write_study(tmp_path / "a", [run("psgd", 2)])
    write_study(tmp_path / "b", [run("hogwild", 2)])
    with pytest.raises(BadRequest, match="no completed setting in common"):
        compare(tmp_path / "a", tmp_path / "b", tmp_path / "c.html")


def test_the_table_shows_the_speeds_whose_ratio_it_gives(compared, tmp_path: Path) -> None:
    found = compared(runs("psgd", 2, SLOW), runs("psgd", 2, FAST))
    cells = re.findall(r"<td>([\d,]+)</td>", page_of(found, tmp_path))
    one, other = (float(cell.replace(",", "")) for cell in cells[:2])
    assert other / one == pytest.approx(math.exp(-found.speeds[0].apart), rel=0.01)
    assert len(SPEED.values(read_study(tmp_path / "a").lines[0])) == len(SLOW)
