"""Private runs from beginning to end: strategies with a guarantee, budgets, resuming, refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import identical, make_pairs, small_net, weights_distance
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, TensorDataset, default_collate

import paceline
from paceline.privacy.accounting import Spent, epsilon_of
from paceline.record.reader import read_worker_events
from paceline.registry import strategies

DATA = (make_pairs(240), make_pairs(60, seed=1))
QUICK = {"data": DATA, "batch_size": 12, "lr": 0.05, "steps": 6}
CURATOR = "noise=1,trust=curator"

STATED = [
    "serial", "allreduce", "allreduce:collective=ring", "allreduce:collective=tree",
    "allreduce:exchange=weights", "ring-reduce", "ps", "ps:consistency=async",
    "ps:consistency=ssp", "ps:exchange=weights", "local-sgd:every=2", "diloco:every=2", "psgd",
    "stepwise", "stepwise:exchange=gradients", "gossip",
]  # fmt: skip


@pytest.mark.parametrize("strategy", STATED)
@pytest.mark.sampled(2)
def test_every_strategy_with_a_guarantee(run_inproc, strategy: str) -> None:
    workers = 1 if strategy == "serial" else 3
    run = run_inproc(
        **QUICK, strategy=strategy, workers=workers, privacy="noise=1.0,clip=0.5,secure=false"
    )
    told = run.record["privacy"]
    assert told["epsilon"] == pytest.approx(epsilon_of([Spent(1.0, 12 * workers / 240, 6)], 1e-5))
    assert (told["steps"], told["noise"], told["clip"], told["trust"], told["sampling"]) == (
        6,
        1.0,
        0.5,
        "peers",
        "poisson",
    )
    assert told["epsilon_rdp"] > told["epsilon"]
    assert len(told["guarantee"]) == 2
    again = run_inproc(
        **QUICK, strategy=strategy, workers=workers, privacy="noise=1.0,clip=0.5,secure=false"
    )
    assert identical(run.weights, again.weights)  # noise from the seed can be repeated


def test_every_strategy_has_said_what_it_reveals() -> None:
    """Strategies that state nothing say why no guarantee is known."""
    silent = {e.name for e in strategies if strategies.build(e.name).traits.noise_adds_up is None}
    assert silent == {"hogwild", "ddp"}


@pytest.mark.parametrize(
    "strategy", ["allreduce", "ps", "local-sgd:every=1", "stepwise:full_every=1"]
)
def test_without_noise_and_without_clipping_it_is_plain_training(run_inproc, strategy: str) -> None:
    """With a clip norm that no gradient reaches, negligible noise and full batches, a private run
    gives the same weights as a plain one.
    """
    common = {**QUICK, "strategy": strategy, "workers": 2, "shard": "static"}
    plain = run_inproc(**common)
    private = run_inproc(
        **common, privacy="noise=1e-7,clip=100,sampling=shuffle,secure=false,trust=curator"
    )
    assert weights_distance(plain.weights, private.weights) < 2e-5


def test_workers_together_are_one_worker_with_their_batch(run_inproc) -> None:
    """With full batches and negligible noise, one worker and three workers compute the same clipped
    sum.
    """
    options = {
        **QUICK,
        "batch_size": None,
        "global_batch_size": 240,
        "steps": 3,
        "privacy": "noise=1e-7,clip=0.3,sampling=shuffle",
    }
    options.pop("batch_size")
    one = run_inproc(**options, strategy="serial")
    three = run_inproc(**options, strategy="allreduce", workers=3)
    assert weights_distance(one.weights, three.weights) < 1e-5


def test_collectives_give_the_same_private_weights(run_inproc) -> None:
    runs = [
        run_inproc(
            **QUICK,
            workers=4,
            strategy=f"allreduce:collective={name}",
            privacy="noise=1.0,secure=false",
        )
        for name in ("native", "ring", "tree", "halving-doubling")
    ]
    for other in runs[1:]:
        assert weights_distance(runs[0].weights, other.weights) < 1e-5


def mixup(samples: list[Any]) -> Any:
    inputs, targets = default_collate(samples)
    return 0.5 * inputs + 0.5 * inputs.roll(1, 0), targets


def test_a_collate_function_that_mixes_people_is_given_one_at_a_time(
    run_inproc, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sample that is collated alone has no other to mix with, so the weights are those of
    training without mixup.
    """
    loader = DataLoader(TensorDataset(*DATA[0]), batch_size=12, shuffle=True, collate_fn=mixup)
    options = {"strategy": "allreduce", "workers": 2, "privacy": "noise=1.0,clip=0.5,secure=false"}
    plain = run_inproc(**{**QUICK, **options})
    assert "one at a time" not in capsys.readouterr().err
    mixed = run_inproc(**{**QUICK, **options, "data": (loader, DATA[1]), "progress": True})
    assert "samples are read and collated one at a time" in capsys.readouterr().err
    assert identical(plain.weights, mixed.weights)
    assert mixed.record["privacy"]["epsilon"] == plain.record["privacy"]["epsilon"]


class Pooled(nn.Module):
    """The mean over the places of a sequence, padding included."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(1, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(x.mean(1, keepdim=True))  # type: ignore[no-any-return]


def test_samples_of_unequal_length_are_refused_in_words(run_inproc) -> None:
    """If rows were padded to the longest of the batch, a row would reveal the lengths of others."""

    def padded(samples: list[Any]) -> Any:
        return pad_sequence([x[: 1 + int(y)] for x, y in samples], batch_first=True), torch.stack(
            [y for _, y in samples]
        )

    loader = DataLoader(TensorDataset(*DATA[0]), batch_size=12, collate_fn=padded)
    with pytest.raises(paceline.BadRequest, match="pad all samples to one fixed length"):
        run_inproc(**{**QUICK, "data": (loader, None), "privacy": "noise=1.0", "model": Pooled})


def test_secret_runs_differ(run_inproc) -> None:
    options = {**QUICK, "strategy": "allreduce", "workers": 2, "privacy": "noise=1.0"}
    one, other = run_inproc(**options), run_inproc(**options)
    assert not identical(one.weights, other.weights)
    assert one.record["privacy"]["private"] is True


def test_trust_decides_who_adds_how_much(run_inproc) -> None:
    for trust, each in (("peers", 1.0), ("curator", 0.5)):
        told = run_inproc(
            **QUICK, strategy="allreduce", workers=4, privacy=f"noise=1.0,trust={trust}"
        ).record["privacy"]
        assert told["noise_per_worker"] == each
        assert told["noise"] == 1.0
    told = run_inproc(
        **QUICK, strategy="local-sgd", workers=4, privacy="noise=1.0,trust=curator"
    ).record["privacy"]
    assert told["noise_per_worker"] == 1.0  # a worker's own steps need its own noise


def test_losses_and_sizes_are_not_recorded_unless_asked_for(run_inproc) -> None:
    silent, open_book = (
        run_inproc(**QUICK, strategy="allreduce", workers=2, privacy=f"noise=1.0,reveal={reveal}")
        for reveal in ("false", "true")
    )
    for events in read_worker_events(silent.out):
        steps = [e for e in events if e["kind"] == "step"]
        assert [e["n"] for e in steps] == [12] * 6  # what was expected
        assert all(e["loss"] is None and "drawn" not in e for e in steps)
    assert silent.record["result"]["train_loss"] is None
    # Nor are the times of single steps, which depend on the samples drawn.
    for events in read_worker_events(silent.out):
        *others, last = [e for e in events if e["kind"] == "step"]
        assert {(e["compute_s"], e["sync_s"], e["train_s"], e["t"]) for e in others} == {
            (0.0, 0.0, others[0]["train_s"], others[0]["t"])
        }
        assert not {"began", "arrived"} & last.keys()
        assert last["compute_s"] > 0
    assert silent.record["result"]["train_s"] > 0
    trace = json.loads((Path(silent.out) / "trace.json").read_text())
    assert not [e for e in trace["traceEvents"] if e["name"] == "step"]
    drawn = [
        e["drawn"] for own in read_worker_events(open_book.out) for e in own if e["kind"] == "step"
    ]
    assert len(set(drawn)) > 1
    assert open_book.record["result"]["train_loss"] > 0


def test_noise_follows_from_epsilon(run_inproc) -> None:
    run = run_inproc(**QUICK, privacy={"epsilon": 2.0, "delta": 1e-4})
    told = run.record["privacy"]
    assert 1.9 < told["epsilon"] <= 2.0
    assert f"noise={told['noise']:g}" in run.record["config"]["privacy"]


def test_training_stops_before_the_budget_is_exceeded(run_inproc) -> None:
    run = run_inproc(
        **{**QUICK, "steps": 500}, strategy="allreduce", workers=2, privacy="noise=1.0,epsilon=3.0"
    )
    told = run.record["privacy"]
    assert told["cut_short"]
    assert told["epsilon"] <= 3.0 < epsilon_of([Spent(1.0, 0.1, told["steps"] + 2)], 1e-5)
    assert run.record["result"]["steps"] == told["steps"] < 500


def test_a_resume_goes_on_counting(run_inproc, tmp_path: Path) -> None:
    options = {
        **QUICK,
        "strategy": "allreduce",
        "workers": 2,
        "privacy": "noise=1.0",
        "checkpoint_every": "4",
    }
    first = run_inproc(**options, out=str(tmp_path / "run"))
    assert first.record["privacy"]["steps"] == 6
    more = paceline.train(resume=str(tmp_path / "run"), steps=10, **_objects(options))
    told = more.record["privacy"]
    # six, and from the checkpoint at step 4 six more: nothing is given back
    assert told["steps"] == 12
    assert [s["steps"] for s in told["sessions"]] == [6, 6]
    assert told["epsilon"] == pytest.approx(epsilon_of([Spent(1.0, 0.1, 12)], 1e-5), rel=0.01)
    back = paceline.train(
        resume=str(tmp_path / "run" / "checkpoints" / "step-00000008"), steps=9, **_objects(options)
    )
    assert back.record["privacy"]["steps"] == 13


def test_a_budget_that_is_spent_stays_spent(run_inproc, tmp_path: Path) -> None:
    options = {**QUICK, "privacy": "noise=1.0,epsilon=1.5", "checkpoint_every": "2"}
    run_inproc(**options, out=str(tmp_path / "run"))
    with pytest.raises(paceline.BadRequest, match=r"spent.*gives nothing back"):
        paceline.train(
            resume=str(tmp_path / "run"),
            privacy="noise=1.0,epsilon=0.5",
            steps=20,
            **_objects(options),
        )
    with pytest.raises(paceline.BadRequest, match="no room for another step"):
        run_inproc(**{**QUICK, "privacy": "noise=0.3,epsilon=0.1"})


def test_the_budget_of_a_run_also_ends_its_resumption(run_inproc, tmp_path: Path) -> None:
    options = {**QUICK, "privacy": "noise=1.0,epsilon=2.0", "checkpoint_every": "6"}
    first = run_inproc(**options, out=str(tmp_path / "run"))
    assert not first.record["privacy"]["cut_short"]
    more = paceline.train(resume=str(tmp_path / "run"), steps=400, **_objects(options))
    told = more.record["privacy"]
    assert told["cut_short"]
    assert told["epsilon"] <= 2.0 < epsilon_of([Spent(1.0, 0.05, told["steps"] + 3)], 1e-5)


def test_a_private_run_goes_on_in_its_own_folder(run_inproc, tmp_path: Path) -> None:
    options = {**QUICK, "privacy": "noise=1.0", "checkpoint_every": "3"}
    run_inproc(**options, out=str(tmp_path / "run"))
    with pytest.raises(paceline.BadRequest, match="in its own folder"):
        paceline.train(
            resume=str(tmp_path / "run"), out=str(tmp_path / "fork"), steps=9, **_objects(options)
        )


def test_a_checkpoint_that_is_taken_elsewhere_keeps_its_past(run_inproc, tmp_path: Path) -> None:
    options = {**QUICK, "privacy": "noise=1.0", "checkpoint_every": "3"}
    run_inproc(**options, out=str(tmp_path / "run"))
    other = tmp_path / "other"
    other.mkdir()
    shutil.copytree(tmp_path / "run" / "checkpoints", other / "checkpoints")
    shutil.copy(tmp_path / "run" / "config.json", other)
    # the second from the checkpoint at step 6
    for steps, spent in ((8, 6 + 2), (9, 6 + 2 + 1 + 2)):
        more = paceline.train(resume=str(other), steps=steps, **_objects(options))
        assert more.record["privacy"]["steps"] == spent


def test_what_was_spent_does_not_depend_on_the_events(run_inproc, tmp_path: Path) -> None:
    options = {**QUICK, "privacy": "noise=1.0", "checkpoint_every": "6"}
    run_inproc(**options, out=str(tmp_path / "run"))
    shutil.rmtree(tmp_path / "run" / "events")
    more = paceline.train(resume=str(tmp_path / "run"), steps=8, **_objects(options))
    assert more.record["privacy"]["steps"] == 8


def test_a_weaker_promise_is_not_forgotten(run_inproc, tmp_path: Path) -> None:
    options = {**QUICK, "strategy": "allreduce", "workers": 2, "checkpoint_every": "6"}
    run_inproc(**options, privacy="noise=1.0,secure=false,trust=curator", out=str(tmp_path / "run"))
    more = paceline.train(
        resume=str(tmp_path / "run"), privacy="noise=1.0", steps=8, **_objects(options)
    )
    told = more.record["privacy"]
    assert told["private"] is False
    assert told["trust"] == "curator"
    assert "Only the released model is protected" in told["guarantee"][0]


def test_shuffled_epochs_that_are_begun_again_count_again(run_inproc, tmp_path: Path) -> None:
    """An epoch has ten steps. The run makes nine, then ten more from the checkpoint at step 5, so
    some samples are used three times.
    """
    options = {
        **QUICK,
        "data": (make_pairs(120), None),
        "steps": 9,
        "privacy": "noise=2.0,sampling=shuffle",
        "checkpoint_every": "5",
    }
    run_inproc(**options, out=str(tmp_path / "run"))
    more = paceline.train(resume=str(tmp_path / "run"), steps=15, **_objects(options))
    assert more.record["privacy"]["epsilon"] == pytest.approx(
        epsilon_of([Spent(2.0, 1.0, 3)], 1e-5)
    )


def test_a_shuffled_epoch_that_goes_on_with_other_workers_counts_by_what_was_seen(
    run_inproc, tmp_path: Path
) -> None:
    """Ten steps are one epoch of 120 samples. After step 5 two workers use the remaining 60 in
    fewer than five steps, and another epoch follows. So some samples are used three times.
    """
    options = {
        **QUICK,
        "data": (make_pairs(120), None),
        "steps": 10,
        "strategy": "allreduce",
        "privacy": "noise=2.0,sampling=shuffle",
        "checkpoint_every": "5",
    }
    run_inproc(**options, out=str(tmp_path / "run"))
    again = str(tmp_path / "run" / "checkpoints" / "step-00000005")
    more = paceline.train(
        resume=again, steps=10, workers=2, checkpoint_every="6", **_objects(options)
    )
    assert more.record["privacy"]["epsilon"] == pytest.approx(
        epsilon_of([Spent(2.0, 1.0, 3)], 1e-5)
    )
    budget = epsilon_of([Spent(2.0, 1.0, 4)], 1e-5)  # one epoch more: the one that was begun
    last = paceline.train(
        resume=str(tmp_path / "run"),
        steps=99,
        privacy=f"epsilon={budget + 1e-6},noise=2.0,sampling=shuffle",
        **_objects(options),
    )
    assert last.record["privacy"]["epsilon"] <= budget + 1e-6
    assert last.record["privacy"]["cut_short"]


class Zero(nn.Module):
    """A model whose weights and gradients are zero, so that only noise changes the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Linear(20_000, 1, bias=False)
        nn.init.zeros_(self.weight.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        zeros: torch.Tensor = self.weight(torch.zeros(len(x), 20_000))
        return zeros + torch.zeros(1, 3)


@pytest.mark.parametrize("trust", ["peers", "curator"])
@pytest.mark.parametrize(
    "strategy",
    [
        "allreduce",
        "allreduce:collective=ring",
        "ps",
        "local-sgd:every=1",
        "psgd",
        "stepwise",
        "gossip",
        "ring-reduce",
    ],
)
def test_the_noise_that_reaches_the_weights(run_inproc, strategy: str, trust: str) -> None:
    """After one step with lr 1 and unequal batches, the released weights have changed by the noise
    of the rule. Each test fails wrongly once in a million.
    """
    sigma, clip, sizes = 1.5, 0.8, (10, 20, 30)
    run = run_inproc(
        model=Zero, data=(make_pairs(600), None), strategy=strategy, workers=3, batch_size=sizes,
        optimizer="sgd", lr=1.0, steps=1, privacy=f"noise={sigma},clip={clip},trust={trust}",
    )  # fmt: skip
    moved = run.weights["weight.weight"].double()  # from zero
    whole = sum(sizes)
    joins = trust == "curator" and strategy.partition(":")[0] in ("allreduce", "ps")
    variance = float(moved.square().mean())
    # partial averages weigh workers differently: between the best and the worst
    if strategy in ("stepwise", "gossip"):
        assert (sigma * clip / 30) ** 2 / 3 < variance < (sigma * clip / 10) ** 2
    else:
        expected = (sigma * clip / whole) ** 2 * (1 if joins else 3)
        assert abs(variance / expected - 1) < 4.9 * (2 / 20_000) ** 0.5


def test_going_on_without_privacy_is_refused_and_so_is_the_reverse(
    run_inproc, tmp_path: Path
) -> None:
    options = {**QUICK, "checkpoint_every": "3"}
    run_inproc(**options, privacy="noise=1.0", out=str(tmp_path / "private"))
    run_inproc(**options, out=str(tmp_path / "plain"))
    with pytest.raises(
        paceline.BadRequest, match="from a run without privacy, so its weights are not protected"
    ):
        paceline.train(
            resume=str(tmp_path / "plain"), privacy="noise=1.0", steps=9, **_objects(options)
        )
    config = tmp_path / "private" / "config.json"
    saved = json.loads(config.read_text())
    config.write_text(json.dumps({**saved, "privacy": None}))
    with pytest.raises(paceline.BadRequest, match="break its guarantee"):
        paceline.train(resume=str(tmp_path / "private"), steps=9, **_objects(options))


def test_no_secret_is_in_a_checkpoint(run_inproc, tmp_path: Path) -> None:
    """A checkpoint of a private run holds the clip norm and the ledger's entries."""
    run_inproc(**QUICK, privacy="noise=1.0", checkpoint_every="3", out=str(tmp_path / "run"))
    folder = tmp_path / "run" / "checkpoints" / "step-00000003"
    own = torch.load(folder / "worker-0.pt", weights_only=True)
    assert own["privacy"] == {"clip": 1.0}
    assert own["batches"] == {"step": 3, "shards": {"kind": "poisson", "epoch": 0}}
    said = json.loads((folder / "checkpoint.json").read_text())["privacy"]
    assert [set(line) for line in said] == [
        {"session", "noise", "rate", "steps", "per", "start", "trust", "secure"}
    ]


def _objects(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that are Python objects, which a resumed run needs again."""
    return {"model": small_net, "data": options["data"]}


@pytest.mark.parametrize("codec", ["topk:ratio=0.2", "fp16", "qsgd"])
def test_codecs_after_whole_noise(run_inproc, codec: str) -> None:
    run = run_inproc(**QUICK, strategy="allreduce", workers=2, codec=codec, privacy="noise=1.0")
    assert run.record["codec"]["message_bytes"] < run.record["codec"]["plain_bytes"]


def test_adaptive_clip_norms_of_workers_in_step_are_one(run_inproc) -> None:
    options = {
        **QUICK,
        "batch_size": 40,
        "strategy": "allreduce",
        "workers": 2,
        "checkpoint_every": "6",
    }
    for trust in ("peers", "curator"):
        run = run_inproc(**options, privacy=f"noise=0.8,adaptive=0.5,trust={trust}")
        folder = Path(run.out) / "checkpoints" / "step-00000006"
        bounds = {
            torch.load(folder / f"worker-{w}.pt", weights_only=True)["privacy"]["clip"]
            for w in range(2)
        }
        assert len(bounds) == 1
        assert bounds != {1.0}


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


class Endless(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter([(torch.zeros(6), 0)] * 40)


class RemembersInTraining(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(6, 3)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return self.out(x)  # type: ignore[no-any-return]


class Remembers(nn.Module):
    """A model with a buffer that depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(6, 3)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return self.out(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"strategy": "hogwild", "workers": 2, "transport": "shm"},
            "there is no proof.*ps:consistency=async",
        ),
        (
            {"strategy": "ddp", "workers": 2, "transport": "gloo"},
            "before they can be clipped: use allreduce",
        ),
        ({"model": Normed}, "BatchNorm1d.*GroupNorm"),
        ({"model": Remembers}, "buffer mean changes with the data"),
        ({"model": RemembersInTraining}, "buffer mean changes with the data"),
        ({"model": lambda: small_net(torch.bfloat16)}, "too coarse"),
        ({"profile": True, "transport": "gloo"}, "add reveal=true"),
        (
            {"batch_size": (1, 1000), "strategy": "allreduce", "workers": 2},
            "worker 0 gets none of the 240 samples",
        ),
        ({"shard": "global"}, "shard=global: a worker's part of the data must be fixed"),
        ({"partition": "by-label", "strategy": "allreduce", "workers": 2}, "partition=by-label"),
        ({"balance": "measured", "strategy": "allreduce", "workers": 2}, "balance=measured"),
        (
            {"overlap": "on", "strategy": "allreduce", "workers": 2, "transport": "gloo"},
            "before the backward pass has ended",
        ),
        (
            {"codec": "topk", "strategy": "allreduce", "workers": 2, "privacy": CURATOR},
            "only a part of the noise, and the residual of topk would be.*use trust=peers",
        ),
        (
            {
                "strategy": "allreduce:when=epoch",
                "workers": 2,
                "checkpoint_every": "3",
                "privacy": CURATOR,
            },
            "has only a part of the noise.*use checkpoint_every=epoch",
        ),
        (
            {"codec": "fp16", "strategy": "ps", "workers": 2, "privacy": CURATOR},
            "use trust=peers",
        ),
        ({"privacy": "epsilon=0"}, "epsilon=0"),
        ({"privacy": "epsilon=3,delta=1"}, "delta=1"),
        ({"batch_size": (12, 0), "strategy": "allreduce", "workers": 2}, "a batch of 1 or more"),
        ({"data": (Endless(), None)}, "drawn one by one"),
    ],
)
def test_what_has_no_guarantee_is_refused(run_inproc, options: dict[str, Any], says: str) -> None:
    with pytest.raises(paceline.BadRequest, match=says):
        run_inproc(**{**QUICK, "privacy": "noise=1.0", **options})


def test_what_is_collected_over_an_epoch_is_not_in_a_checkpoint_at_its_end(run_inproc) -> None:
    options = {
        **QUICK,
        "strategy": "allreduce:when=epoch",
        "workers": 2,
        "steps": 20,
        "checkpoint_every": "epoch",
    }
    run = run_inproc(**options, privacy="noise=1,trust=curator")
    own = torch.load(
        Path(run.out) / "checkpoints" / "step-00000010" / "worker-1.pt", weights_only=True
    )
    assert all(not bool(collected.any()) for collected in own["strategy"]["collected"])


def test_a_plugin_strategy_must_say_what_it_reveals(run_inproc) -> None:
    from paceline.strategies.serial import Serial

    class Mute(Serial):
        name = "mute"
        noise_adds_up = None

    with pytest.raises(paceline.BadRequest, match="does not declare what it reveals"):
        run_inproc(**QUICK, strategy=Mute(), privacy="noise=1.0")


def test_the_privacy_packages_may_be_missing(run_inproc, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from paceline.privacy import accounting

    accounting._epsilon.cache_clear()
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(paceline.BadRequest, match=r"pip install 'paceline\[privacy\]'"):
        run_inproc(**QUICK, privacy="noise=1.37")


class Declared(TensorDataset):
    classes = ("red", "green", "blue")


@pytest.mark.parametrize("kind", ["counted", "in the test set", "declared", "own model"])
def test_a_number_of_classes_that_was_counted_is_told(run_inproc, kind: str) -> None:
    """The largest private label would choose the architecture in silence (outer.md 1.11)."""
    train, test = make_pairs(240), make_pairs(60, seed=1)
    data: Any = {
        "in the test set": (train, test),
        "declared": (Declared(*train), None),
    }.get(kind, (train, None))
    model = small_net if kind == "own model" else "mlp:hidden=8"
    run = run_inproc(**{**QUICK, "data": data, "steps": 1}, model=model, privacy="noise=1")
    told = (Path(run.out) / "events" / "notices.jsonl").read_text()
    assert ("the largest training label is 2" in told) is (kind == "counted")
