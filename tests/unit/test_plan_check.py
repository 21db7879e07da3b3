"""Checks of a plan: token buckets, drawn settings, the ledger, errors, tables, steps."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.test_profile import profile

from paceline.errors import BadRequest
from paceline.faults.compute import Compute
from paceline.planning.accuracy import Accuracy, Branch, Followed
from paceline.planning.answer import built
from paceline.planning.check.cases import (
    Beside,
    Case,
    Epoch,
    Foretold,
    Seen,
    busy_in,
    drawn,
    epoch_of,
    foretell,
    interleaved,
    steps_for,
    synthetic_times,
)
from paceline.planning.check.compare import Compared, Outcome, errors_of
from paceline.planning.check.ledger import Ledger
from paceline.planning.check.links import CROWDS, LinkFound, Moving, crowds_for
from paceline.planning.check.table import check_table
from paceline.planning.check.whole import outcome
from paceline.planning.cluster import Cluster
from paceline.planning.engine import Engine, Program, Spend
from paceline.planning.measurements import Row
from paceline.planning.predict import Setting, predict
from paceline.planning.stored import read_profile, write_profile
from paceline.planning.workers import worker_of
from paceline.transport.virtual import Link, Network, Traffic

DATA = {"data": "fashion-mini"}
MOVING = (Moving(2, 1e-5, 1e-9), Moving(8, 4e-5, 1e-9))
LINK = LinkFound("10mbit", Link(1e-4, 8e-7, 16_000), ((1000, 1e-4), (10**6, 0.8)), MOVING)
CASE = Case("allreduce:collective=ring", "none", 3, "10mbit", "cnn", 16)
TOLD = Foretold(100.0, 90.0, 110.0, 0.1, 0.05, 100)


# --- a token bucket


def test_a_burst_passes_at_once_and_the_rest_at_the_rate() -> None:
    # 1 byte per second; 10 bytes pass at once after a pause
    traffic = Traffic(Network((0, 1), Link(0.5, 1.0, 10)))
    assert traffic.post(100.0, 0, 1, 4) == (100.0, 100.5)  # 6 bytes of credit are left
    assert traffic.post(100.0, 0, 1, 8) == (102.0, 102.5)  # 2 bytes too many
    assert traffic.post(107.0, 0, 1, 6) == (108.0, 108.5)  # 5 bytes of credit have come back
    assert traffic.post(200.0, 0, 1, 30) == (220.0, 220.5)  # never more than 10


@given(
    st.lists(st.tuples(st.floats(0, 10), st.integers(1, 50)), min_size=1, max_size=20),
    st.integers(0, 40),
)
def test_a_bucket_never_lets_more_pass_than_its_rate_and_burst(
    messages: list[tuple[float, int]], burst: int
) -> None:
    traffic = Traffic(Network((0, 1), Link(0.0, 1.0, burst)))
    at, sent = 0.0, []
    for pause, size in messages:
        at += pause
        left, _ = traffic.post(at, 0, 1, size)
        assert left >= at
        sent.append((at, left, size))
    for first, (began, _, _) in enumerate(sent):
        total = 0
        for posted, left, size in sent[first:]:
            total += size
            assert total <= burst + (left - began) + 1e-6, (posted, left)


# --- compute times that are drawn


def test_times_are_drawn_from_the_quantiles(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    path.write_text(json.dumps([0.1, 0.2, 0.4]))
    times = [
        Compute(times=str(path)).drawn_s(rank, step) for rank in range(4) for step in range(500)
    ]
    assert min(times) >= 0.1
    assert max(times) <= 0.4
    assert sum(t < 0.2 for t in times) / len(times) == pytest.approx(0.5, abs=0.05)
    assert Compute(times=str(path), seed=1).drawn_s(0, 1) == Compute(
        times=str(path), seed=1
    ).drawn_s(0, 1)


@pytest.mark.parametrize("content", ["", "{}", "[]", "[-1]", '["x"]', "[1e9]"])
def test_times_that_are_none(tmp_path: Path, content: str) -> None:
    path = tmp_path / "times.json"
    path.write_text(content)
    with pytest.raises(BadRequest, match="a list of seconds"):
        Compute(times=str(path))
    with pytest.raises(BadRequest, match="No such file"):
        Compute(times=str(tmp_path / "absent.json"))


# --- settings


def test_drawn_settings_are_accepted_different_and_the_same_for_a_seed() -> None:
    def draw(seed: int) -> list[Case]:
        places = [("10mbit", "cnn", 16, 16), ("1gbit", "mlp", 16, 4)]
        return drawn(["allreduce", "gossip"], ["none", "powersgd"], [3, 8], places, 6, seed, DATA)

    found = draw(1)
    assert len(set(found)) == len(found) > 3
    assert draw(1) == found
    assert draw(2) != found
    assert all(case.workers <= 4 for case in found if case.model == "mlp")
    with pytest.raises(BadRequest, match="none of these settings"):
        drawn(["serial"], ["none"], [3], [("10mbit", "cnn", 16, 16)], 6, 0, DATA)


@pytest.mark.parametrize("period", [1, 8, 16])
@pytest.mark.parametrize("step_s", [1e-3, 0.05, 3.0])
def test_measured_steps_are_whole_periods(period: int, step_s: float) -> None:
    steps = steps_for(step_s, period)
    warm_up = max(5, round(0.1 * steps))
    assert steps % period == 0
    assert (steps - warm_up) % period == 0
    assert warm_up <= steps // 2


def test_every_case_is_run_once_per_repeat() -> None:
    cases = [replace(CASE, workers=n) for n in (3, 4, 8)]
    found = interleaved(cases, 2, 0)
    assert sorted(found, key=lambda pair: (pair[0], pair[1].workers)) == [
        (repeat, case) for repeat in (0, 1) for case in cases
    ]


def test_a_case_is_predicted_with_the_measured_link() -> None:
    known = profile()
    told = foretell(CASE, known, LINK)
    worker, _ = worker_of(known)(16, "none")
    said = predict(Setting(built(CASE.strategy), "none", 3, 0, 1 << 20), worker, Cluster(LINK.link))
    # messages that wait for one of the machine's cores are a little late
    assert told.samples_per_s == pytest.approx(said.samples_per_s, rel=1e-3)
    assert told.low < told.samples_per_s < told.high
    assert not told.shares_cores
    # where the cores cannot move the bytes as fast as the links could, they set the pace
    busy = foretell(CASE, known, replace(LINK, crowds=(Moving(2, 1e-5, 1e-4),)))
    assert 0.9 < busy.moving_share < 1.01
    assert busy.samples_per_s < told.samples_per_s
    assert busy.shares_cores
    # and the interval is wider
    assert busy.high / busy.low > (told.high / told.low) ** 2


def test_the_last_step_of_an_epoch_has_fewer_samples() -> None:
    """It takes as long as the others."""
    known = profile()
    assert epoch_of(CASE, DATA) == Epoch(125, 1.0)  # 6,000 samples
    larger = epoch_of(replace(CASE, batch_size=64), DATA)
    assert (larger.steps, larger.full) == (32, pytest.approx(6000 / 32 / (3 * 64)))
    whole, half = (foretell(CASE, known, LINK, epoch=Epoch(125, full)) for full in (1.0, 0.5))
    assert half.samples_per_s == pytest.approx(whole.samples_per_s / 2)
    assert half.step_s == whole.step_s


def test_what_is_exchanged_at_the_end_of_an_epoch_counts() -> None:
    """`stepwise` with a codec averages then: with epochs of 2 steps, in every second step."""
    case = replace(CASE, strategy="stepwise", codec="fp16")
    often, seldom = (foretell(case, profile(), LINK, epoch=Epoch(n)) for n in (2, 1000))
    assert often.step_s > 1.2 * seldom.step_s


def test_moving_costs_more_in_a_crowd() -> None:
    assert LINK.moving(2) == MOVING[0]
    assert LINK.moving(5).s_per_message == pytest.approx(2.5e-5)
    assert LINK.moving(64).s_per_message == pytest.approx(4e-5)  # beyond the largest: as there


def test_a_step_takes_more_processor_time_in_a_crowd() -> None:
    own = Beside(((1, 2e-4), (8, 9e-4)))
    assert [own.busy_s(1), own.busy_s(8), own.busy_s(16)] == pytest.approx([2e-4, 9e-4, 9e-4])
    assert own.slower(1) == 1
    assert own.slower(8) == own.slower(16) == pytest.approx(4.5)
    known = profile()
    crowded = replace(CASE, workers=8)
    few, many = (foretell(crowded, known, LINK, b) for b in (Beside(((1, 2e-4),)), own))
    assert many.samples_per_s < few.samples_per_s
    assert many.moving_share > few.moving_share


@pytest.mark.parametrize(("ranks", "busy_s"), [(1, 0.5e-3), (2, 0.5e-3), (8, 0.3e-3), (16, 1e-3)])
def test_what_a_step_needs_of_a_core_follows_from_how_long_it_takes(
    ranks: int, busy_s: float
) -> None:
    """Ranks sleep for 3 ms and then wait for one of two cores."""

    def steps() -> Program:
        for _ in range(40):
            yield Spend(3e-3, shared=False)
            yield Spend(busy_s)

    engine = Engine(Network(tuple(range(ranks)), Link()), queues=True, cores=2)
    step_s = sum(engine.run([steps() for _ in range(ranks)])) / ranks / 40
    if ranks == 16:  # the cores set the pace
        assert step_s == pytest.approx(16 * busy_s / 2, rel=0.1)
    assert busy_in(step_s, [3e-3], ranks, 2) == pytest.approx(busy_s, rel=1e-3)
    assert busy_in(2e-3, [3e-3], ranks, 2) < 1e-6  # faster than it sleeps: nothing is left


@pytest.mark.parametrize("ranks", [2, 3, 8, 9, 16, 40])
def test_crowds_are_measured_as_far_as_they_are_needed(ranks: int) -> None:
    found = crowds_for(ranks)
    assert found[0] == 2
    assert max(found) >= min(ranks, max(CROWDS))
    assert len(found) == 1 or found[-2] < ranks


def test_a_worker_sleeps_for_a_step_without_what_it_really_does() -> None:
    known = profile()
    steps, _ = known.compute.at(16)
    times = synthetic_times(known, CASE)
    really = (steps.load_s or 0) + (steps.update_s or 0)
    assert times[50] == pytest.approx(max(0.0, steps.median_s - really))


# --- the ledger


def test_predictions_are_written_once_and_go_on(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "check")
    request = {"seed": 1, "cases": [vars(CASE)]}
    assert not ledger.exists
    ledger.write(request, [LINK], [(CASE, TOLD)])
    with pytest.raises(BadRequest, match="has predictions already"):
        ledger.write(request, [LINK], [(CASE, TOLD)])
    ledger.same(request)
    with pytest.raises(BadRequest, match="another check"):
        ledger.same({**request, "seed": 2})
    assert ledger.predictions() == [(CASE, TOLD)]
    assert ledger.links() == [LINK]
    with pytest.raises(BadRequest, match="no run has been measured"):
        outcome(ledger)
    for repeat, speed in enumerate((95.0, 105.0, 200.0)):
        ledger.add(repeat, CASE, Seen(speed, 0.1))
    with (tmp_path / "check" / "measured.jsonl").open("a") as file:
        file.write('{"repeat": 3, "ca')  # killed while it wrote
    [row] = outcome(ledger).rows
    assert len(row.seen) == 3
    assert row.measured == 105.0
    assert row.error == pytest.approx(100 / 105 - 1)
    assert row.covered


@pytest.mark.parametrize(
    "content", ["", "[]", '{"schema": 9}', '{"schema": 1, "predictions": [1]}']
)
def test_a_damaged_ledger_is_one_sentence(tmp_path: Path, content: str) -> None:
    (tmp_path / "ledger.json").write_text(content)
    with pytest.raises(BadRequest, match=r"ledger\.json"):
        Ledger(tmp_path).predictions()


def test_errors_of_settings() -> None:
    rows = [
        Compared(CASE, replace(TOLD, samples_per_s=100 * (1 + e / 100)), (Seen(100.0, 0.1),))
        for e in (-10, -1, 0, 1, 2, 3, 4, 5, 6, 20)
    ]
    found = errors_of(rows)
    assert found is not None
    assert found.median == pytest.approx(0.035)
    assert found.ninetieth == pytest.approx(0.11)
    assert found.largest == pytest.approx(0.2)
    assert errors_of([]) is None
    busy = Compared(CASE, replace(TOLD, moving_share=0.5), (Seen(90.0, 0.7),))
    parts = Outcome((*rows, busy), (LINK,)).described()
    assert parts["synthetic"]["count"] == 10
    assert parts["shared_cores"]["count"] == 1
    assert parts["links"][0]["points"][1]["predicted_s"] == pytest.approx(1e-4 + 984_000 * 8e-7)


# --- a table that was measured elsewhere


def table_rows(s_per_byte: float) -> list[Row]:
    """Rows that the planner itself makes for known links, with four workers on a host."""
    known, cluster = profile(), Cluster(Link(5e-5, s_per_byte), Link(5e-6, s_per_byte / 10))
    rows = []
    for workers, hosts in ((2, 1), (2, 2), (4, 2), (4, 4), (8, 2)):
        worker, _ = worker_of(known)(16, "none")
        placed = replace(cluster, per_host=-(-workers // hosts))
        setting = Setting(built("allreduce:collective=ring"), "none", workers)
        rows.append(Row(workers, hosts, 16, predict(setting, worker, placed).step_s))
    return rows


def test_a_table_is_fitted_on_two_workers_and_predicts_the_rest() -> None:
    known = replace(profile(), measurements=tuple(table_rows(1e-7)))
    asked = Cluster(Link(5e-5, 1.0), Link(5e-6, 1.0))
    found = check_table(known, "allreduce:collective=ring", asked)
    assert found.cluster.between.s_per_byte == pytest.approx(1e-7, rel=1e-3)
    assert found.cluster.inside.s_per_byte == pytest.approx(1e-8, rel=1e-3)
    assert [each.row.workers for each in found.rows] == [4, 4, 8]
    assert found.largest < 1e-3
    assert found.described()["median_error"] == found.median


def test_a_table_that_cannot_be_split() -> None:
    rows, asked = table_rows(1e-7), Cluster(Link(), Link())
    for kept, said in (
        ([r for r in rows if r.workers == 2], "more than 2 workers"),
        ([r for r in rows if r.hosts != 2 or r.workers != 2], "2 workers on 2 hosts"),
        ([r for r in rows if r.hosts != 1], "2 workers on 1 host"),
    ):
        known = replace(profile(), measurements=tuple(kept))
        with pytest.raises(BadRequest, match=said):
            check_table(known, "allreduce:collective=ring", asked)


# --- steps to an accuracy

ACCURACY = Accuracy(
    0.9, 40, "sqrt", (Branch(16, (1000, 1100)), Branch(128, (230, 240))), 500.0,
    (Followed("local-sgd", 4, 16, (500,)),),
)  # fmt: skip


@given(st.floats(10, 1000), st.floats(1, 5000))
def test_the_formula_is_found_again(s_min: float, b_crit: float) -> None:
    def steps(batch: int) -> int:
        return round(1e6 * s_min * (1 + b_crit / batch))

    found = Accuracy(0.9, 0, "sqrt", (Branch(16, (steps(16),)), Branch(128, (steps(128),))))
    assert found.s_min == pytest.approx(1e6 * s_min, rel=1e-3)
    assert found.b_crit == pytest.approx(b_crit, rel=1e-3)
    assert found.with_batch(1e12).steps == pytest.approx(1e6 * s_min, rel=1e-3)


def test_the_common_stage_is_shorter_with_a_larger_batch() -> None:
    """Without it 1,010 steps with 16 samples take 195 with 128; it took 40 of 1,050 itself."""
    assert ACCURACY.with_batch(16).steps == pytest.approx(1050)
    assert ACCURACY.with_batch(128).steps == pytest.approx(195 * 1050 / 1010)


def test_steps_of_strategies() -> None:
    ring, local = built("allreduce"), built("local-sgd")
    whole = 1050 / 1010  # of the steps after the common ones
    known = ACCURACY.of(ring, "allreduce", "none", 8, 16)
    assert known is not None
    assert known.steps == pytest.approx(195 * whole)
    assert known.low < known.steps < known.high
    followed = ACCURACY.of(local, "local-sgd", "none", 4, 16)
    assert followed is not None
    assert followed.steps == pytest.approx(460 * whole)
    halfway = ACCURACY.of(local, "local-sgd", "none", 2, 16)
    assert halfway is not None
    assert halfway.steps == pytest.approx((460 * whole + 1050) / 2)
    assert ACCURACY.of(local, "local-sgd", "none", 8, 16) is None  # beyond what was counted
    assert ACCURACY.of(local, "local-sgd", "none", 4, 32) is None
    assert ACCURACY.of(local, "local-sgd:every=2", "none", 4, 16) is None
    assert ACCURACY.of(ring, "allreduce", "topk", 8, 16) is None
    coded = replace(ACCURACY, followed=(Followed("allreduce", 8, 16, (700,), "topk"),))
    found = coded.of(ring, "allreduce", "topk", 8, 16)
    assert found is not None
    assert found.steps == pytest.approx(660 * whole)
    plain = coded.of(ring, "allreduce", "none", 8, 16)
    assert plain is not None
    assert plain.steps == pytest.approx(195 * whole)


def test_two_opinions_that_disagree_are_told() -> None:
    assert ACCURACY.b_crit == pytest.approx(190, rel=0.01)
    assert "disagree" in (ACCURACY.doubt or "")
    assert replace(ACCURACY, noise_scale=ACCURACY.b_crit).doubt is None
    falls = Accuracy(0.9, 0, "sqrt", (Branch(16, (800,)), Branch(128, (90,))))
    assert falls.b_crit == math.inf
    assert "guesses" in (falls.doubt or "")


def test_steps_are_kept_in_the_profile(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    write_profile(replace(profile(), accuracy=ACCURACY), path)
    assert read_profile(path).accuracy == ACCURACY
    plain = json.loads(path.read_text())
    plain["accuracy"]["branches"] = plain["accuracy"]["branches"][:1]
    path.write_text(json.dumps(plain))
    with pytest.raises(BadRequest, match="damaged"):
        read_profile(path)
