"""Noise, sampling, accounting, and the ledger."""

from __future__ import annotations

import json
import math
import os
import random
import stat
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import nn
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

from paceline.cli.main import cli
from paceline.data.adopt import DatasetSamples
from paceline.data.base import Samples, Scale, SomeSamples, TensorSamples
from paceline.data.shards import Cursor, StaticShards
from paceline.errors import BadRequest, DataCorrupt, RunFailed
from paceline.privacy import native, noise
from paceline.privacy.accounting import Spent, epsilon_of, most_times, noise_for
from paceline.privacy.apart import apart
from paceline.privacy.bookkeeping import Bookkeeping
from paceline.privacy.gradient import PrivateGradient
from paceline.privacy.guarantee import Curve, Guarantee
from paceline.privacy.ledger import (
    Ledger,
    LedgerEntry,
    begin,
    entries_in,
    read_account,
    read_entries,
    write_entries,
)
from paceline.privacy.noise import Noise, draw_key, normal_from
from paceline.privacy.plan import Resumed
from paceline.privacy.sampling import Coins, PoissonBatches, ShuffledBatches
from paceline.privacy.settings import Settings
from paceline.replica.replica import Replica
from paceline.types import Batch

CPU = torch.device("cpu")


# --- noise


@pytest.mark.parametrize("compiled", [True, False])
def test_noise_is_normal(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mean, variance and the share beyond one, two and three standard deviations, each with an
    error probability of 1e-6.
    """
    if compiled and native.loops() is None:
        pytest.skip("no C compiler")
    if not compiled:
        monkeypatch.setattr(noise, "loops_for", lambda *_: None)
    count = 1_000_001  # odd
    out = torch.zeros(count)
    Noise(draw_key(7, "test")).add(out, 1.0, 1.0)
    z, numbers = 4.9, out.double()
    assert abs(float(numbers.mean())) < z / math.sqrt(count)
    assert abs(float(numbers.square().mean()) - 1.0) < z * math.sqrt(2 / count)
    for far in (1.0, 2.0, 3.0):
        share = math.erfc(far / math.sqrt(2))
        seen = float((numbers.abs() > far).double().mean())
        assert abs(seen - share) < z * math.sqrt(share * (1 - share) / count)
    half = count // 2
    assert abs(float((numbers[:half] * numbers[-half:]).mean())) < z / math.sqrt(half)


@given(count=st.integers(1, 200), factor=st.floats(-2, 2), scale=st.floats(0, 3))
def test_compiled_noise_is_the_same_as_by_torch(count: int, factor: float, scale: float) -> None:
    if native.loops() is None:
        pytest.skip("no C compiler")
    start = torch.randn(count)
    one, other = start.clone(), start.double()
    Noise(draw_key(1, "x")).add(one, factor, scale)
    Noise(draw_key(1, "x")).add(other, factor, scale)
    torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=2e-5)


def test_blocks_of_noise_differ() -> None:
    out = torch.zeros(3 * noise.BLOCK)
    source = Noise(draw_key(None))
    source.add(out, 1.0, 1.0)
    parts = out.view(3, -1)
    assert not torch.equal(parts[0], parts[1])
    assert abs(float((parts[0] * parts[1]).mean())) < 5 / math.sqrt(noise.BLOCK)
    again = torch.zeros(10)
    source.add(again, 1.0, 1.0)
    assert not torch.equal(again, out[:10])


def test_extreme_bits_are_finite() -> None:
    bits = torch.tensor([0, -1, 2**31 - 1, -(2**31), 0, -1, 2**31 - 1, -(2**31)], dtype=torch.int32)
    for dtype in (torch.float32, torch.float64):
        assert bool(torch.isfinite(normal_from(bits, dtype)).all())
    compiled = native.loops()
    if compiled is not None:
        out = torch.zeros(8)
        compiled.add_normal(bits.data_ptr(), out.data_ptr(), 8, 1.0, 1.0)
        torch.testing.assert_close(out, normal_from(bits, torch.float32), rtol=1e-5, atol=1e-5)


def test_without_a_compiler_everything_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native.shutil, "which", lambda name: None)
    without = native.loops.__wrapped__  # what others have compiled stays in its cache
    assert without() is None
    monkeypatch.setattr(native, "loops", without)
    out = torch.zeros(1000)
    Noise(draw_key(None)).add(out, 1.0, 1.0)
    assert 0.8 < float(out.std()) < 1.2


def test_keys_are_secret_or_made_from_a_seed() -> None:
    assert draw_key(None, "noise", 0) != draw_key(None, "noise", 0)
    assert draw_key(3, "noise", 0) == draw_key(3, "noise", 0)
    keys = {
        draw_key(3, what, worker, session)
        for what in ("noise", "samples")
        for worker in range(8)
        for session in range(3)
    }
    assert len(keys) == 2 * 8 * 3


class Wrapped:
    """A replica whose clipped sum is zero, so that its gradient is the noise."""

    def __init__(self, size: int) -> None:
        model = nn.Linear(size, 1, bias=False)
        self.replica = Replica(model, torch.optim.SGD(model.parameters(), lr=1.0), F.mse_loss)


@pytest.mark.parametrize("trust", ["peers", "curator"])
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_noise_of_the_averaged_gradient(workers: int, trust: str) -> None:
    """The sum of all workers' gradients has the variance of the rule. The test fails wrongly once
    in a million.
    """
    size, batch, sigma, clip = 200_000, 10, 1.3, 0.5
    asked = Settings.read(f"noise={sigma},clip={clip},trust={trust}")
    guarantee = Guarantee.of(asked, workers, adds_up=True, strategy="allreduce")
    total = torch.zeros(size, dtype=torch.float64)
    for _ in range(workers):
        replica = Wrapped(size).replica
        private = PrivateGradient(replica, asked, guarantee.noise, draw_key(None), batch)
        private.forward_backward(Batch(None, None, batch, batch * workers, 0, 0), 1 / workers)
        total += replica.regions[0].grads.double()
    expected = sigma * clip / (batch * workers) * (math.sqrt(workers) if trust == "peers" else 1.0)
    assert abs(float(total.square().mean()) / expected**2 - 1) < 4.9 * math.sqrt(2 / size)
    assert guarantee.joins == (trust == "curator" and workers > 1)


def test_where_a_workers_steps_take_effect_alone_it_adds_the_whole_noise_with_either_trust() -> (
    None
):
    asked = Settings.read("noise=1.0,trust=curator")
    guarantee = Guarantee.of(asked, 4, adds_up=False, strategy="local-sgd")
    assert guarantee.noise == 1.0
    assert "local-sgd" in guarantee.sentences[1]


# --- sampling


def test_all_samples_are_drawn_with_the_same_probability_and_independently() -> None:
    count, rate, throws = 400, 0.1, 3000
    coins, seen = Coins(count, rate, draw_key(5, "coins")), torch.zeros(count)
    sizes, pairs = [], 0
    for _ in range(throws):
        heads = coins.throw()
        assert len(set(heads.tolist())) == len(heads)
        seen[heads] += 1
        sizes.append(len(heads))
        pairs += int({0, 1} <= set(heads.tolist()))
    spread = math.sqrt(throws * rate * (1 - rate))
    assert float((seen - throws * rate).abs().max()) < 5.5 * spread
    mean = sum(sizes) / throws
    variance = sum((s - mean) ** 2 for s in sizes) / throws
    assert abs(mean - count * rate) < 5 * math.sqrt(count * rate * (1 - rate) / throws)
    assert abs(variance / (count * rate * (1 - rate)) - 1) < 0.15
    assert abs(pairs - throws * rate**2) < 5 * math.sqrt(throws * rate**2)


@given(count=st.integers(1, 50), rate=st.floats(0.001, 1.0))
@settings(max_examples=50)
def test_any_rate(count: int, rate: float) -> None:
    heads = Coins(count, rate, draw_key(None)).throw()
    assert all(0 <= h < count for h in heads.tolist())
    assert len(heads) == count or rate < 1.0


def samples(count: int) -> TensorSamples:
    return TensorSamples(
        torch.arange(count, dtype=torch.float32).unsqueeze(1), torch.zeros(count, dtype=torch.int64)
    )


def test_batches_say_what_was_expected_not_what_was_drawn() -> None:
    shards = StaticShards(60, (4, 4, 4))
    batches = PoissonBatches(samples(60), shards, 1, CPU, draw_key(None))
    drawn = set()
    assert batches.steps_per_epoch == 5
    for number, batch in enumerate(batches, start=1):
        assert (batch.weight, batch.global_weight) == (4, 12)
        rows = [] if batch.inputs is None else batch.inputs[:, 0].int().tolist()
        assert all(20 <= row < 40 for row in rows)  # its own shard
        drawn.add(len(rows))
        assert batch.ends_epoch == (number % 5 == 0)
        if number == 2000:
            break
    assert len(drawn) > 3
    assert (
        0 in drawn
        # an empty batch still steps; one in 87 is: that there is none among 2,000 has probability
        # 1e-10
    )
    again = PoissonBatches(samples(60), shards, 1, CPU, draw_key(None))
    again.restore(batches.state())
    assert (again.step, again.epochs_done) == (2000, 400)
    assert "key" not in str(batches.state())


def test_shuffled_batches_use_each_sample_once() -> None:
    batches, seen = ShuffledBatches(samples(10), StaticShards(10, (4,)), 0, CPU), []
    for batch in batches:
        assert batch.weight == 4
        seen += batch.inputs[:, 0].int().tolist()
        if batch.ends_epoch:
            break
    assert sorted(seen) == list(range(10))


# --- accounting


def test_the_known_case() -> None:
    """N = 60,000, batch 256, noise 1.1, 60 epochs, delta 1e-5."""
    line = [Spent(1.1, 256 / 60_000, 60 * 60_000 // 256)]
    assert epsilon_of(line, 1e-5) == pytest.approx(2.38, abs=0.02)
    assert epsilon_of(line, 1e-5, "rdp") == pytest.approx(2.597, abs=0.005)


@pytest.mark.parametrize(
    ("sigma", "rate", "steps", "delta"),
    [
        (1.0, 0.01, 1000, 1e-5),
        (0.8, 0.004, 2000, 1e-6),
        (2.0, 0.05, 500, 1e-5),
        (1.5, 0.001, 10_000, 1e-5),
        (4.0, 0.1, 300, 1e-4),
    ],
)
def test_against_opacus(sigma: float, rate: float, steps: int, delta: float) -> None:
    from opacus.accountants import PRVAccountant, RDPAccountant

    theirs: dict[str, Any] = {"rdp": RDPAccountant(), "pld": PRVAccountant()}
    for name, account in theirs.items():
        account.history = [(sigma, rate, steps)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = account.get_epsilon(delta)
        # theirs has other orders, and an error of 0.01 of its own
        slack = 0.015 if name == "rdp" else 0.03
        assert epsilon_of([Spent(sigma, rate, steps)], delta, name) == pytest.approx(
            expected, rel=slack
        )  # type: ignore[arg-type]


def test_one_gaussian_is_what_the_formula_says() -> None:
    """Balle and Wang (2018): delta = Phi(1/2s - e s) - exp(e) Phi(-1/2s - e s)."""

    def phi(x: float) -> float:
        return 0.5 * math.erfc(-x / math.sqrt(2))

    sigma, delta = 3.0, 1e-5
    found = epsilon_of([Spent(sigma, 1.0, 1)], delta)
    exact = phi(1 / (2 * sigma) - found * sigma) - math.exp(found) * phi(
        -1 / (2 * sigma) - found * sigma
    )
    assert exact == pytest.approx(delta, rel=0.01)
    four = epsilon_of([Spent(sigma, 1.0, 4)], delta)  # four of them are one with half the noise
    assert four == pytest.approx(epsilon_of([Spent(sigma / 2, 1.0, 1)], delta), rel=1e-3)


@pytest.mark.parametrize(
    ("sigma", "rate", "steps"), [(5.0, 0.001, 3000), (20.0, 0.01, 100), (1.0, 0.01, 1000)]
)
def test_the_least_of_both_bounds_is_told(sigma: float, rate: float, steps: int) -> None:
    """Where epsilon is small, the cells of a privacy loss distribution make its bound larger than
    Rényi's.
    """
    line = Spent(sigma, rate, steps)
    assert epsilon_of([line], 1e-5, "pld") <= epsilon_of([line], 1e-5, "rdp")
    if sigma == 5.0:
        assert epsilon_of([line], 1e-5) == pytest.approx(0.0353, abs=1e-4)  # 0.0647 by PLD alone


def test_lines_compose() -> None:
    one = [Spent(1.0, 0.01, 300)]
    assert epsilon_of([*one, Spent(1.0, 0.01, 200)], 1e-5) == pytest.approx(
        epsilon_of([Spent(1.0, 0.01, 500)], 1e-5), rel=0.01
    )
    assert epsilon_of([*one, Spent(5.0, 0.01, 10)], 1e-5) > epsilon_of(one, 1e-5)
    assert epsilon_of([], 1e-5) == 0.0
    assert epsilon_of([Spent(1.0, 0.01, 0)], 1e-5) == 0.0


def test_noise_is_found_and_is_hardly_more_than_needed() -> None:
    assert noise_for(3.0, 1e-4, 0.02, 47) < 1.0  # few steps: with very much noise epsilon is 0
    found = noise_for(3.0, 1e-5, 0.01, 500)
    assert epsilon_of([Spent(found, 0.01, 500)], 1e-5) <= 3.0
    assert epsilon_of([Spent(found * 0.998, 0.01, 500)], 1e-5) > 3.0
    assert noise_for(3.0, 1e-5, 0.01, 500, "rdp", before=(Spent(1.0, 0.01, 100),)) > found
    with pytest.raises(BadRequest, match="spent already"):
        noise_for(0.5, 1e-5, 0.01, 500, before=(Spent(0.5, 0.01, 1000),))
    with pytest.raises(BadRequest, match="use a larger epsilon or fewer steps"):
        noise_for(1e-9, 1e-5, 1.0, 10**6)


def test_how_long_a_budget_lasts() -> None:
    most = most_times(1.0, 1e-5, 1.0, 0.01, 2000, "pld")
    assert 0 < most < 2000
    assert epsilon_of([Spent(1.0, 0.01, most)], 1e-5) <= 1.0
    assert epsilon_of([Spent(1.0, 0.01, most + 5)], 1e-5) > 1.0
    assert most_times(100.0, 1e-5, 1.0, 0.01, 50, "pld") == 50


def test_the_curve_ends_where_the_account_does() -> None:
    asked = Settings.read("noise=1.0")
    curve = Curve.of(asked, 0.01, 400, 1, ())
    assert curve.at(400) == pytest.approx(epsilon_of([Spent(1.0, 0.01, 400)], 1e-5), rel=1e-6)
    values = [curve.at(n) for n in range(0, 401, 20)]
    assert values == sorted(values)
    assert values[0] == 0.0


# --- adaptive clipping


def test_an_adaptive_clip_norm_finds_its_quantile() -> None:
    model = nn.Linear(4, 1, bias=False)
    replica = Replica(
        model,
        torch.optim.SGD(model.parameters(), lr=0.0),
        lambda out, y: (out.squeeze(1) * y).mean(),
    )
    private = PrivateGradient(
        replica, Settings.read("noise=1.0,clip=0.01,adaptive=0.5"), 1.0, draw_key(3, "n"), 200
    )
    random = torch.Generator().manual_seed(0)
    for step in range(150):
        # lengths: chi with 4 degrees of freedom, median 1.83
        inputs = torch.randn(200, 4, generator=random)
        private.forward_backward(Batch(inputs, torch.ones(200), 200, 200, 0, step), 1.0)
    assert private.clipper.bound == pytest.approx(1.83, rel=0.15)
    other = PrivateGradient(
        replica, Settings.read("noise=1.0,adaptive=0.5"), 1.0, draw_key(3, "n"), 200
    )
    other.load(private.state())
    assert other.clipper.bound == private.clipper.bound


def test_an_adaptive_clip_norm_pays_for_its_count() -> None:
    """1/z^2 = 1/left^2 + 1/(2 s)^2: both together are one mechanism of the noise that was asked
    for.
    """
    replica = Wrapped(10).replica
    private = PrivateGradient(
        replica, Settings.read("noise=1.0,adaptive=0.5"), 1.0, draw_key(None), 100
    )
    share = private._share
    assert share is not None
    assert share.left**-2 + (2 * share.noise) ** -2 == pytest.approx(1.0)
    with pytest.raises(BadRequest, match=r"needs batches of more than 10; 8 samples are too few"):
        PrivateGradient(replica, Settings.read("noise=1.0,adaptive=0.5"), 1.0, draw_key(None), 8)


# --- people apart


def mixed(samples: list[Any]) -> Any:
    """A mixup that adds half of its neighbour to each input."""
    inputs, targets = default_collate(samples)
    return 0.5 * inputs + 0.5 * inputs.roll(1, 0), targets


def centred(samples: list[Any]) -> Any:
    inputs, targets = default_collate(samples)
    return inputs - inputs.mean(0, keepdim=True), targets


class Fetches(Dataset[Any]):
    """A data set that reads many samples at once and mixes them."""

    def __init__(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        return self.inputs[index], self.targets[index]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        mean = self.inputs[indices].mean(0)
        return [(self.inputs[i] - mean, self.targets[i]) for i in indices]


def people(kind: str, inputs: torch.Tensor, targets: torch.Tensor) -> Samples:
    if kind == "own samples":
        return Averaged(inputs, targets)
    if kind == "__getitems__":
        return DatasetSamples(Fetches(inputs, targets))
    if kind == "subset":
        return DatasetSamples(Subset(Fetches(inputs, targets), range(len(inputs))))
    return DatasetSamples(
        TensorDataset(inputs, targets), {"mixup": mixed, "centred": centred}[kind]
    )


class Averaged(TensorSamples):
    def batch(self, indices: torch.Tensor) -> Any:
        inputs, targets = super().batch(indices)
        return inputs - inputs.mean(0), targets


@pytest.mark.parametrize("kind", ["mixup", "centred", "__getitems__", "subset", "own samples"])
def test_one_more_person_changes_the_clipped_sum_by_no_more_than_the_clip_norm(kind: str) -> None:
    inputs, targets = torch.randn(33, 6), torch.randint(0, 3, (33,))
    inputs[32] = 40.0  # an outlier
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    places = [(p, torch.zeros_like(p)) for p in model.parameters()]
    clipper = Bookkeeping(model, F.cross_entropy, places, 1.0, False)

    def difference(samples: Samples) -> float:
        sums = []
        for count in (32, 33):
            clipper(*samples.batch(torch.arange(count)), count)
            sums.append(torch.cat([place.flatten() for _, place in places]))
        return float((sums[1] - sums[0]).norm())

    mixing = people(kind, inputs, targets)
    assert difference(mixing) > 1.5
    assert difference(apart(mixing)) <= 1.0 + 1e-5


def test_rows_of_a_batch_are_what_they_are_alone() -> None:
    inputs, targets = torch.randn(9, 6), torch.arange(9)
    samples = apart(people("mixup", inputs, targets))
    for count in (1, 4, 9):
        found = samples.batch(torch.arange(count))
        assert torch.equal(found[0], inputs[:count])
        assert torch.equal(found[1], targets[:count])


def test_what_treats_rows_apart_is_read_at_once() -> None:
    inputs, targets = torch.randn(9, 6), torch.arange(9)
    plain = TensorDataset(inputs, targets)
    ours = [
        TensorSamples(inputs, targets),
        TensorSamples(inputs, targets, Scale((0.5,), (0.5,))),
        SomeSamples(TensorSamples(inputs, targets), torch.arange(4)),
        DatasetSamples(Subset(plain, range(4))),
    ]
    for samples in ours:
        assert apart(samples) is samples
    for samples in (
        TensorSamples(inputs, targets, lambda x: x - x.mean(0)),
        SomeSamples(Averaged(inputs, targets), torch.arange(4)),
    ):
        assert apart(samples) is not samples


def test_a_collate_function_may_do_anything_to_one_sample() -> None:
    """Rows are joined also in dictionaries and tuples, and beside values that all samples share."""

    def padded(samples: list[Any]) -> Any:
        rows = [F.pad(x[: 1 + int(y) % 4], (0, 6 - len(x[: 1 + int(y) % 4]))) for x, y in samples]
        return {"x": torch.stack(rows), "both": (torch.stack(rows), "same")}, torch.stack(
            [y for _, y in samples]
        )

    whole = DatasetSamples(TensorDataset(torch.randn(9, 6), torch.arange(9)), padded)
    found, expected = apart(whole).batch(torch.arange(9)), whole.batch(torch.arange(9))
    assert torch.equal(found[0]["x"], expected[0]["x"])
    assert torch.equal(found[0]["both"][0], expected[0]["both"][0])
    assert found[0]["both"][1] == "same"
    assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        (
            lambda x, y: x[: 1 + y][None],
            r"shape \(1, 1\) and another shape \(1, 2\).*pad all samples to one fixed length",
        ),
        (lambda x, y: torch.stack([x, x]), "makes 2 rows of one sample.*make one row"),
        (lambda x, y: x.mean(), "a number without a row"),
        (lambda x, y: {str(int(y)): x[None]}, "a dictionary of 0 and another a dictionary of 1"),
        (lambda x, y: [x[None]] * (1 + int(y)), "a list of 1 and another a list of 2"),
        (
            lambda x, y: [x[None], (x[None],)][int(y) % 2],
            r"shape \(1, 6\) and another a tuple of 1",
        ),
        (lambda x, y: str(int(y)), "a str and another a str.*return tensors"),
    ],
)
def test_samples_that_do_not_fit_together_are_refused(inputs: Any, says: str) -> None:
    def collate(samples: list[Any]) -> Any:
        [(x, y)] = samples
        return inputs(x, y), y[None]

    with pytest.raises(BadRequest, match=says):
        apart(DatasetSamples(TensorDataset(torch.randn(9, 6), torch.arange(9)), collate)).batch(
            torch.arange(3)
        )


# --- the ledger


def test_a_ledger_is_ahead_of_what_is_done(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, 0, LedgerEntry(0, 1.0, 0.01, 0), planned=100)
    ledger.before_step()
    assert read_account(tmp_path)[0].steps == 10  # killed now, all of them count
    for _ in range(24):
        ledger.before_step()
    assert read_account(tmp_path)[0].steps == 30
    ledger.settle()
    assert read_account(tmp_path) == [LedgerEntry(0, 1.0, 0.01, 25)]
    Ledger(tmp_path, 1, LedgerEntry(0, 1.0, 0.01, 0), planned=100).before_step()
    later = Ledger(tmp_path, 0, LedgerEntry(1, 2.0, 0.01, 0), planned=100)
    later.before_step()
    later.settle()
    # the worker with the most, by session
    assert read_account(tmp_path) == [LedgerEntry(0, 1.0, 0.01, 25), LedgerEntry(1, 2.0, 0.01, 1)]


def test_a_ledger_writes_down_no_more_than_is_allowed(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, 0, LedgerEntry(0, 1.0, 0.01, 0), planned=13)
    for _ in range(13):
        ledger.before_step()
    assert read_account(tmp_path)[0].steps == 13
    with pytest.raises(RunFailed, match="no further step is allowed"):
        ledger.before_step()


def test_sessions_that_begin_at_once_have_numbers_of_their_own(tmp_path: Path) -> None:
    assert [begin(tmp_path, [], 0) for _ in range(3)] == [0, 1, 2]
    assert begin(tmp_path, [LedgerEntry(5, 1.0, 0.1, 7)], 0) == 6
    assert read_account(tmp_path) == [LedgerEntry(5, 1.0, 0.1, 7)]


def test_sessions_at_the_same_time_do_not_lose_each_others_steps(tmp_path: Path) -> None:
    sessions = [begin(tmp_path, [], 0) for _ in range(2)]
    first, second = (
        Ledger(tmp_path, 0, LedgerEntry(session, 1.0, 0.01, 0), planned=1000)
        for session in sessions
    )
    for ledger, steps in ((second, 50), (first, 30)):
        for _ in range(steps):
            ledger.before_step()
    second.settle()
    first.settle()
    assert read_account(tmp_path) == [LedgerEntry(0, 1.0, 0.01, 30), LedgerEntry(1, 1.0, 0.01, 50)]


def test_a_ledger_with_all_sessions_in_one_file_is_read(tmp_path: Path) -> None:
    """A ledger as earlier versions wrote it."""
    write_entries(
        tmp_path / "privacy" / "worker-0.json",
        [LedgerEntry(0, 1.0, 0.01, 30), LedgerEntry(1, 1.0, 0.01, 50)],
    )
    session = begin(tmp_path, [], 0)
    Ledger(tmp_path, 0, LedgerEntry(session, 1.0, 0.01, 0), planned=5).before_step()
    assert read_account(tmp_path) == [
        LedgerEntry(0, 1.0, 0.01, 30),
        LedgerEntry(1, 1.0, 0.01, 50),
        LedgerEntry(2, 1.0, 0.01, 5),
    ]


def test_a_line_is_on_the_disk_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is synced before the rename, the folder after it."""
    done: list[str] = []
    replace, fsync = os.replace, os.fsync

    def synced(handle: int) -> None:
        done.append("folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "file")
        fsync(handle)

    def renamed(one: Path, other: Path) -> None:
        done.append("name")
        replace(one, other)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    write_entries(tmp_path / "privacy" / "worker-0.json", [LedgerEntry(0, 1.0, 0.01, 30)])
    assert done == ["file", "name", "folder"]


def test_a_damaged_ledger_is_no_empty_one(tmp_path: Path) -> None:
    (tmp_path / "privacy").mkdir()
    (tmp_path / "privacy" / "worker-0.json").write_text("{")
    with pytest.raises(DataCorrupt, match="it is unknown what the run has spent"):
        read_account(tmp_path)


def test_shuffled_epochs_count_once_per_epoch() -> None:
    assert LedgerEntry(0, 1.0, 1.0, steps=25, per=10).spent == Spent(1.0, 1.0, 3)
    assert LedgerEntry(0, 1.0, 1.0, steps=10, per=10, start=5).spent == Spent(1.0, 1.0, 2)
    assert LedgerEntry(0, 1.0, 1.0, steps=0, per=10, start=5).spent == Spent(1.0, 1.0, 0)


def test_no_session_uses_a_sample_more_often_than_it_counts(tmp_path: Path) -> None:
    """Sixty runs have three sessions each, with other batch sizes, each from a checkpoint of the
    session before.
    """
    draw = random.Random(0)
    for _ in range(60):
        samples, cursor, resumed = draw.randint(5, 60), Cursor(), Resumed()
        state: dict[str, Any] | None = None
        for _ in range(3):
            sizes = tuple(draw.randint(1, 9) for _ in range(draw.randint(1, 3)))
            shards = StaticShards(samples, sizes)
            if state is not None:
                cursor = shards.restore(state)
                rest = (
                    "optimizer",
                    "random",
                    "generators",
                    "strategy",
                    "epoch_start",
                    "samples_seen",
                )
                torch.save(
                    {**dict.fromkeys(rest), "batches": {"shards": state}}, tmp_path / "worker-0.pt"
                )
                resumed = Resumed(0, (), tmp_path)
            per, steps, seen = shards.steps_per_epoch, draw.randint(1, 25), Counter[int]()
            start, kept = resumed.into_epoch(sizes, per), draw.randint(1, steps)
            for step in range(steps):
                for worker in range(len(sizes)):
                    seen.update(shards.take(cursor, worker).tolist())
                cursor = shards.advance(cursor)
                if step + 1 == kept:
                    state = shards.state(cursor)
            said = LedgerEntry(0, 1.0, 1.0, steps, per, start).spent.times
            assert max(seen.values()) <= said <= steps // per + 2


# --- what is asked for


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("epsilon=0", "epsilon=0: it must be above 0; no training fits"),
        ("epsilon=-1", "above 0"),
        ("epsilon=nan", "above 0"),
        ("epsilon=3,delta=1", "delta=1: it must be above 0 and well below one over"),
        ("epsilon=3,delta=0", "delta=0"),
        ("noise=0", "without noise no sample is protected"),
        ("noise=1,clip=0", "clip=0"),
        ("delta=1e-5", "give epsilon=3"),
        ("epsilon=3,trust=nobody", "peers, curator"),
        ("epsilom=3", "Did you mean 'epsilon'"),
        ("epsilon=three", "not a number"),
        ("epsilon", "not key=value"),
        ("noise=1,adaptive=1", "a share of the samples"),
        (
            "noise=1,adaptive=0.5,per_layer=true",
            "does not go with per_layer: leave one of them out",
        ),
        ("noise=1,sampling=all", "poisson, shuffle"),
    ],
)
def test_bad_settings(text: str, says: str) -> None:
    with pytest.raises(BadRequest, match=says):
        Settings.read(text)


def test_settings_can_be_typed_again() -> None:
    text = "epsilon=3,noise=1.25,delta=1e-06,clip=0.1,trust=curator,per_layer=true,secure=false"
    asked = Settings.read(text)
    assert Settings.read(str(asked)) == asked
    assert str(Settings.read({"epsilon": 3, "delta": 1e-5})) == "epsilon=3,delta=1e-05,clip=1"


def test_the_calculator(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(
        [
            "privacy",
            "--samples",
            "60000",
            "--batch-size",
            "256",
            "--epochs",
            "60",
            "--noise",
            "1.1",
            "--json",
        ],
        standalone_mode=False,
    )
    found = json.loads(capsys.readouterr().out)
    assert found["epsilon"] == pytest.approx(2.38, abs=0.02)
    assert found["epsilon_rdp"] == pytest.approx(2.597, abs=0.005)
    cli.main(
        [
            "privacy",
            "--samples",
            "1000",
            "--batch-size",
            "100",
            "--steps",
            "20",
            "--epsilon",
            "4",
            "--sampling",
            "shuffle",
        ],
        standalone_mode=False,
    )
    assert "no gain from" in capsys.readouterr().out
    for wrong, says in (
        (["--epochs", "1"], "`noise` .* or `epsilon`"),
        (["--noise", "1"], "`epochs` or `steps`"),
        (["--noise", "1", "--epochs", "1", "--delta", "1"], "delta=1"),
    ):
        with pytest.raises(BadRequest, match=says):
            cli.main(
                ["privacy", "--samples", "100", "--batch-size", "10", *wrong], standalone_mode=False
            )


@pytest.mark.parametrize(
    "damage",
    [{"sVeps": 3}, {"noise": "x"}, {"steps": -1}, {"rate": 2.0}, {"per": 0}, {"session": None}],
)
def test_an_entry_with_wrong_fields_is_refused(tmp_path: Path, damage: dict) -> None:
    """What a run has spent must not be guessed: of its own ledger nor of a checkpoint's."""
    entry = {"session": 0, "noise": 1.0, "rate": 0.1, "steps": 5}
    assert len(entries_in([entry], tmp_path)) == 1
    (tmp_path / "worker-0.json").write_text(json.dumps({"sessions": [entry | damage]}))
    for read in (
        lambda: read_entries(tmp_path / "worker-0.json"),
        lambda: entries_in([entry | damage], tmp_path),
    ):
        with pytest.raises(DataCorrupt, match="it is unknown what the run has spent"):
            read()
