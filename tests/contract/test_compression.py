"""Codecs with every strategy: combinations learn, or are refused with a reason; identities hold."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.conftest import identical, make_pairs, small_net, weights_distance

from paceline import Run
from paceline.codecs.feedback import build_codec
from paceline.errors import BadRequest
from paceline.registry import codecs
from paceline.strategies.base import codec_for
from paceline.strategies.parts.momentum import Velocity

RunInproc = Callable[..., Run]
GENTLE = {
    "topk": "topk:ratio=0.2",
    "randomk": "randomk:ratio=0.5",
    "powersgd": "powersgd:rank=2",
    "threshold": "threshold:times=1",
}
LOSSY = [GENTLE.get(n, n) for n in codecs.names() if n != "none"]
HOPS = ["fp16", "bf16", "int8"]
DOUBLE = {"model": lambda: small_net(torch.float64), "data": make_pairs(60, dtype=torch.float64)}
COMPOSE = [
    "allreduce",
    "allreduce:exchange=weights",
    "ps",
    "ps:consistency=async",
    "ps:exchange=weights",
    "local-sgd:every=2",
    "diloco:every=2",
    "gossip",
]


PAIRS = [(s, c) for s in COMPOSE for c in LOSSY]
# Every strategy with three codecs, every codec with two or three strategies; all pairs are slow.
QUICK = [
    (s, c)
    for i, s in enumerate(COMPOSE)
    for j, c in enumerate(LOSSY)
    if (j - i) % len(LOSSY) in (0, 3, 6)
]


@pytest.mark.parametrize(
    ("strategy", "codec"),
    [p if p in QUICK else pytest.param(*p, marks=pytest.mark.slow) for p in PAIRS],
)
@pytest.mark.sampled(2)
def test_everything_composes_and_learns(run_inproc: RunInproc, strategy: str, codec: str) -> None:
    run = run_inproc(strategy=strategy, workers=3, codec=codec, epochs=6, lr=0.05, momentum=0.5)
    assert run.test_accuracy > 0.8
    own = [w for w in run.record["workers"] if w["role"] == "worker"]
    assert all(w["encode_s"] > 0 and w["decode_s"] > 0 for w in own)


@pytest.mark.parametrize(
    "strategy", ["stepwise", "stepwise:exchange=gradients", "stepwise:full_every=4", "ring-reduce"]
)
@pytest.mark.parametrize("codec", HOPS)
@pytest.mark.sampled(2)
def test_hop_codecs_compose_with_what_passes_sums_on(
    run_inproc: RunInproc, strategy: str, codec: str
) -> None:
    assert (
        run_inproc(strategy=strategy, workers=3, codec=codec, epochs=8, lr=0.05).test_accuracy > 0.8
    )


@pytest.mark.parametrize(
    ("strategy", "codec", "reason"),
    [
        ("serial", "fp16", "sends nothing"),
        ("psgd", "sign", "sends nothing"),
        ("hogwild", "topk", "sends nothing"),
        ("ddp", "fp16", "without our codecs"),
        ("stepwise", "sign", "cannot be added: use fp16, bf16 or int8"),
        ("stepwise", "int8:feedback=true", "no error feedback"),
        ("ring-reduce", "topk", "use allreduce"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_reason(
    run_inproc: RunInproc, strategy: str, codec: str, reason: str
) -> None:
    with pytest.raises(BadRequest, match=reason):
        run_inproc(
            strategy=strategy,
            workers=1 if strategy == "serial" else 2,
            codec=codec,
            transport="auto",
            steps=1,
        )


def test_a_rank_that_is_too_large_is_refused_before_anything_starts(run_inproc: RunInproc) -> None:
    with pytest.raises(BadRequest, match="larger than every matrix of this model"):
        run_inproc(strategy="allreduce", workers=2, codec="powersgd:rank=9", steps=1)


@pytest.mark.parametrize("codec", LOSSY)
def test_one_worker_sends_nothing_and_is_serial_bit_for_bit(
    run_inproc: RunInproc, codec: str
) -> None:
    serial, alone = run_inproc(steps=6), run_inproc(strategy="allreduce", codec=codec, steps=6)
    assert identical(serial.weights, alone.weights)
    assert all(w["payload_sent_bytes"] == 0 for w in alone.record["workers"])


# --- exactly the mathematics


@pytest.mark.parametrize("options", ["momentum", "momentum:nesterov=true"])
@pytest.mark.parametrize("strategy", ["allreduce", "ps"])
def test_momentum_before_a_codec_that_leaves_nothing_out_is_plain_momentum(
    run_inproc: RunInproc, strategy: str, options: str
) -> None:
    """top-k with ratio 1 sends everything, so the sum of the velocities is the sum's velocity."""
    serial = run_inproc(batch_size=12, steps=15, optimizer=options, weight_decay=0.01, lr=0.05)
    coded = run_inproc(
        strategy=strategy,
        workers=3,
        batch_size=4,
        steps=15,
        optimizer=options,
        weight_decay=0.01,
        lr=0.05,
        codec="topk:ratio=1",
    )
    assert weights_distance(serial.weights, coded.weights) < 1e-5


@pytest.mark.parametrize(
    "strategy", ["local-sgd:every=2", "diloco:every=2", "gossip", "allreduce:exchange=weights"]
)
def test_differences_that_leave_nothing_out_are_the_weights(
    run_inproc: RunInproc, strategy: str
) -> None:
    plain = run_inproc(strategy=strategy, workers=3, batch_size=4, steps=12, lr=0.05)
    coded = run_inproc(
        strategy=strategy, workers=3, batch_size=4, steps=12, lr=0.05, codec="topk:ratio=1"
    )
    assert weights_distance(plain.weights, coded.weights) < 1e-4


def test_momentum_is_taken_from_the_optimizer_once(run_inproc: RunInproc) -> None:
    class Line:
        codec, workers = build_codec("sign"), 2

    class Bare:
        regions: tuple[object, ...] = ()
        optimizer = torch.optim.SGD(
            [torch.nn.Parameter(torch.zeros(2))], lr=0.1, momentum=0.9, weight_decay=0.1
        )

    class Unclipped(Bare):
        clip_norm = None

    found = Velocity.taken(Line(), Unclipped())
    assert found is not None
    group = Bare.optimizer.param_groups[0]
    assert [group[k] for k in ("momentum", "weight_decay")] == [0.0, 0.0]
    assert Velocity.taken(Line(), Bare()) is None
    group["momentum"] = 0.8  # as OneCycleLR does in every step
    found.advance(Unclipped(), 0.5)
    assert group["momentum"] == 0.0
    assert found._rules[0].momentum == 0.8


# --- records


@pytest.mark.parametrize("codec", ["sign", "topk:ratio=0.2", "int8", "powersgd"])
def test_the_record_says_what_a_message_costs(run_inproc: RunInproc, codec: str) -> None:
    run = run_inproc(strategy="allreduce", workers=3, codec=codec, steps=4)
    said = run.record["codec"]
    assert said["plain_bytes"] == 4 * sum(p.numel() for p in small_net().parameters())
    assert 0 < said["message_bytes"] <= said["plain_bytes"]
    own = run.record["workers"]
    if build_codec(codec).kind == "gather":
        assert [w["payload_sent_bytes"] for w in own] == [4 * 2 * said["message_bytes"]] * 3


@pytest.mark.parametrize(
    ("strategy", "codec"),
    [("allreduce", c) for c in LOSSY]
    + [("local-sgd:every=2", c) for c in ("sign", "qsgd", "powersgd:rank=2")],
)
@pytest.mark.sampled(2)
def test_a_compressed_run_resumes_bit_for_bit(
    run_inproc: RunInproc, tmp_path: Path, strategy: str, codec: str
) -> None:
    """The checkpoint holds the residuals, the velocities and the random draws."""
    assert resumes_exactly(run_inproc, tmp_path, strategy, codec)


def resumes_exactly(run_inproc: RunInproc, tmp_path: Path, strategy: str, codec: str) -> bool:
    options = {"strategy": strategy, "workers": 2, "lr": 0.05, "codec": codec}
    whole = run_inproc(**options, steps=12)
    out = str(tmp_path / "interrupted")
    run_inproc(**options, steps=6, checkpoint_every=6, out=out)
    return identical(run_inproc(**options, steps=12, resume=out, out=out).weights, whole.weights)


@pytest.mark.parametrize("strategy", ["ps", "gossip"])
@pytest.mark.parametrize("codec", ["qsgd", "topk:ratio=0.2,warmup=9", "powersgd", "sign"])
@pytest.mark.sampled(3)
def test_pairs_resume_bit_for_bit(
    run_inproc: RunInproc, tmp_path: Path, strategy: str, codec: str
) -> None:
    """The checkpoint holds each side's copy of the other's weights, and the codecs' states."""
    assert resumes_exactly(run_inproc, tmp_path, strategy, codec)


def test_another_codec_is_another_run(run_inproc: RunInproc, tmp_path: Path) -> None:
    out = str(tmp_path / "run")
    run_inproc(strategy="allreduce", workers=2, steps=4, checkpoint_every=4, out=out)
    with pytest.raises(BadRequest, match="another codec"):
        run_inproc(strategy="allreduce", workers=2, steps=8, codec="sign", resume=out, out=out)


@pytest.mark.parametrize("codec", ["fp16", "qsgd:bits=8", "int8"])
def test_local_steps_begin_where_averaging_every_step_ended(
    run_inproc: RunInproc, codec: str
) -> None:
    """With `post`, differences are taken from the weights at step `post`, not from the start."""
    plain = run_inproc(strategy="local-sgd:every=2,post=8", workers=2, steps=12, lr=0.05)
    coded = run_inproc(
        strategy="local-sgd:every=2,post=8", workers=2, steps=12, lr=0.05, codec=codec
    )
    assert weights_distance(plain.weights, coded.weights) < 0.05
    with pytest.raises(BadRequest, match="post=8 has momentum after the codec"):
        run_inproc(strategy="local-sgd:post=8", workers=2, steps=2, codec="sign")


def two_kinds() -> torch.nn.Module:
    """Parameters of two dtypes, and a buffer of complex numbers: three regions."""

    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Linear(6, 8), torch.nn.Linear(8, 3).double()
            self.register_buffer("turns", torch.ones(2, dtype=torch.complex64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(torch.tanh(self.first(x)).double()).float()

    return Two()


@pytest.mark.parametrize("codec", ["threshold:times=1", "int8"])
@pytest.mark.parametrize("strategy", ["allreduce", "ps", "gossip", "local-sgd:every=2"])
@pytest.mark.sampled(3)
def test_models_of_several_dtypes(run_inproc: RunInproc, strategy: str, codec: str) -> None:
    run = run_inproc(model=two_kinds, strategy=strategy, workers=3, codec=codec, epochs=6, lr=0.05)
    assert run.test_accuracy > 0.8


def test_overlap_needs_gradients_as_they_are(run_inproc: RunInproc) -> None:
    with pytest.raises(BadRequest, match="overlap=on: codec sign needs all gradients at once"):
        run_inproc(
            strategy="allreduce", workers=2, codec="sign", overlap="on", transport="gloo", steps=1
        )


def test_a_compressed_server_resumes(run_inproc: RunInproc, tmp_path: Path) -> None:
    options = {"strategy": "ps", "workers": 2, "lr": 0.05, "codec": "topk:ratio=0.2"}
    out = str(tmp_path / "interrupted")
    run_inproc(**options, steps=8, checkpoint_every=8, out=out)
    assert run_inproc(**options, epochs=10, resume=out, out=out).test_accuracy > 0.8


def test_gossip_keeps_the_sum_whatever_a_codec_leaves_out(run_inproc: RunInproc) -> None:
    """With lr 0 all workers keep the same weights, so averaging through a codec changes nothing."""
    start = run_inproc(strategy="gossip", workers=4, steps=1, lr=0.0, batch_size=4)
    later = run_inproc(strategy="gossip", workers=4, steps=6, lr=0.0, batch_size=4, codec="sign")
    assert weights_distance(start.weights, later.weights) < 1e-6


def test_unknown_codecs_are_refused_with_the_nearest() -> None:
    from paceline.registry import strategies

    with pytest.raises(BadRequest, match="topk"):
        codec_for(strategies.build("allreduce"), "topkk")
