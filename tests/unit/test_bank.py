"""The bank of blocks with a known truth (`benchmarks/bank.py`), small."""

import importlib.util
import json
import math
import random
import statistics
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.common.estimates import t_quantile
from paceline.errors import BadRequest
from paceline.record.blocks import Block
from paceline.studies import confirm
from paceline.studies.confirm import PILOT
from paceline.studies.grid import StudySpec

SCRIPT = Path(__file__).parent.parent.parent / "benchmarks" / "bank.py"
STUDIES = 300


def script():
    """The script as a module; a package of the name `benchmarks` may be installed."""
    found = importlib.util.spec_from_file_location("paceline_bank", SCRIPT)
    module = importlib.util.module_from_spec(found)
    sys.modules["paceline_bank"] = module  # where dataclasses look for it
    found.loader.exec_module(module)
    return module


bank = script()
SERIAL, AGAIN, SLOWED, NAMES = bank.SERIAL, bank.AGAIN, bank.SLOWED, bank.NAMES
resample = bank.resample


def made_up(
    deviation: float,
    heavy: bool = False,
    blocks: int = 200,
    bias: float = 0.0,
    off: float | None = None,
):
    """Blocks of the four settings: a slow moment for all of a block, and noise for each run.

    `bias` is the true log ratio of the equal pair, `off` the mean that this bank happens to have.
    """
    luck, found = random.Random(7), []
    truth = dict(zip(NAMES, (0.0, bias, *(-math.log1p(share) for share in SLOWED)), strict=True))
    for number in range(blocks):
        moment = luck.gauss(0, 0.3)
        speeds = {}
        for name, log in truth.items():
            # heavy: Student's t with three degrees of freedom, of the same deviation
            tail = math.sqrt(luck.gammavariate(1.5, 2)) if heavy else 1.0
            speeds[name] = 1000 * math.exp(log + moment + deviation * luck.gauss(0, 1) / tail)
        found.append(Block(number, list(NAMES), speeds, 30.0, 0.0, 0.0, 0, False))
    if off is not None:
        factor = math.exp(off - statistics.fmean(b.log_ratio(AGAIN, SERIAL) for b in found))
        for block in found:
            block.samples_per_s[AGAIN] *= factor
    return found


@pytest.mark.parametrize("heavy", [False, True])
def test_studies_from_a_known_truth_claim_what_is_true(heavy: bool) -> None:
    blocks = made_up(0.06, heavy)
    for others, width in (
        ([AGAIN], 0.1),
        ([AGAIN, SLOWED[0.2]], 0.1),
        ([AGAIN, SLOWED[0.1]], 0.05),
    ):
        found = resample(blocks, others, width, STUDIES, seed=0)
        assert found.holds, (others, width, found.false, found.found)
        assert found.false > 0  # a check that could fail
        assert min(found.blocks) >= PILOT
    assert len(set(found.blocks)) > 1  # the pilot fixes the number


def test_a_few_blocks_whose_equal_pair_is_off_by_chance_make_no_false_claims(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The labels are swapped per block, so the mean of a small bank cannot become a claim."""
    blocks = made_up(0.03, blocks=47, off=0.01)
    assert statistics.fmean(block.log_ratio(AGAIN, SERIAL) for block in blocks) == (
        pytest.approx(0.01)
    )
    for others, width in (([AGAIN], 0.05), ([AGAIN, SLOWED[0.1]], 0.05), ([AGAIN], 0.02)):
        found = resample(blocks, others, width, STUDIES, seed=0)
        assert found.holds, (others, width, found.false, found.found)
    slowed = resample(blocks, [AGAIN, SLOWED[0.2]], 0.1, STUDIES, seed=0)
    assert slowed.holds, (slowed.false, slowed.found)
    monkeypatch.setattr(bank, "_swapped", lambda block: block)
    assert not resample(blocks, [AGAIN], 0.02, STUDIES, seed=0).holds  # what swapping prevents


def test_a_false_claim_and_a_missed_slowdown_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pair that differs and is never swapped; noise that hides the slowdown."""
    with monkeypatch.context() as patched:
        patched.setattr(bank, "_swapped", lambda block: block)
        biased = resample(made_up(0.02, bias=0.1), [AGAIN], 0.1, 100, seed=0)
    assert biased.false == 100
    assert not biased.holds
    wide = resample(made_up(0.3), [AGAIN, SLOWED[0.2]], 1.0, 100, seed=0)
    assert wide.found < 90
    assert not wide.holds


def test_the_same_seed_draws_the_same_studies() -> None:
    blocks = made_up(0.06)
    one, again, other = (resample(blocks, [AGAIN], 0.1, 50, seed) for seed in (3, 3, 4))
    assert one == again
    assert one.blocks != other.blocks


def test_half_of_the_drawn_blocks_exchange_the_equal_pair() -> None:
    block = made_up(0.1, blocks=1)[0]
    luck = random.Random(0)
    drawn = [bank._drawn([block], luck) for _ in range(200)]
    swapped = next(each for each in drawn if each != block)
    assert 70 < drawn.count(swapped) < 130
    assert drawn.count(block) + drawn.count(swapped) == 200
    assert swapped.log_ratio(AGAIN, SERIAL) == pytest.approx(block.log_ratio(SERIAL, AGAIN))
    assert swapped.samples_per_s[SLOWED[0.1]] == block.samples_per_s[SLOWED[0.1]]


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> StudySpec:
    monkeypatch.setattr(confirm, "DISTURBED", 2.0)
    monkeypatch.setattr(confirm, "LEAST_S", 0.01)
    monkeypatch.setattr(bank, "WRITE_EVERY_S", 0.0)
    monkeypatch.setattr(bank, "TRIAL_STEPS", 20)
    base = {
        "model": "mlp:hidden=4", "data": "synthetic:shape=1x4x4,samples=64", "strategy": "serial",
        "global_batch_size": 16, "transport": "inproc", "sample_every_s": 0,
        "memory_format": "contiguous",
    }  # fmt: skip
    return replace(StudySpec.make({"base": base, "all_cores": False}), block="1s")


@pytest.mark.slow
def test_a_bank_is_filled_and_goes_on(
    tiny: StudySpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(confirm, "DISTURBED", 9.0)  # other tests run meanwhile: repeat no block
    said: list[str] = []
    folder = tmp_path / "bank"
    bank.make_bank(folder, tiny, 60, said.append, most=1)
    first = (folder / "blocks.jsonl").read_text()
    (folder / "blocks.jsonl").write_text(first + '{"block": {"number": 1, "ord')  # killed
    found = bank.make_bank(folder, tiny, 60, said.append, most=3)
    assert (folder / "blocks.jsonl").read_text().startswith(first)
    assert [block.number for block in found.blocks()] == [0, 1, 2]
    assert all(set(block.samples_per_s) == set(NAMES) for block in found.blocks())
    assert len({tuple(block.order) for block in found.blocks()}) > 1  # drawn by number
    for line in found.lines():  # the sleeps add up to the share, apart from the last one
        for share, name in SLOWED.items():
            assert line["slept"][name] > 0.9 * share
    done = bank.make_bank(folder, tiny, 0, said.append)
    assert len(done.blocks()) == 3
    assert sum("a trial run" in text for text in said) == 1
    with pytest.raises(BadRequest, match="filled with other options"):
        bank.make_bank(folder, tiny.changed(["lr=0.5"]), 60, said.append, most=9)


def test_the_table_says_what_was_found(tmp_path: Path) -> None:
    blocks, found = made_up(0.06, blocks=20), bank.Bank(tmp_path)
    about = {
        "options": {"model": "cnn", "data": "mnist"},
        "environment": dict.fromkeys(
            ("cpu", "cores", "system", "python", "torch", "paceline"), "known"
        ),
    }
    (tmp_path / "bank.json").write_text(json.dumps(about))
    for block in blocks:
        found.add(block, {SLOWED[0.1]: 0.1, SLOWED[0.2]: 0.2}, 30.0)
    rates = [resample(found.blocks(), [AGAIN, SLOWED[0.2]], 0.1, 40, 0)]
    text = "\n".join(bank.table(found, rates))
    assert f"| {AGAIN} and {SLOWED[0.2]} | +-10% |" in text
    assert f"| {rates[0].false} | {100 * rates[0].found / 40:.1f}% |" in text
    assert "| 10.00% |" in text
    assert "20 blocks in 10 minutes, 0 of them disturbed; cnn on mnist" in text


def test_the_pilot_fixes_the_number_by_steins_rule() -> None:
    """With noise of a known deviation the typical number is near that of a known variance."""
    deviation = 0.06 * math.sqrt(2)  # of a difference of two runs
    found = resample(made_up(0.06), [AGAIN], 0.05, STUDIES, seed=1)
    near = (t_quantile(PILOT - 1) * deviation / math.log1p(0.05)) ** 2
    assert 0.5 * near < sorted(found.blocks)[STUDIES // 2] < 1.5 * near
