"""What the report says about made-up records, and what it must not say."""

import math
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.records import run, worker, write_study

from paceline.report.answer import answer
from paceline.report.commentary.all import comments
from paceline.report.commentary.costs import slope
from paceline.report.commentary.scaling import amdahl
from paceline.report.judge import SPEED, judge
from paceline.report.lines import Study
from paceline.report.reading import read_study


@pytest.fixture
def study(tmp_path: Path):
    def make(*runs: dict[str, Any], folder: str = "s", **about: Any) -> Study:
        return read_study(write_study(tmp_path / folder, list(runs), **about))

    return make


def said(found: Study, kind: str) -> str:
    return " ".join(c.text for c in comments(found) if c.kind == kind)


PATTERNS = ((-1.0, 0.2, 0.8), (0.8, -1.0, 0.2), (0.2, 0.8, -1.0))


def rounds(*args: Any, by: float = 0.005, **known: Any) -> list[dict[str, Any]]:
    """Return three seeds whose times differ by about `by`, in an order of each setting's own."""
    strategy, workers, train_s, accuracy = args
    known.setdefault("target", None)
    pattern = PATTERNS[(len(strategy) + workers) % len(PATTERNS)]
    return [
        run(strategy, workers, train_s * (1 + by * s), accuracy + by * s / 20, **known)
        for s in pattern
    ]


# --- the answer


def test_the_fastest_is_named_with_its_figures(study) -> None:
    found = study(
        *rounds("serial", 1, 4.0, 0.97),
        *rounds("allreduce", 1, 4.1, 0.97),
        *rounds("allreduce", 2, 2.2, 0.97),
        *rounds("psgd", 2, 2.0, 0.90),
    )
    first, second, third = answer(found)
    assert "The fastest was `psgd` with 2 workers: 2.00x as fast as serial (95% interval" in first
    assert "faster in 3 of 3 rounds" in first
    assert "90.00% (serial: 97.00%)" in first
    assert (
        "without a known loss of accuracy was `allreduce` with 2 workers: 1.82x as fast as serial"
        in second
    )
    assert "`allreduce` was fastest with 2 workers" in third  # psgd was tried with two only
    assert "seen in one run" not in first


def test_all_were_slower_only_where_the_table_says_so_of_each(study) -> None:
    slow = [*rounds("serial", 1, 4.0, 0.97), *rounds("allreduce", 2, 6.0, 0.97)]
    found = study(*slow, *rounds("psgd", 2, 7.0, 0.97))
    assert answer(found)[0].startswith("All 2 settings with several workers were slower than")
    noisy = study(*slow, *rounds("psgd", 2, 9.0, 0.97, by=0.8), folder="noisy")
    psgd, serial = (next(x for x in noisy.lines if x.strategy == s) for s in ("psgd", "serial"))
    assert not judge(SPEED, noisy)(psgd, serial).differs
    first = answer(noisy)[0]
    assert first.startswith("No setting with several workers was shown to be faster than serial")
    assert "`allreduce` with 2 workers: 0.67x as fast as serial" in first


def test_no_winner_is_made_up(study) -> None:
    found = study(*rounds("serial", 1, 4.0, 0.97), *rounds("allreduce", 2, 3.95, 0.97, by=0.05))
    (first,) = answer(found)
    assert "No setting with several workers was shown to be faster than serial" in first


def test_nothing_is_paid_where_nothing_was_paid(study) -> None:
    found = study(*rounds("serial", 1, 4.0, 0.97), *rounds("allreduce", 2, 2.0, 0.97))
    assert answer(found)[1] == "It ended no less accurate than serial."
    assert "No strategy lost accuracy" in said(found, "accuracy")


def test_single_runs_are_told_as_such(study) -> None:
    found = study(run("serial", 1, 4.0), run("allreduce", 2, 2.0), run("psgd", 2, 2.1))
    assert "(seen in one run)" in answer(found)[0]
    assert "No setting was run twice" in said(found, "noise")
    assert "did not differ beyond noise" not in said(found, "noise")
    # one run each does not show that
    assert "No strategy lost accuracy" not in said(found, "accuracy")


def test_without_serial_or_workers_the_answer_is_modest(study) -> None:
    found = study(run("serial", 1, 4.0, 0.9))
    assert answer(found) == ["`serial` with 1 worker trained for 4.00 s, to 90.00% accuracy."]


def test_where_all_failed_nothing_is_claimed(study) -> None:
    found = study(run("serial", error="out of luck"), run("psgd", 2, error="out of luck"))
    assert answer(found) == ["No run was completed: see the reasons below."]
    assert "In 1 of 1 runs `serial x 1` failed: out of luck" in said(found, "failed")


# --- noise


@pytest.mark.parametrize(
    ("calm", "crowded"),
    [
        pytest.param(0.1, 2, id="equal noise"),
        pytest.param(0.02, 8, id="more noise where workers share cores"),
        pytest.param(0.02, 2, id="unequal noise"),
    ],
)
def test_equal_settings_are_seldom_told_apart(tmp_path: Path, calm: float, crowded: int) -> None:
    """40 settings of the same speed, three runs each, ±10%, or half of them calmer: at 99%
    confidence at most 1% of the 780 pairs may seem to differ. Pairs share settings, so that one
    draw says little: it is the mean of ten.
    """
    wrong = []
    for seed in range(10):
        luck = random.Random(seed)
        runs = [
            run(
                f"s{n}",
                crowded if n % 2 else 2,
                2.0 * math.exp(luck.gauss(0, 0.1 if n % 2 else calm)),
            )
            for n in range(40)
            for _ in range(3)
        ]
        found = read_study(write_study(tmp_path / str(seed), runs))
        verdict = judge(SPEED, found)
        pairs = [(a, b) for i, a in enumerate(found.lines) for b in found.lines[:i]]
        wrong.append(sum(verdict(a, b).differs for a, b in pairs) / len(pairs))
    assert sum(wrong) / len(wrong) <= 0.01, wrong


def test_different_settings_are_told_apart(study) -> None:
    luck = random.Random(0)
    runs = [
        run(f"s{n}", 2, 2.0 * math.exp(luck.gauss(0, 0.1))) for n in range(40) for _ in range(3)
    ]
    found = study(*runs)
    noise = judge(SPEED, found).noise[False]
    assert noise is not None
    assert noise.freedom == 78  # two of each of 39 ratios to the first setting
    assert noise.deviation == pytest.approx(0.1 * math.sqrt(2), rel=0.25)
    twice_as_slow = read_study(
        write_study(found.folder / "t", [*runs, run("slow", 2, 4.0), run("slow", 2, 4.1)])
    )
    slow = twice_as_slow.line("slow", 2)
    verdict = judge(SPEED, twice_as_slow)
    assert all(verdict(x, slow).differs for x in twice_as_slow.lines if x is not slow)


def test_one_wild_setting_does_not_hide_what_others_show(study) -> None:
    """One setting has 10, 90 and 30%; the ten points that another lost are still reported."""
    calm = [r for n in range(6) for r in rounds(f"s{n}", 2, 2.0, 0.95)]
    wild = [run("wild", 2, 2.0, a) for a in (0.1, 0.9, 0.3)]
    found = study(*rounds("serial", 1, 4.0, 0.95), *calm, *wild, *rounds("psgd", 2, 1.0, 0.85))
    assert "psgd" in said(found, "accuracy")
    assert "without a known loss of accuracy" in answer(found)[1]


def test_every_setting_is_compared_with_its_own_serial(study) -> None:
    def of(model: str, *args: Any) -> list[dict[str, Any]]:
        return rounds(*args, varied={"model": model})

    found = study(
        *of("mlp", "serial", 1, 1.0, 0.5),
        *of("cnn", "serial", 1, 8.0, 0.99),
        *of("mlp", "psgd", 2, 1.01, 0.5),
        *of("cnn", "psgd", 2, 4.0, 0.99),
    )
    first, second, *_ = answer(found)
    assert "`psgd, model=cnn` with 2 workers: 2.00x as fast as serial" in first
    assert "99.00% (serial: 99.00%)" in first
    assert second == "It ended no less accurate than serial."


def test_ddp_is_not_said_to_compute_longer(study) -> None:
    """Its exchange happens during the backward pass: its time is not measured separately."""
    hidden = [{"compute_s": 3.6, "sync_s": None, "idle_s": None}] * 2
    found = study(
        *rounds("serial", 1, 4.0, 0.97),
        *rounds("ddp", 1, 4.0, 0.97),
        *rounds("ddp", 2, 3.6, 0.97, each=hidden),
    )
    assert "as long as in one worker" not in said(found, "linear")


def test_weak_scaling_is_told_per_sample(study) -> None:
    found = study(
        *rounds("serial", 1, 4.0, 0.97),
        *rounds("psgd", 1, 4.0, 0.97),
        *rounds("psgd", 2, 4.4, 0.97, samples=4000),
        *rounds("psgd", 4, 8.8, 0.97, samples=8000),
    )
    assert "`psgd` with 2 workers: 1.82x as fast as serial" in answer(found)[0]
    assert "Amdahl" not in said(found, "linear")
    assert said(found, "oversubscribed") == ""  # 4 workers: twice the time for twice the work


# --- the rules


def test_how_far_from_linear_and_why(study) -> None:
    waiting = [{"compute_s": 1.0, "sync_s": 0.3, "idle_s": 1.2, "payload_sent_bytes": 1000}] * 2
    found = study(
        *rounds("serial", 1, 4.0, 0.97),
        *rounds("allreduce", 1, 4.0, 0.97),
        *rounds("allreduce", 2, 2.5, 0.97, each=waiting),
    )
    text = said(found, "linear")
    assert "1.60x as fast as with one worker, 80% of linear" in text
    assert "as if 25% of its work could not be divided" in text
    assert "A worker spent 48% of its time on waiting for the slowest." in text
    assert "on the exchange" not in text  # 12% does not explain it


def test_as_good_as_linear(study) -> None:
    found = study(
        *rounds("serial", 1, 4.0, 0.97),
        *rounds("psgd", 1, 4.0, 0.97),
        *rounds("psgd", 2, 2.0, 0.97),
    )
    text = said(found, "linear")
    assert "practically linear" in text
    assert "Amdahl" not in text


def test_oversubscribed_workers_are_not_called_a_failure_to_scale(study) -> None:
    found = study(
        *rounds("serial", 1, 4.0, 0.97),
        *rounds("psgd", 1, 4.0, 0.97),
        *rounds("psgd", 4, 4.5, 0.97),
    )
    assert said(found, "linear") == ""
    assert "More workers than the 2 cores made `psgd` slower" in said(found, "oversubscribed")
    assert "with 4 workers it took 1.12x as long for a sample" in said(found, "oversubscribed")
    assert "4 workers shared 2 cores" in said(found, "slower")


def test_why_several_were_slower_than_one(study) -> None:
    talking = [{"compute_s": 2.0, "sync_s": 3.0, "idle_s": 0.0}] * 2
    found = study(*rounds("serial", 1, 4.0, 0.97), *rounds("allreduce", 2, 5.0, 0.97, each=talking))
    text = said(found, "slower")
    assert "`allreduce` with 2 workers was slower: 0.80x as fast as serial (95% interval" in text
    assert "slower in 3 of 3 rounds" in text
    assert "A worker spent 60% of its time on the exchange." in text
    assert "shared" not in text
    assert "try to exchange less often" in said(found, "next")


def test_slower_is_not_said_within_noise(study) -> None:
    found = study(
        *rounds("serial", 1, 4.0, 0.97, by=0.1), *rounds("allreduce", 2, 4.2, 0.97, by=0.1)
    )
    assert said(found, "slower") == ""


def test_which_worker_was_slow(study) -> None:
    uneven = [
        {"compute_s": 1.0, "idle_s": 2.0},
        {"compute_s": 3.0},
        {"compute_s": 1.0, "idle_s": 2.0},
    ]
    found = study(
        *rounds("serial", 1, 4.0, 0.97, cores=4),
        *rounds("allreduce", 3, 3.0, 0.97, each=uneven, cores=4),
    )
    text = said(found, "slow worker")
    assert "Worker 1 of `allreduce x 3` was slow: it took 3.00x as long" in text
    assert "Worker 0" not in text
    assert "waited" in text


@pytest.mark.parametrize(("split", "slow"), [({"stages": 2}, False), ({"split_layers": 2}, True)])
def test_a_worker_with_a_longer_stage_of_the_model_is_not_called_slow(
    study, split: dict[str, int], slow: bool
) -> None:
    uneven = [{"compute_s": 1.0, "split": split}, {"compute_s": 3.0, "split": split}]
    found = study(*rounds("serial", 1, 4.0, 0.97), *rounds("allreduce", 2, 3.0, 0.97, each=uneven))
    assert bool(said(found, "slow worker")) is slow


def test_a_worker_that_was_slow_once_is_not_called_slow(study) -> None:
    uneven = [{"compute_s": 1.0}, {"compute_s": 3.0}]
    found = study(
        run("serial", 1, 4.0),
        run("allreduce", 2, 3.0, each=uneven),
        run("allreduce", 2, 3.0, each=uneven[::-1]),
    )
    assert said(found, "slow worker") == ""


def test_accuracy_that_was_paid(study) -> None:
    found = study(
        *rounds("serial", 1, 4.0, 0.97),
        *rounds("psgd", 2, 2.0, 0.90),
        *rounds("allreduce", 2, 2.0, 0.969),
    )
    text = said(found, "accuracy")
    assert "`psgd` lost accuracy against serial: up to 7.0 points below serial" in text
    assert "allreduce" not in text


def test_the_target_that_was_not_reached(study) -> None:
    found = study(run("serial", 1, 4.0, reached_s=2.0, target=0.9), run("psgd", 2, 2.0, target=0.9))
    assert "`psgd x 2` did not reach the target of 90% in every run" in said(found, "target")
    assert found.line("psgd", 2).time_to_accuracy is None
    reached = read_study(
        write_study(found.folder / "t", [run("serial", 1, 4.0, reached_s=2.0, target=0.9)])
    )
    assert said(reached, "target") == ""


def test_what_cannot_be_told_from_the_fastest(study) -> None:
    close = [*rounds("psgd", 2, 2.0, 0.97, by=0.03), *rounds("gossip", 2, 2.02, 0.97, by=0.03)]
    found = study(*rounds("serial", 1, 4.0, 0.97), *close, *rounds("allreduce", 2, 3.0, 0.97))
    assert "1 other setting did not differ from it beyond noise" in answer(found)[0]
    text = said(found, "noise")
    assert "`gossip x 2` did not differ beyond noise from the fastest, `psgd x 2`" in text
    assert "allreduce" not in text


def test_bytes_and_drift(study) -> None:
    def each(sent: int, apart: float | None, stale: float | None) -> list[dict[str, Any]]:
        return [
            {"payload_sent_bytes": sent, "replica_distance_max": apart, "staleness_mean": stale}
        ] * 2

    found = study(
        run("serial", 1, 4.0),
        run("allreduce", 2, 2.0, each=each(800_000, None, None)),
        run("stepwise", 2, 2.0, each=each(400_000, 0.05, None)),
        run("ps", 2, 2.0, each=each(800_000, None, 1.5)),
    )
    text = said(found, "bytes")
    assert "`stepwise` sent the least (40.0 kB per worker and step)" in text
    assert "2 settings sent the most (80.0 kB: `allreduce` and `ps`)" in text
    assert "farthest apart in `stepwise x 2`: 5.0%" in said(found, "drift")
    assert "stalest in `ps x 2`: 1.5 updates" in said(found, "drift")
    nothing = read_study(
        write_study(
            found.folder / "t", [run("serial", 1, 4.0), run("psgd", 2, 2.0), run("hogwild", 2, 2.0)]
        )
    )
    assert said(nothing, "bytes") == said(nothing, "drift") == ""


def test_time_against_the_size_of_the_data(study) -> None:
    runs = [
        run("serial", 1, 4.0 * share, samples=int(8000 * share), varied={"data_share": share})
        for share in (0.125, 0.25, 0.5, 1.0)
    ]
    found = study(*runs)
    assert "the number of samples to the power 1.00: in proportion" in said(found, "data")
    few = read_study(write_study(found.folder / "t", runs[:2]))
    assert said(few, "data") == ""


def test_a_busy_machine_is_told(study) -> None:
    quiet, busy = run("serial", 1, 4.0), run("serial", 1, 4.0)
    quiet["machine"], busy["machine"] = {"cpu_percent": 104.0}, {"cpu_percent": 190.0}
    assert "Something else used the machine: 91% of a core" in said(study(busy), "disturbed")
    assert said(study(quiet, folder="t"), "disturbed") == ""


def test_the_cost_of_measuring_is_told(study) -> None:
    assert "took 0.50% of the workers' time" in said(study(run()), "measuring")


@given(st.floats(0, 1), st.lists(st.integers(2, 64), min_size=1, max_size=5, unique=True))
def test_amdahl_finds_the_share_that_made_the_speedups(share: float, counts: list[int]) -> None:
    found = amdahl([(1, 1.0), *((p, 1 / (share + (1 - share) / p)) for p in counts)])
    assert found is not None
    assert math.isclose(found, share, abs_tol=1e-9)


def test_amdahl_is_silent_where_it_does_not_hold() -> None:
    assert amdahl([(1, 1.0)]) is None
    assert amdahl([(1, 1.0), (2, 2.5)]) is None  # faster than linear
    assert amdahl([(1, 1.0), (2, 0.5)]) is None  # slower than one


@given(st.floats(0.2, 3), st.floats(0.01, 100))
def test_the_slope_of_a_power_law(power: float, factor: float) -> None:
    found = slope([(x, factor * x**power) for x in (1.0, 2.0, 5.0, 9.0)])
    assert found is not None
    assert math.isclose(found, power, rel_tol=1e-6)
    assert slope([(1, 1), (2, 2)]) is None


def test_a_worker_record_has_what_a_real_one_has(run_inproc) -> None:
    real = run_inproc(steps=2).record["workers"][0]
    assert set(worker(0)) == set(real)


# --- advice has a command to copy

TYPED = "paceline study own.toml --seeds 1 --out 'runs/a b'"
TALKS = [{"compute_s": 2.0, "sync_s": 3.0, "idle_s": 0.0}] * 2
WAITS = [
    {"compute_s": 2.0, "sync_s": 0.1, "idle_s": 6.0},
    {"compute_s": 5.0, "sync_s": 0.1, "idle_s": 0.0},
]


def commands(found: Study, words: str) -> list[str]:
    """The commands of the comment that has these words."""
    (one,) = (c for c in comments(found) if words in c.text)
    return list(one.commands)


def typed(found: Study) -> Study:
    found.about["environment"] = {"command": TYPED}
    return found


def test_a_long_exchange_is_advised_on_with_a_command(study) -> None:
    base = [*rounds("serial", 1, 4.0, 0.97), *rounds("allreduce", 2, 5.0, 0.97, each=TALKS)]
    found = study(*base)
    assert commands(found, "try to exchange less often") == [
        "paceline train --strategy local-sgd:every=16 --workers 2"
    ]
    rarely = study(*base, *rounds("local-sgd:every=8", 2, 2.0, 0.97), folder="faster")
    assert commands(rarely, "`local-sgd:every=8 x 2` exchanged less often and was faster") == [
        "paceline train --strategy local-sgd:every=8 --workers 2"
    ]
    sizes = {"batch_sizes": [32, 32]}
    slow = study(
        *base[:3],
        *rounds("allreduce", 2, 5.0, 0.97, each=TALKS, **sizes),
        *rounds("psgd", 2, 6.0, 0.97, **sizes),
        folder="slower",
    )
    (command,) = commands(slow, "try larger batches, which make fewer exchanges")
    assert "--strategy allreduce --workers 2" in command
    assert command.endswith("--global-batch-size 128")
    private = rounds("allreduce", 2, 5.0, 0.97, each=TALKS, privacy="noise=1.0", **sizes)
    assert "larger batches" in said(study(*base[:3], *private, folder="private"), "next")


def test_waiting_is_advised_on_with_commands(study) -> None:
    found = study(
        *rounds("serial", 1, 4.0, 0.97),
        *rounds("allreduce", 2, 5.0, 0.97, each=WAITS, batch_sizes=[35, 35]),
    )
    ahead, smaller = commands(found, "of the time for the slowest: try a strategy")
    assert "--strategy ps:consistency=async --workers 2" in ahead
    assert smaller.endswith("--batch-size 50,20")
    assert "--strategy allreduce" in smaller


def test_advice_on_a_study_goes_on_in_its_folder(study) -> None:
    one = typed(study(run("serial", 1, 4.0), run("psgd", 2, 2.0), run("allreduce", 2, 2.1)))
    assert commands(one, "No setting was run twice") == [
        "paceline study own.toml --out 'runs/a b' --seeds 3"
    ]
    noisy = typed(
        study(
            *rounds("serial", 1, 4.0, 0.97, by=0.3),
            *rounds("psgd", 2, 2.0, 0.97, by=0.3),
            folder="noisy",
        )
    )
    assert commands(noisy, "use more `--seeds`") == [
        "paceline study own.toml --out 'runs/a b' --seeds 6"
    ]


def test_other_advice_has_commands_too(study) -> None:
    stopped = study(run("serial", 1, 4.0, patience=2), run("psgd", 2, 2.0))
    assert "--validation 0.1 --patience 2" in commands(stopped, "give validation=0.1")[0]
    codes = [{"sync_s": 0.1, "encode_s": 1.0, "decode_s": 1.0}] * 2
    codec = "randomk:ratio=0.1,feedback=false"
    runs = rounds("allreduce", 2, 4.0, 0.3, each=codes, codec=codec)
    for each in runs:
        each["codec"] = {"name": codec, "kind": "linear", "plain_bytes": 400, "message_bytes": 40}
    coded = study(*rounds("serial", 1, 4.0, 0.97), *runs, folder="coded")
    assert "--codec topk:ratio=0.1" in commands(coded, "hardly learned")[0]
    assert "--codec bf16" in commands(coded, "a cheaper codec can save")[0]


def test_a_study_made_in_python_has_advice_without_a_command(study) -> None:
    found = study(run("serial", 1, 4.0), run("psgd", 2, 2.0), run("allreduce", 2, 2.1))
    assert commands(found, "No setting was run twice") == []
