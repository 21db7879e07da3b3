"""A model that is split trains like one in one piece: every form, model, cut and grid."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import paceline
from paceline.errors import BadRequest
from paceline.registry import models
from paceline.run import rank

Make = Callable[[], nn.Module]
SHAPE = (1, 28, 28)


def samples(rows: int = 41, shape: tuple[int, ...] = SHAPE) -> Any:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(rows, *shape, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, 5, (rows,), generator=generator)
    return ((inputs, targets), (inputs[:16], targets[:16]))


def model(name: str, shape: tuple[int, ...] = SHAPE) -> Make:
    def make() -> nn.Module:
        built: nn.Module = models.build(name, input_shape=shape, classes=5)
        return built.double()

    return make


def normed() -> nn.Module:
    """Strides, paddings, dilation, pooling with overlap, and batch norm."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, padding=1),
        nn.Conv2d(4, 6, 3, padding=2, dilation=2),
        nn.AvgPool2d(2, 1),
        nn.Dropout2d(0.2),
        nn.Flatten(),
        nn.Linear(6 * 6 * 6, 5),
    ).double()


MODELS: dict[str, Make] = {
    "cnn": model("cnn"),
    "mlp": model("mlp:hidden=12x9x7x6,dropout=0.2"),
    "transformer": model("transformer:width=16,blocks=2,dropout=0.2"),
    "normed": normed,
}


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., paceline.Run]:
    made = iter(range(1000))

    def run(net: Make, **options: Any) -> paceline.Run:
        given: dict[str, Any] = {
            "data": samples(48), "steps": 30, "batch_size": 12, "lr": 0.02, "seed": 3,
            "transport": "inproc", "out": str(tmp_path / str(next(made))), "progress": False,
        }  # fmt: skip
        return paceline.train(model=net, **{**given, **options})

    return run


WHOLE: dict[str, paceline.Run] = {}  # runs in one piece, which several tests compare with


@pytest.fixture
def one_piece(
    train: Callable[..., paceline.Run], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., paceline.Run]:
    def run(net: str, **options: Any) -> paceline.Run:
        key = f"{net} {sorted(options.items())}"
        if key not in WHOLE:
            out = str(tmp_path_factory.mktemp("whole") / "run")
            WHOLE[key] = train(MODELS[net], parallel="layers:stages=1", out=out, **options)
        return WHOLE[key]

    return run


def apart(one: paceline.Run, other: paceline.Run) -> float:
    """The largest difference between the weights of two runs."""
    first, second = one.model.state_dict(), other.model.state_dict()
    assert list(first) == list(second)
    return max(float((first[name] - second[name]).abs().max()) for name in first)


QUICK = [
    ("cnn", "pipeline:micro=5", 3), ("cnn", "tensor", 2), ("cnn", "domain", 3),
    ("mlp", "pipeline:schedule=interleaved,micro=4", 2),
    ("mlp", "pipeline:schedule=zero-bubble,micro=4", 3), ("transformer", "tensor", 2),
    ("normed", "domain", 4),
]  # fmt: skip
MORE = [
    ("cnn", "layers", 2), ("cnn", "tensor", 3), ("cnn", "tensor", 4), ("cnn", "domain", 2),
    ("cnn", "domain", 4), ("cnn", "layers", 4), ("mlp", "layers", 4), ("mlp", "tensor", 3),
    ("mlp", "pipeline:schedule=gpipe,micro=4", 4), ("mlp", "tensor", 4), ("mlp", "layers", 3),
    ("transformer", "pipeline:micro=3", 2), ("transformer", "tensor", 3),
    ("transformer", "tensor", 4), ("transformer", "pipeline:micro=4,schedule=zero-bubble", 4),
    ("normed", "domain", 2), ("normed", "domain", 3), ("normed", "tensor", 2),
    ("normed", "layers", 3),
]  # fmt: skip


@pytest.mark.parametrize(
    ("net", "form", "parts"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)],
)
def test_30_steps_are_those_of_one_piece(
    train: Callable[..., paceline.Run],
    one_piece: Callable[..., paceline.Run],
    net: str,
    form: str,
    parts: int,
) -> None:
    """With dropout: its masks do not depend on who computes."""
    whole = one_piece(net)
    split = train(MODELS[net], parallel=form, workers=parts)
    assert apart(whole, split) < 1e-10
    assert split.test_loss == pytest.approx(whole.test_loss, abs=1e-10)
    one, other = (run.record["result"] for run in (whole, split))
    assert abs(one["train_loss"] - other["train_loss"]) < 1e-9
    assert one["samples"] == pytest.approx(other["samples"])  # not once per worker


def test_the_comparison_sees_a_wrong_mask(train: Callable[..., paceline.Run]) -> None:
    """The tests above would notice: with other masks the weights are elsewhere."""
    one = train(MODELS["cnn"], parallel="layers:stages=1", steps=3)
    other = train(MODELS["cnn"], steps=3, strategy="serial")  # PyTorch's own dropout
    assert apart(one, other) > 1e-6


@pytest.mark.parametrize(
    ("form", "strategy"),
    [
        ("pipeline:micro=2", "allreduce:collective=ring"),
        pytest.param("tensor", "ring-reduce", marks=pytest.mark.slow),
        ("domain", "local-sgd:every=1"),
        pytest.param("layers", "allreduce:exchange=weights", marks=pytest.mark.slow),
    ],
)
def test_grids_are_serial_training_on_the_union(
    train: Callable[..., paceline.Run],
    one_piece: Callable[..., paceline.Run],
    form: str,
    strategy: str,
) -> None:
    grid = f"data=2,{form.partition(':')[0]}=2"
    split = train(MODELS["cnn"], parallel=form, grid=grid, strategy=strategy, batch_size=6)
    assert split.record["config"]["workers"] == 4
    assert apart(one_piece("cnn"), split) < 1e-10


@pytest.mark.parametrize(
    "strategy",
    ["local-sgd:every=3", "diloco:every=2"],
)
def test_strategies_along_the_copies_are_those_of_whole_models(
    train: Callable[..., paceline.Run], strategy: str
) -> None:
    net = model("mlp:hidden=12x8")  # without dropout
    options = {"strategy": strategy, "batch_size": 6, "steps": 8}
    copies = train(net, workers=2, **options)
    split = train(net, grid="data=2,tensor=2", **options)
    assert apart(copies, split) < 1e-12


@pytest.mark.parametrize("codec", ["fp16", "topk:ratio=0.5"])
def test_codecs_along_the_copies(
    train: Callable[..., paceline.Run], one_piece: Callable[..., paceline.Run], codec: str
) -> None:
    split = train(MODELS["mlp"], grid="data=2,pipeline=2", codec=codec, batch_size=6, steps=6)
    assert 1e-12 < apart(one_piece("mlp", steps=6), split) < 0.1


def test_uneven_cuts_by_hand(
    train: Callable[..., paceline.Run], one_piece: Callable[..., paceline.Run]
) -> None:
    for cut in ("3", "11"):
        split = train(MODELS["cnn"], parallel="pipeline:micro=3", cut=cut, workers=2, steps=6)
        assert apart(one_piece("cnn", steps=6), split) < 1e-12
        assert split.record["workers"][1]["split"]["cut"] == [cut]


def test_batch_norm_in_a_pipeline_is_that_of_micro_batches(
    train: Callable[..., paceline.Run],
) -> None:
    """The reference is one worker with the same micro-batches."""
    whole = train(MODELS["normed"], parallel="pipeline:stages=1,micro=3", steps=8)
    split = train(MODELS["normed"], parallel="pipeline:stages=3,micro=3", steps=8)
    assert apart(whole, split) < 1e-10


@pytest.mark.parametrize(
    "options",
    [
        {"clip_norm": 0.05},
        {"accumulate": 2},
        {"optimizer": "adamw", "weight_decay": 0.1},
        {"groups": ("*.bias:lr=0.5",)},
        {"lr_schedule": "cosine"},
    ],
    ids=lambda options: next(iter(options)),
)
@pytest.mark.parametrize("form", ["pipeline:micro=2", "tensor", "domain"])
@pytest.mark.sampled(2)
def test_options_mean_the_same(
    train: Callable[..., paceline.Run],
    one_piece: Callable[..., paceline.Run],
    form: str,
    options: dict[str, Any],
) -> None:
    split = train(MODELS["cnn"], parallel=form, workers=2, steps=4, **options)
    assert apart(one_piece("cnn", steps=4, **options), split) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "reference"),
    [
        ("pipeline:stages=2,micro=2", "pipeline:stages=1,micro=2"),
        ("layers:stages=3", "layers:stages=1"),
        ("domain", "layers:stages=1"),
    ],
)
def test_resnet_50_trains_like_one_piece(
    train: Callable[..., paceline.Run], form: str, reference: str
) -> None:
    """Batch norm over few numbers makes a rounding grow from step to step, so the yardstick is how
    far apart the last bit of the inputs brings two runs in one piece.
    """
    net, data = model("resnet50", (3, 64, 64)), samples(12, (3, 64, 64))
    (inputs, targets), test = data
    options: dict[str, Any] = {"steps": 3, "batch_size": 6, "lr": 0.01}
    whole = train(net, parallel=reference, data=data, **options)
    nudged = ((inputs * (1 + 2**-52), targets), test)
    rounding = apart(whole, train(net, parallel=reference, data=nudged, **options))
    workers = 3 if "3" in form else 2
    split = train(net, parallel=form, workers=workers, data=data, **options)
    assert apart(whole, split) < 10 * rounding < 1e-6


# --- checkpoints are those of the whole model


@pytest.mark.parametrize("optimizer", [pytest.param("momentum", marks=pytest.mark.slow), "adam"])
def test_saved_by_any_form_and_resumed_by_any_other(
    train: Callable[..., paceline.Run], tmp_path: Path, optimizer: str
) -> None:
    steps = {"steps": 8, "optimizer": optimizer, "lr": 0.01}
    whole = train(MODELS["cnn"], parallel="layers:stages=1", **steps)
    out, at = tmp_path / "travels", 0
    stations = ["pipeline:stages=2,micro=3", "tensor", "domain", "layers:stages=1"]
    for number, form in enumerate(stations):
        at += 2
        workers = 1 if form.endswith("=1") else 2
        again = {"resume": str(out)} if number else {"out": str(out)}
        run = train(
            MODELS["cnn"], parallel=form, workers=workers, checkpoint_every=2,
            **{**steps, "steps": at}, **again,
        )  # fmt: skip
    assert apart(whole, run) < 1e-12


def test_a_checkpoint_of_copies_is_resumed_by_a_form(
    train: Callable[..., paceline.Run], tmp_path: Path
) -> None:
    net = model("mlp")  # without dropout
    whole = train(net, strategy="serial", steps=8)
    out = str(tmp_path / "copies")
    train(net, strategy="allreduce", workers=2, batch_size=6, steps=4, checkpoint_every=4, out=out)
    split = train(net, parallel="tensor", workers=2, steps=8, resume=out)
    assert apart(whole, split) < 1e-12


@pytest.mark.parametrize("form", ["tensor", "domain"])
def test_copies_in_channels_last_go_on_as_a_split_model(
    train: Callable[..., paceline.Run], tmp_path: Path, form: str
) -> None:
    """Copies of a network of convolutions are usually faster in channels_last, and take it."""

    def net() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 26 * 26, 5)
        ).double()

    whole = train(net, strategy="serial", steps=8, memory_format="contiguous")
    out = str(tmp_path / "copies")
    copies = train(
        net, strategy="allreduce", workers=2, batch_size=6, steps=4, checkpoint_every=4, out=out,
        memory_format="channels_last",
    )  # fmt: skip
    assert copies.record["config"]["memory_format"] == "channels_last"
    split = train(net, parallel=form, workers=2, steps=8, resume=out)
    assert apart(whole, split) < 1e-12
    assert split.record["config"]["memory_format"] == "contiguous"


@pytest.mark.parametrize("form", ["tensor", "pipeline:stages=2,micro=3"])
def test_a_checkpoint_of_a_form_is_resumed_by_copies(
    train: Callable[..., paceline.Run], tmp_path: Path, form: str
) -> None:
    net, adam = model("mlp"), {"optimizer": "adam", "lr": 0.01}
    whole = train(net, strategy="serial", steps=8, **adam)
    out = tmp_path / "split"
    train(net, parallel=form, workers=2, steps=4, checkpoint_every=4, out=str(out), **adam)
    [saved] = (out / "checkpoints").glob("step-*")
    kept = load_file(saved / "optimizer.safetensors")
    shapes = {name: p.shape for name, p in net().named_parameters()}
    assert {name.rpartition("/")[0] for name in kept} == shapes.keys()
    assert all(t.shape == shapes[name.rpartition("/")[0]] for name, t in kept.items())
    again = train(
        net, strategy="serial", workers=1, parallel="none", steps=8, resume=str(out), **adam
    )
    assert apart(whole, again) < 1e-12


def test_workers_of_a_pipeline_build_only_their_own_layers(
    train: Callable[..., paceline.Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the weights are those of a plain build, also where it initialises all at the end."""

    def net() -> nn.Module:
        layers = nn.Sequential(nn.Flatten(), nn.Linear(784, 8), nn.Tanh(), nn.Linear(8, 5)).double()
        for layer in layers:
            if isinstance(layer, nn.Linear):
                nn.init.trunc_normal_(layer.weight, std=0.2)
        return layers

    built: list[int] = []
    plain = rank.with_only

    def noted(*given: Any) -> nn.Module:
        found = plain(*given)
        built.append(sum(p.numel() for p in found.parameters() if not p.is_meta))
        return found

    monkeypatch.setattr(rank, "with_only", noted)
    whole = train(net, parallel="layers:stages=1", steps=4)
    built.clear()
    split = train(net, parallel="pipeline:stages=2,micro=3", workers=2, steps=4)
    assert sorted(built) == [8 * 5 + 5, 784 * 8 + 8]
    assert apart(whole, split) < 1e-12


# --- what cannot be split says so


class Tutorial(nn.Module):
    """The network of PyTorch's tutorial: its forward is Python code."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 5)
        self.fc1 = nn.Linear(6 * 12 * 12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.max_pool2d(nn.functional.relu(self.conv1(x)), 2)
        return self.fc1(torch.flatten(x, 1))  # type: ignore[no-any-return]


def tied() -> nn.Module:
    made = nn.Sequential(nn.Flatten(), nn.Linear(784, 784), nn.Linear(784, 784), nn.Linear(784, 5))
    made[2].weight = made[1].weight
    return made.double()


@pytest.mark.parametrize(
    ("net", "options", "sentence"),
    [
        (Tutorial, {"parallel": "layers", "workers": 2}, r"Tutorial cannot be cut: .*conv1, fc1"),
        (tied, {"parallel": "layers:cut=2", "workers": 2}, r"1.weight and 2.weight are one param"),
        (MODELS["cnn"], {"parallel": "layers", "workers": 5}, "5 stages for 4 layers with weights"),
        (MODELS["mlp"], {"parallel": "domain", "workers": 2}, "first layer cannot: Flatten is no"),
        (MODELS["cnn"], {"parallel": "pipline", "workers": 2}, "pipeline"),
        (MODELS["cnn"], {"parallel": "pipeline:schedule=2f", "workers": 2}, "timetable"),
        (MODELS["cnn"], {"parallel": "pipeline:micro=0", "workers": 2}, "micro=0: 1 or more"),
        (MODELS["cnn"], {"parallel": "pipeline:stages=2", "workers": 3}, "do not divide them"),
        (MODELS["cnn"], {"parallel": "tensor"}, "over how many workers the model is split"),
        (MODELS["cnn"], {"parallel": "pipeline:micro=2"}, "over how many workers"),
        (MODELS["cnn"], {"grid": "data=2"}, "splits nothing"),
        (MODELS["cnn"], {"grid": "data=2,tensor=2,domain=2"}, "two axes"),
        (MODELS["cnn"], {"grid": "data=x,tensor=2"}, "each axis once with its size"),
        (MODELS["cnn"], {"grid": "rows=2"}, "axis of a grid"),
        (MODELS["cnn"], {"cut": "3"}, "it needs `parallel`"),
        (MODELS["cnn"], {"parallel": "tensor", "workers": 2, "cut": "3"}, "does not cut a model"),
        (MODELS["cnn"], {"parallel": "layers", "workers": 2, "cut": "99"}, "is no layer"),
        (MODELS["cnn"], {"parallel": "layers", "workers": 2, "cut": "1"}, None),
        (MODELS["cnn"], {"parallel": "layers", "workers": 2, "cut": "3,6"}, "need 1 cuts"),
        (MODELS["cnn"], {"parallel": "layers", "workers": 3, "cut": "4,5"}, "no weights to train"),
        (MODELS["cnn"], {"parallel": "tensor", "workers": 2, "strategy": "ps"}, "keep in step"),
        (MODELS["cnn"], {"parallel": "tensor", "workers": 2, "strategy": "psgd"}, "keep in step"),
        (MODELS["cnn"], {"parallel": "tensor", "workers": 2, "ema": 0.9}, "ema cannot be used"),
        (
            MODELS["cnn"],
            {"parallel": "tensor", "workers": 2, "privacy": "noise=1,clip=1,delta=1e-5"},
            "privacy cannot be used",
        ),
    ],
)
def test_bad_input_is_one_sentence(
    train: Callable[..., paceline.Run], net: Make, options: dict[str, Any], sentence: str | None
) -> None:
    if sentence is None:
        assert train(net, steps=1, **options).record["status"] == "completed"
        return
    with pytest.raises(BadRequest, match=sentence) as caught:
        train(net, steps=1, **options)
    assert "\n" not in str(caught.value)


def test_workers_hold_a_part_each(train: Callable[..., paceline.Run]) -> None:
    """Parameters per worker: what a worker has is about its share of the whole."""
    wide = model("mlp:hidden=64x64")
    whole = sum(p.numel() for p in wide().parameters())
    for form in ("tensor", "pipeline:micro=2"):
        run = train(wide, parallel=form, workers=2, steps=2)
        held = [w["parameters"] for w in run.record["workers"]]
        assert sum(held) >= whole
        if form == "tensor":
            assert max(held) <= 0.55 * whole


@pytest.mark.parametrize("form", ["pipeline:micro=2", "tensor", "domain"])
def test_bf16_is_near_the_whole_model_in_bf16(
    train: Callable[..., paceline.Run], form: str
) -> None:
    def net() -> nn.Module:
        return model("cnn:dropout=0")().float()

    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(24, *SHAPE, generator=generator)
    data = (inputs, torch.randint(0, 5, (24,), generator=generator))
    options = {"data": (data, data), "precision": "bf16", "steps": 4}
    whole = train(net, parallel="layers:stages=1", **options)
    split = train(net, parallel=form, workers=2, **options)
    assert apart(whole, split) < 2e-3  # sums in another order, of numbers with 8 bits
